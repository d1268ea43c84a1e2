"""Turns full batches of scored episodes into a better policy: advantages, losses, FSDP2, the pipeline and the run."""
