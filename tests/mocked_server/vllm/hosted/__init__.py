"""Engines in other processes: as one in this process, and what their deaths look like."""
