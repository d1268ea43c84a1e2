"""The matrix: every value, key, column and metric in a real run, with an effect that is asserted (`python -m tests.matrix`)."""
