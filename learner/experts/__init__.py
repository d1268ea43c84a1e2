"""Mixtures of experts: which experts a pass uses, and how evenly."""
