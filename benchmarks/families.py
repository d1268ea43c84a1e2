"""Small random models of the world's families, made on the spot: transformers' configurations, in sizes that each accepts.

`make_family(name, folder)` writes what a hub folder has. Every weight, bias and buffer is unequal to 0 and 1, so that a scale, a
bias or a norm that is forgotten shows, and far enough from what a game needs that each can learn one: a cap of 3 on the logits of
512 tokens would leave no token more than 0.44. Sizes are those that vLLM's CPU kernels take: heads of 32, gated delta nets with
heads of 128, latent attention of exactly 512 + 64. Used by the tests.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from configs.tiny_model import VOCAB_SIZE, make_tiny_model

WINDOW = 16
"""Tokens that a layer with a sliding window sees."""
CHUNK = 32
"""Tokens of a chunk of a recurrent layer."""
Settings = dict[str, Any]

ENDS: Settings = {"eos_token_id": 505, "pad_token_id": 503, "bos_token_id": 505}
VOCABULARY: Settings = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.1, **ENDS}
HEADS: Settings = {"num_attention_heads": 4, "num_key_value_heads": 2}
NO_WIDTH: Settings = {
    **VOCABULARY, **HEADS, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 2048,
}  # fmt: skip
DENSE: Settings = {**NO_WIDTH, "head_dim": 32}
SLIDING: Settings = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
SLIDING_TWICE: Settings = {
    **SLIDING,
    "num_hidden_layers": 4,
    "layer_types": [*SLIDING["layer_types"], *SLIDING["layer_types"]],
}
EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL: Settings = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: Settings = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
LINEAR: Settings = {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]}
GATED_DELTA: Settings = {
    **LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
CONV: Settings = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
LATENT: Settings = {
    **NO_WIDTH, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}  # fmt: skip
LATENT_EXPERTS: Settings = {**LATENT, **ROUTED, "topk_method": "noaux_tc"}
GRANITE: Settings = {
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
}
HYBRID_MAMBA: Settings = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_chunk_size": CHUNK,
}  # fmt: skip
MAMBA_HEADS: Settings = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "n_groups": 2,
    "chunk_size": CHUNK,
}


def _rope(*sections: int, **more: Any) -> Settings:
    """Positions of three axes."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections), **more}
    return {"rope_parameters": rope}


