"""Tests of the modules in learner/algorithms/."""
