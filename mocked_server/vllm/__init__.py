"""All that touches vLLM: the engine, its HTTP layer with our hooks, and what runs in its process."""
