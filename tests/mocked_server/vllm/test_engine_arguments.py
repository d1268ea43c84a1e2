"""What an engine is built from: the keys of `rollout` that become vLLM's arguments, and what a run sets itself."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Lfm2Config
from vllm.config import ModelConfig

from buffers.errors import EngineError
from configs.load import ConfigError, load_config
from configs.rules import OWNED
from configs.schema import RolloutConfig, ServerConfig
from mocked_server.vllm import engine_arguments
from mocked_server.vllm.engine_arguments import (
    RECORDS_EXPERTS,
    EngineSettings,
    check_engine_args,
    make_args,
    make_vllm_config,
    words_of,
)


def settings(folder, *, beside_rank=True, **rollout):
    return EngineSettings(
        model_path=folder,
        served_name="policy",
        dtype="float32",
        rollout=RolloutConfig(**rollout),
        server=ServerConfig(),
        beside_rank=beside_rank,
    )


def test_vllms_own_names_and_values_reach_its_configuration(tiny_model):
    given = {"max_num_batched_tokens": 3000, "enable_prefix_caching": False, "scheduling-policy": "priority"}
    config = make_vllm_config(make_args(settings(tiny_model, engine_args=given)))
    assert config.scheduler_config.max_num_batched_tokens == 3000
    assert config.cache_config.enable_prefix_caching is False
    assert config.scheduler_config.policy == "priority"


def test_prefix_caching_is_off_for_mamba2_without_a_gpu_and_stays_what_a_user_said(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "mamba2", "state_size": 8, "chunk_size": 8, "n_groups": 1}')
    assert make_args(settings(tmp_path)).enable_prefix_caching is False
    assert make_args(settings(tmp_path, engine_args={"enable-prefix-caching": True})).enable_prefix_caching is True
    monkeypatch.setattr(engine_arguments, "has_gpu", lambda: True)
    assert make_args(settings(tmp_path)).enable_prefix_caching is not False


def test_the_cache_of_a_cpu_has_small_blocks_where_vllm_takes_them(tiny_model, tmp_path):
    """Only whole blocks are shared. Those of a hybrid follow from its states."""

    def block(folder, **given):
        return make_vllm_config(make_args(settings(folder, **given))).cache_config.block_size

    assert (block(tiny_model), block(tiny_model, engine_args={"block_size": 64})) == (32, 64)
    hybrid = shutil.copytree(tiny_model, tmp_path / "hybrid")
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "hidden_size": 64, "vocab_size": 512}
    Lfm2Config(**layers, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128).save_pretrained(hybrid)
    fields = json.loads((hybrid / "config.json").read_text()) | {"architectures": ["Lfm2ForCausalLM"]}
    (hybrid / "config.json").write_text(json.dumps(fields))
    assert block(hybrid) == 128


def test_experts_are_recorded_by_vllm_on_a_gpu_and_by_us_on_a_cpu(tiny_model, monkeypatch):
    own = replace(settings(tiny_model), router_replay=True)
    args = make_args(own)
    assert args.additional_config == {RECORDS_EXPERTS: True} and args.enable_prefix_caching is False
    assert not args.enable_return_routed_experts
    monkeypatch.setattr(engine_arguments, "has_gpu", lambda: True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    args = make_args(own)
    assert args.enable_return_routed_experts and os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert not args.additional_config and not make_args(settings(tiny_model)).enable_return_routed_experts


def test_a_folders_own_code_is_run_only_where_the_run_says_so(tiny_model):
    assert make_args(settings(tiny_model)).trust_remote_code is False
    assert make_args(replace(settings(tiny_model), trust_remote_code=True)).trust_remote_code is True


def test_a_model_that_needs_torchvision_is_refused_with_the_build_that_fits(tiny_model, monkeypatch):
    args = make_args(settings(tiny_model))
    monkeypatch.setattr(engine_arguments, "find_spec", lambda _: None)
    monkeypatch.setattr(ModelConfig, "__post_init__", _not_inspected)
    with pytest.raises(EngineError, match=r"needs the package torchvision, got none; .* pip install torchvision=="):
        make_vllm_config(args)


def _not_inspected(*_, **__):
    raise ValueError("Model architectures ['Qwen3_5ForCausalLM'] failed to be inspected. Please check the logs")


def test_a_mapping_reaches_vllm_as_one(tiny_model):
    args = make_args(
        settings(tiny_model, engine_args={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}})
    )
    assert args.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}


def test_in_half_precision_the_logits_are_float32_and_a_users_overrides_stay(tiny_model):
    half = replace(settings(tiny_model), dtype="bfloat16")
    assert make_vllm_config(make_args(half)).model_config.head_dtype == torch.float32
    mine = RolloutConfig(engine_args={"hf-overrides": {"max_position_embeddings": 4096, "head_dtype": "model"}})
    model = make_vllm_config(make_args(replace(half, rollout=mine))).model_config
    assert model.hf_config.max_position_embeddings == 4096 and model.head_dtype == torch.bfloat16
    assert not make_args(settings(tiny_model)).hf_overrides
    with pytest.raises(EngineError, match="hf_overrides must be a mapping"):
        make_args(replace(half, rollout=RolloutConfig(engine_args={"hf_overrides": "float32"})))


def test_values_are_words_as_on_vllms_command_line():
    given = {"a_b": True, "c": False, "d": [1, "x"], "e": {"f": [0.5]}, "g": -1, "h": None}
    assert words_of(given) == ["--a-b", "--no-c", "--d", "1", "x", '--e={"f": [0.5]}', "--g=-1", "--h=None"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quantisation": "fp8"}, "unrecognized arguments: --quantisation=fp8"),
        ({"quant": "fp8"}, "unrecognized arguments: --quant=fp8"),
        ({"max_num_batched_tokens": "many"}, "argument --max-num-batched-tokens"),
        ({"scheduling_policy": "luck"}, "invalid choice: 'luck'"),
        ({"port": 8000}, "port is of vLLM's HTTP server"),
    ],
)
def test_what_vllm_does_not_take_is_refused_in_its_words(tmp_path, given, words):
    with pytest.raises(EngineError, match=re.escape(words)) as refusal:
        make_args(settings(tmp_path, engine_args=given))
    assert str(refusal.value).startswith("rollout.engine_args must be") and "\n" not in str(refusal.value)


def test_a_configuration_that_vllm_refuses_is_refused_in_its_words(tiny_model):
    with pytest.raises(EngineError, match="max_num_batched_tokens") as refusal:
        check_engine_args(
            settings(tiny_model, engine_args={"max_num_batched_tokens": 8, "enable_chunked_prefill": False})
        )
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "name", ["logprobs_mode", "served-model-name", "worker_extension_cls", "no_disable_log_stats", "data_parallel_size"]
)
def test_what_the_run_owns_is_refused_by_name_before_vllm_is_imported(name):
    with pytest.raises(ConfigError, match=f"rollout.engine_args must not name what the run sets itself, got '{name}'"):
        load_config(overrides=[f"rollout.engine_args={{{name}: 1}}"])


def test_names_are_words_of_vllms(tmp_path):
    """`seed=1 --model` would be two arguments."""
    with pytest.raises(ConfigError, match="engine_args"):
        load_config(overrides=['rollout.engine_args={"seed=1": 1}'])


def test_all_that_the_run_sets_is_owned(tmp_path, monkeypatch):
    """Each argument that differs from vLLM's default without `rollout.engine_args`."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    defaults = vars(make_arg_parser(FlexibleArgumentParser()).parse_args([]))
    for gpu in (True, False):
        monkeypatch.setattr(engine_arguments, "has_gpu", lambda gpu=gpu: gpu)
        ours = vars(make_args(replace(settings(tmp_path, sleep=True, kv_cache_gb=1.0), lora_rank=8)))
        differ = {name for name in ours if repr(ours[name]) != repr(defaults[name])}
        assert differ - set(OWNED) <= {"enforce_eager", "model_tag"}
        assert len(differ) > 10


