"""Tests of mocked_server/fleet."""
