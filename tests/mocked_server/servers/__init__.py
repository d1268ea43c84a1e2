"""Tests of engines that are servers of others."""
