"""What other projects, and other ways of ours, do with the same input."""
