"""The sizes of a model, read from its config.json: no weights are read, and none need be there.

Called by `learner.run` for the plan of a run. transformers builds the model without memory (on the device `meta`), so that the
counts are those of the model that will be loaded, whatever its architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Counts of numbers, not of bytes."""

    parameters: int
    """All weights; tied ones count once."""
    outside_layers: int
    """Those outside of the decoder layers: embeddings, output matrix, last norm."""
    largest_layer: int
    layers: int
    hidden: int
    intermediate: int
    """Width of a layer's feed-forward part; of experts, those that a token uses together."""
    heads: int
    queries: int
    """Width of all query heads together."""
    kv_heads: int
    keys: int
    """Width of all key heads together; that of the values is the same."""
    vocabulary: int
    linear_features: int
    """Input and output widths of all linear layers that LoRA adapts, added: an adapter of rank r has r times so many weights."""

    def cache_bytes(self, *, tensor_parallel: int, bytes_each: int) -> int:
        """KV cache of one token on one of the engine's cards. Heads that cannot be divided any more are on several."""
        if not self.kv_heads:
            return 0
        heads = max(1, self.kv_heads // tensor_parallel)
        return 2 * self.layers * (self.keys // self.kv_heads) * heads * bytes_each


def read_shape(folder: Path, *, trust_remote_code: bool = False) -> ModelShape:
    """Raises UnderstudyError for a folder without a config.json that transformers knows."""
    if folder.suffix != ".gguf" and not (folder / "config.json").is_file():
        raise UnderstudyError(
            f"model.path must name a folder with a config.json, got {folder} without one; name one that has it, or a model of "
            f"the Hugging Face hub (OWNER/NAME)"
        )
    import torch
    from torch import nn

    from learner.model.layers import experts_per_token, heads_of, layers_of, told
    from learner.model.load import model_of

    try:
        with torch.device("meta"):
            lm: Any = model_of(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise UnderstudyError(
                f"model.trust_remote_code must be true for {folder}, whose config names code of its own, got false; read it, "
                f"then set model.trust_remote_code=true"
            ) from error
        raise UnderstudyError(
            f"model.path must name a model that transformers knows, got {folder}: {' '.join(str(error).split())[:300]}"
        ) from error
    text = lm.config.get_text_config()
    layers = layers_of(lm)
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    parameters = sum(weight.numel() for weight in lm.parameters())
    head = lm.get_output_embeddings()
    adapted = [module for module in lm.modules() if isinstance(module, nn.Linear) and module is not head]
    heads = heads_of(text)
    experts = experts_per_token(text)
    wide = (
        (told(text, "moe_intermediate_size") if experts else None)
        or told(text, "intermediate_size")
        or 4 * text.hidden_size
    )
    intermediate = (experts or 1) * (max(wide) if isinstance(wide, list) else wide)
    return ModelShape(
        parameters=parameters,
        outside_layers=parameters - sum(sizes),
        largest_layer=max(sizes),
        layers=len(layers),
        hidden=text.hidden_size,
        intermediate=intermediate,
        heads=heads.queries,
        queries=heads.queries * heads.width,
        kv_heads=heads.keys,
        keys=heads.keys * heads.width,
        vocabulary=text.vocab_size,
        linear_features=sum(module.in_features + module.out_features for module in adapted),
    )
