"""Task files, the order in which a run takes their rows, and the pool that starts episodes."""
