"""Tests of the modules in agents/tools/."""
