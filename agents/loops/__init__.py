"""The agent loops that are shipped, and what they are made of."""
