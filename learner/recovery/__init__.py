"""Restarts parts that died, and ends a run that cannot succeed."""
