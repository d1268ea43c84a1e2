"""Tests of the modules in learner/startup/."""
