"""Whole runs whose engine is a server of others."""
