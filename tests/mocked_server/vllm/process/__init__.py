"""Tests of mocked_server/vllm/process."""
