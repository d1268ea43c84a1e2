"""A vLLM engine in a process of its own, here or on another machine, which serves its token streams over the wire."""
