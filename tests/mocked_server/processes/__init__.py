"""Tests of mocked_server/processes."""
