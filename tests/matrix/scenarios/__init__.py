"""The runs of the matrix: their settings, and the files that they need."""
