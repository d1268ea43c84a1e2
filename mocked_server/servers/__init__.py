"""Inference servers of others as engines of a run: vLLM's and SGLang's HTTP servers, asked with token ids."""
