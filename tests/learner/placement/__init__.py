"""Tests of the modules in learner/placement/."""
