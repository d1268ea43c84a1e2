"""Tests of `learner/diagnosis/`: each rule on a run that it must find something in, and on one that is well."""
