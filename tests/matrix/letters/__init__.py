"""An environment and agent loops of the matrix, which any text pleases more or less."""
