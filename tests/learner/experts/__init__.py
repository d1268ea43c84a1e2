"""Tests of `learner.model.expert_routing`."""
