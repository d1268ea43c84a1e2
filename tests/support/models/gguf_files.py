"""A GGUF file of a small Llama, made as llama.cpp's converter makes it. Needs the package gguf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.families import make_family

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def make_llama(folder: Path) -> tuple[Path, Path]:
    """A Hugging Face folder, and the file with the same model."""
    import gguf
    from safetensors.numpy import load_file
    from transformers import AutoTokenizer

    source, file = make_family("llama", folder / "llama"), folder / "llama.gguf"
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(str(file), "llama")
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, source, template=AutoTokenizer.from_pretrained(source).chat_template)
    for name, weight in load_file(source / "model.safetensors").items():
        if name not in NAMES:
            _, _, layer, *rest = name.split(".")
            part = PARTS[".".join(rest[:-1])]
            weight = _turned(weight, heads if part == "attn_q" else keys) if part in ("attn_q", "attn_k") else weight
            name = f"blk.{layer}.{part}.weight"
        writer.add_tensor(NAMES.get(name, name), np.ascontiguousarray(weight, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return source, file


def _add_tokenizer(writer: Any, source: Path, *, template: str) -> None:
    told = json.loads((source / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in told["added_tokens"]}
    ids = {**told["model"]["vocab"], **added}
    tokens = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in added else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in told["model"]["merges"]])
    writer.add_eos_token_id(505)
    writer.add_pad_token_id(503)
    writer.add_chat_template(template)


def _turned(weight: Any, heads: int) -> Any:
    """llama.cpp's order of the rows of queries and keys."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
