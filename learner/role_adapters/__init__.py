"""Roles that are trained as adapters of their own on one base: their batches, updates and versions (`learner.lora.per_role`)."""
