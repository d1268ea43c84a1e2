"""Tests of `learner.experts`."""
