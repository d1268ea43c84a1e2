"""Tests of the modules in buffers/tasks/."""
