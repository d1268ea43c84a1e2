"""The engine's processes: how they start, what of ours runs in them, and how it is seen that they make progress."""
