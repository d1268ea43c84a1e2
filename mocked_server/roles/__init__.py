"""Roles in one episode: which of them a request asks, and models that answer in place of the policy."""
