"""Tests of the modules in learner/recovery/."""
