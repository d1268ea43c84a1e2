"""Tests of the modules in configs/."""
