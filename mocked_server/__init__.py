"""Stands in for the model API that agents call, on vLLM's own serving code, and records every round exactly."""
