"""Tests, in folders as what they test; `support` is shared, `project` is of the whole."""
