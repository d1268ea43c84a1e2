"""Tests of the modules in benchmarks/, each run at a small size."""
