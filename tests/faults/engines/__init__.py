"""Engines that die, and what carries weights to them: streams and versions that outlive it."""
