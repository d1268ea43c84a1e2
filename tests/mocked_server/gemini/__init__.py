"""Tests of the modules in mocked_server/gemini/."""
