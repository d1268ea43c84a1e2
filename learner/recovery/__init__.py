"""Restarts whatever died, and ends a run that cannot succeed."""
