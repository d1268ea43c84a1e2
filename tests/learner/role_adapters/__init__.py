"""Tests of the modules in learner/role_adapters/."""
