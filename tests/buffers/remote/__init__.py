"""Tests of the modules in buffers/remote/."""
