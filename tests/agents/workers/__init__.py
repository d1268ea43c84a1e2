"""Tests of the modules in agents/workers/."""
