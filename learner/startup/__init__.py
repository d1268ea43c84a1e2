"""What must be there before a run starts: Ray, model and task files, key files, the opened buffers."""
