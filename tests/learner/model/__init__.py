"""Tests of the modules in learner/model/."""
