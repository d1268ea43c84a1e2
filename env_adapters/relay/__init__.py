"""A game for two roles: its rules, its environment process, and its task files."""
