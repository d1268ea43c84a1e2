"""Versions of the weights as files: how the learner publishes them, and how a node's engines come to have them."""
