"""Tests of the modules in buffers/ledger/."""
