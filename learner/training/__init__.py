"""One update: a batch as tensors, packed micro-batches, the ranks that train on them, SFT."""
