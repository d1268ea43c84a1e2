"""Tests of the modules in agents/, and agent loops and tools that only tests use."""
