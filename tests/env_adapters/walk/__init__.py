"""Tests of the modules in env_adapters/walk/."""
