"""The rows of the matrix: what is shown, in which run, by which effect."""