def test_every_owned_name_is_one_of_vllms():
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    options = {
        word.removeprefix("--").replace("-", "_") for action in parser._actions for word in action.option_strings
    }
    assert sorted(set(OWNED) - options) == []


@pytest.mark.parametrize(
    ("beside_rank", "key", "share"), [(True, None, 0.4), (False, None, 0.9), (True, 0.55, 0.55), (False, 0.55, 0.55)]
)
def test_an_engine_takes_its_share_of_a_card(tmp_path, monkeypatch, beside_rank, key, share):
    monkeypatch.setattr(engine_arguments, "has_gpu", lambda: True)
    args = make_args(settings(tmp_path, beside_rank=beside_rank, gpu_memory_utilization=key, tensor_parallel=2))
    assert (args.gpu_memory_utilization, args.tensor_parallel_size) == (share, 2)


def test_an_engine_on_a_cpu_is_on_one(tmp_path):
    with pytest.raises(EngineError, match=r"rollout.tensor_parallel must be 1 without a GPU, got 2"):
        make_args(settings(tmp_path, tensor_parallel=2))


def test_a_template_that_shows_no_calls_or_fails_gives_no_tool_parser(tiny_model, tmp_path):
    assert make_args(settings(tiny_model)).tool_call_parser == "hermes"
    off = replace(settings(tiny_model), server=ServerConfig(tool_parser=None))
    assert make_args(off).tool_call_parser is None and not make_args(off).enable_auto_tool_choice
    for number, template in enumerate(("{{ messages[0].content }}", "{{ 1 // 0 }}", "{% for", "{{ f() }}")):
        folder = tmp_path / str(number)
        shutil.copytree(tiny_model, folder)
        (folder / "chat_template.jinja").write_text(template)
        assert make_args(settings(folder)).tool_call_parser is None, template


def test_mistrals_own_tokenizer_gives_no_tool_parser(tiny_model, tmp_path):
    """It has its template in code, which refuses to end with an answer by an exception of its own."""
    import mistral_common

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    shutil.copy(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json", folder / "tekken.json")
    fields = json.loads((folder / "config.json").read_text()) | {"model_type": "mistral"}
    (folder / "config.json").write_text(json.dumps(fields))
    assert type(AutoTokenizer.from_pretrained(folder)).__name__ == "MistralCommonBackend"
    assert make_args(settings(folder)).tool_call_parser is None
