"""Tests of the relay game."""
