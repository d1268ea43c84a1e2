"""The model on its ranks: forward passes over packed rows, LoRA, FSDP2 and torch.distributed."""