YARN: Settings = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "original_max_position_embeddings": 1024, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    }
}  # fmt: skip
"""gpt-oss's positions, for 2,048 of them. Its own factor, 32, sharpens attention so much that small updates change much."""
INTERLEAVED: Settings = _rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25)
EYE: Settings = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 16, "out_hidden_size": 128,
    "num_position_embeddings": 64, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN_IMAGES: Settings = {
    "image_token_id": 506,
    "video_token_id": 507,
    "vision_start_token_id": 508,
    "vision_end_token_id": 509,
}
SMALL_EYE: Settings = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64,
    "patch_size": 16,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, Settings]] = {
    "apertus": ("apertus", NO_WIDTH),
    "arcee": ("arcee", NO_WIDTH),
    "bloom": ("bloom", {**VOCABULARY, "hidden_size": 128, "n_layer": 2, "n_head": 4}),
    "cohere": ("cohere", {**NO_WIDTH, "logit_scale": 0.25}),
    "cohere2": ("cohere2", {**DENSE, **SLIDING, "logit_scale": 0.25}),
    "deepseek_v3": ("deepseek_v3", {**LATENT_EXPERTS, "first_k_dense_replace": 1, "scoring_func": "sigmoid"}),
    "deepseek_v3_dense": ("deepseek_v3", {**LATENT_EXPERTS, "first_k_dense_replace": 2, "scoring_func": "sigmoid"}),
    "ernie4_5": ("ernie4_5", DENSE),
    "ernie4_5_moe": ("ernie4_5_moe", {
        **NO_WIDTH, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    }),
    "exaone4": ("exaone4", {**NO_WIDTH, **SLIDING}),
    "falcon_h1": ("falcon_h1", {
        **DENSE, **HYBRID_MAMBA, "mamba_d_ssm": 256, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0,
    }),
    "gemma": ("gemma", DENSE),
    "gemma2": ("gemma2", {
        **DENSE, **SLIDING, "query_pre_attn_scalar": 32, "final_logit_softcapping": 10.0, "attn_logit_softcapping": 8.0,
    }),
    "gemma3": ("gemma3_text", {**DENSE, **SLIDING, "query_pre_attn_scalar": 32}),
    "gemma3_vl": ("gemma3", {
        "text_config": {**DENSE, **SLIDING, "query_pre_attn_scalar": 32},
        "vision_config": {**SMALL_EYE, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4, "image_token_index": 506, "boi_token_index": 507, "eoi_token_index": 508,
    }),
    "gemma3n": ("gemma3n_text", {
        **DENSE, **SLIDING_TWICE, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 32, "laurel_rank": 16, "intermediate_size": [256] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "altup_num_inputs": 2,
    }),
    "gemma4": ("gemma4_text", {
        **DENSE, **SLIDING_TWICE, "global_head_dim": 64, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    }),
    "glm4": ("glm4", DENSE),
    "glm4_moe": ("glm4_moe", {**DENSE, **ROUTED, "first_k_dense_replace": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENT_EXPERTS, "mlp_layer_types": ["dense", "sparse"], "first_k_dense_replace": 1}),
    "gpt2": ("gpt2", {**VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024}),
    "gpt_bigcode": ("gpt_bigcode", {**VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024}),
    "gpt_neox": ("gpt_neox", {**NO_WIDTH, "num_key_value_heads": 4}),
    "gpt_oss": ("gpt_oss", {**DENSE, **SLIDING, **LOCAL, **YARN, "intermediate_size": 128}),
    "granite": ("granite", {**NO_WIDTH, **GRANITE}),
    "granitemoe": ("granitemoe", {**NO_WIDTH, **GRANITE, **LOCAL, "intermediate_size": 64}),
    "granitemoehybrid": ("granitemoehybrid", {
        **NO_WIDTH, **GRANITE, **LOCAL, **HYBRID_MAMBA, "num_hidden_layers": 4, "layer_types": [*["mamba"] * 3, "attention"],
        "intermediate_size": 64, "shared_intermediate_size": 64, "mamba_expand": 2, "position_embedding_type": "rope",
    }),
    "helium": ("helium", DENSE),
    "hunyuan": ("hunyuan_v1_dense", DENSE),
    "hunyuan_moe": ("hunyuan_v1_moe", {**DENSE, "num_experts": 4, "moe_topk": 2}),
    "kimi_linear": ("kimi_linear", {
        **LATENT, **LOCAL, **LINEAR, "q_lora_rank": None, "n_shared_experts": 1, "moe_intermediate_size": 64,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "linear_head_dim": 128, "linear_num_heads": 2,
    }),
    "lfm2": ("lfm2", {
        **NO_WIDTH, **CONV, "block_auto_adjust_ff_dim": False, "conv_dim": 128, "conv_dim_out": 128, "conv_use_xavier_init": True,
        "block_dim": 128, "block_ff_dim": 256, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
    }),
    "lfm2_moe": ("lfm2_moe", {**NO_WIDTH, **CONV, **EXPERTS, "num_dense_layers": 2}),
    "llama": ("llama", {**DENSE, "tie_word_embeddings": True}),
    "llama4": ("llama4_text", {
        **DENSE, "intermediate_size_mlp": 256, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 1,
        "num_hidden_layers": 4, "attention_chunk_size": 128, "interleave_moe_layer_step": 2,
    }),
    "mamba2": ("mamba2", {
        **VOCABULARY, "hidden_size": 128, "num_heads": 8, "head_dim": 32, "state_size": 32, "num_hidden_layers": 2, "n_groups": 1,
        "chunk_size": CHUNK, "expand": 2,
    }),
    "minimax_m2": ("minimax_m2", {
        **DENSE, **LOCAL, "rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True, "intermediate_size": 64,
    }),
    "ministral": ("ministral", {**DENSE, **SLIDING}),
    "ministral3": ("ministral3", DENSE),
    "mistral": ("mistral", {**DENSE, "sliding_window": WINDOW}),
    "mixtral": ("mixtral", {**DENSE, **LOCAL}),
    "nemotron": ("nemotron", DENSE),
    "nemotron_h": ("nemotron_h", {
        **DENSE, **MAMBA_HEADS, **ROUTED, "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        "moe_shared_expert_intermediate_size": 64,
    }),
    "nemotron_h_dense": ("nemotron_h", {
        **DENSE, **MAMBA_HEADS, "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
    }),
    "olmo2": ("olmo2", NO_WIDTH),
    "olmo3": ("olmo3", {**NO_WIDTH, **SLIDING}),
    "olmo_hybrid": ("olmo_hybrid", {
        **NO_WIDTH, **LINEAR, "num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }),
    "olmoe": ("olmoe", {**NO_WIDTH, "num_experts": 4, "num_experts_per_tok": 2}),
    "phi": ("phi", NO_WIDTH),
    "phi3": ("phi3", NO_WIDTH),
    "phimoe": ("phimoe", {**NO_WIDTH, **LOCAL}),
    "qwen2": ("qwen2", {**NO_WIDTH, "tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {**NO_WIDTH, **EXPERTS, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1}),
    "qwen2_5_vl": ("qwen2_5_vl", {
        "text_config": {**NO_WIDTH, **_rope(4, 6, 6)},
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 14, "out_hidden_size": 128,
            "fullatt_block_indexes": [1], "window_size": 56,
        },
        **QWEN_IMAGES,
    }),
    "qwen3": ("qwen3", DENSE),
    "qwen3_5": ("qwen3_5_text", {**DENSE, **GATED_DELTA}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DENSE, **EXPERTS, **GATED_DELTA, "shared_expert_intermediate_size": 64}),
    "qwen3_5_moe_vl": ("qwen3_5_moe", {
        "text_config": {**DENSE, **EXPERTS, **GATED_DELTA, **INTERLEAVED, "shared_expert_intermediate_size": 64},
        "vision_config": EYE, **QWEN_IMAGES,
    }),
    "qwen3_5_vl": ("qwen3_5", {"text_config": {**DENSE, **GATED_DELTA, **INTERLEAVED}, "vision_config": EYE, **QWEN_IMAGES}),
    "qwen3_moe": ("qwen3_moe", {**DENSE, **EXPERTS, "decoder_sparse_step": 1, "norm_topk_prob": True}),
    "qwen3_next": ("qwen3_next", {
        **DENSE, **EXPERTS, **GATED_DELTA, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1,
    }),
    "qwen3_vl": ("qwen3_vl", {
        "text_config": {**DENSE, **_rope(6, 5, 5, mrope_interleaved=True)},
        "vision_config": {**EYE, "deepstack_visual_indexes": [0, 1]}, **QWEN_IMAGES,
    }),
    "seed_oss": ("seed_oss", DENSE),
    "smollm3": ("smollm3", NO_WIDTH),
    "smolvlm": ("smolvlm", {
        "text_config": {**DENSE, "model_type": "llama"}, "vision_config": SMALL_EYE, "scale_factor": 2, "image_token_id": 506,
        "vocab_size": VOCAB_SIZE,
    }),
    "stablelm": ("stablelm", NO_WIDTH),
    "starcoder2": ("starcoder2", NO_WIDTH),
}  # fmt: skip
"""Name -> model type of transformers, and what its configuration is told."""
MOVED = ("e_score_correction_bias", "expert_bias")
"""Buffers that training moves, and that begin at zero."""


def make_family(name: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Writes the family's small model, with the demo's tokenizer, into `folder`. `changes`: of the text configuration.

    About 2 million float32 weights."""
    kind, given = FAMILIES[name]
    settings = json.loads(json.dumps(given))
    settings.get("text_config", settings).update(changes)
    config = AutoConfig.for_model(kind, **settings)
    if "text_config" in settings:
        config.eos_token_id, config.pad_token_id = ENDS["eos_token_id"], ENDS["pad_token_id"]
    auto = AutoModelForImageTextToText if "vision_config" in settings else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm: Any = auto.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in lm.named_parameters():
                if parameter.dim() <= 1 or "sinks" in parameter_name or "bias" in parameter_name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
            for buffer_name, buffer in lm.named_buffers():
                if buffer_name.endswith(MOVED):
                    buffer.add_(0.05 * torch.randn_like(buffer))
    lm.config.dtype = torch.float32
    lm.generation_config = GenerationConfig(eos_token_id=[505, 503], pad_token_id=503)
    shutil.rmtree(folder, ignore_errors=True)
    lm.save_pretrained(folder)
    _write_older_keys(folder / "config.json")
    tiny = make_tiny_model(folder / ".tokenizer")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / file, folder / file)
    shutil.rmtree(tiny)
    return folder


def _write_older_keys(path: Path) -> None:
    """What transformers 4 reads of positions, beside what 5 writes, as most folders of the hub have it."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    text = settings.get("text_config", settings)
    rope = text.get("rope_parameters") or {}
    if "rope_theta" in rope:
        text["rope_theta"] = rope["rope_theta"]
        if rope["rope_type"] == "yarn":
            text["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
