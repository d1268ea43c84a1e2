"""Tests of the modules in agents/loops/."""
