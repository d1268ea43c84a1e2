"""Tests of the modules in learner/checkpoints/."""
