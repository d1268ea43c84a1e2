"""Tests of the modules in learner/training/."""
