"""Agents and environments of others, each with the package that its users install."""
