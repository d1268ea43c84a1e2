"""Tests of adapters by role: their trainer and their published versions."""
