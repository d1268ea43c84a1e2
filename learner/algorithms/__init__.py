"""The mathematics, as pure functions of tensors: advantages, losses, corrections, KL, penalties."""
