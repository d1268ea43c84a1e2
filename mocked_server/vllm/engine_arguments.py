"""What the engine is built from: vLLM's own arguments, its configuration, and the environment that its processes need.

Called before an engine starts, by the pipeline, `mocked_server.check` and tests; the engine itself is
`mocked_server.vllm.engine`. Supported: vllm >= 0.32, < 0.34. Nothing here starts a process or CUDA.
"""

from __future__ import annotations

import json
import logging
import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from buffers.errors import EngineError
from configs.model_folder import has_mamba2
from configs.rules import why_owned
from configs.schema import CPU_KV_CACHE_GB, RolloutConfig, ServerConfig
from mocked_server.vllm.adapters import lora_words
from mocked_server.vllm.tool_calls import parser_of

CPU_BLOCK, SMALL_BLOCK = 128, 32
"""Tokens of a block of the cache on a CPU, vLLM's and ours. Only whole blocks are shared: with vLLM's, the members of a group each
compute a prompt of 45 tokens, and each round of a conversation up to 127 tokens once more."""
MAX_WORDS_CHARS = 600
"""Most characters of vLLM's words: some repeat the value that they refuse."""
TORCHVISION = "torchvision==0.28.0 --index-url https://download.pytorch.org/whl/cpu"
"""PyPI has the build for GPUs only, which does not load beside torch for CPUs."""
RECORDS_EXPERTS = "understudy_records_experts"
"""Key of vLLM's additional configuration: `process.worker_extension` does what vLLM does on a GPU only."""
WORKER_EXTENSION = "mocked_server.vllm.process.worker_extension.WorkerExtension"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of the engine and of vLLM's HTTP layer."""

    model_path: Path
    served_name: str
    """The model's name in the API."""
    dtype: str
    rollout: RolloutConfig
    server: ServerConfig
    seed: int = 0
    max_num_seqs: int = 64
    """Generations that run in one engine step."""
    lora_rank: int = 0
    """Rank of the adapters that are loaded as versions of the policy; 0: whole weights are."""
    kept_versions: int = 1
    """Adapters that are kept for the generations that began under them, of all roles together."""
    beside_rank: bool = True
    """A rank of the learner is on a card of an engine's."""
    router_replay: bool = False
    """Outputs have the experts that their tokens used."""
    trust_remote_code: bool = False
    """Code of the model's folder is run."""
    role_names: tuple[str, ...] = ()
    """The names of the run's roles, which then take the place of `served_name` in the API."""


def set_process_environment() -> None:
    """Set the process environment that vLLM needs, on CPU above all; called before vllm is imported.

    Its processes, all on this machine, meet on loopback: without a name gloo takes the address of the machine's. One OpenMP
    thread is several times faster than two for small models; compiling the sampler would need a C++ compiler on the user's
    machine; the in-process executor saves a second spawned worker (7 s of start-up) and half of the per-step cost.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("VLLM_XGRAMMAR_CACHE_MB", "64")  # compiled grammars, of which agents may send ever new ones
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "0"  # nothing that arrives at the engine is unpickled
    if has_gpu():
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def make_args(settings: EngineSettings) -> Namespace:
    """vLLM's own server arguments, parsed by vLLM's own parser. Raises EngineError with its words for `rollout.engine_args` that
    it refuses."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args

    more = dict(settings.rollout.engine_args)
    parser = make_arg_parser(_raising_parser())
    places = {word: action.dest for action in parser._actions for word in action.option_strings}
    of_engine = {field.name for field in fields(AsyncEngineArgs)}
    for name in more:
        dest = places.get(f"--{name.replace('_', '-')}", name.replace("-", "_"))
        if why := why_owned(dest):  # by another of its names
            raise _refused(more, f"{name} is what the run sets itself: {why}")
        if f"--{name.replace('_', '-')}" in places and dest not in of_engine:
            raise _refused(more, f"{name} is of vLLM's HTTP server, and the run has a server of its own")
    if loses_prefix_cache(settings.model_path, more):
        more["enable_prefix_caching"] = False
    if settings.dtype != "float32":
        more = _with_float32_head(more)
    try:
        # Last come those that the run owns: of two that are the same, vLLM takes the last.
        args: Namespace = parser.parse_args([*words_of(more), *_owned_words(settings)])
        validate_parsed_serve_args(args)
    except (ValueError, TypeError) as error:
        raise _refused(more, str(error)) from error
    return args


def loses_prefix_cache(model: Path, arguments: Mapping[str, Any]) -> bool:
    """True if prefix caching is turned off: vLLM's kernels of Mamba-2 fail with it on a CPU, at the first prefill. It stays what
    `arguments` say."""
    given = any(name.replace("-", "_").removeprefix("no_") == "enable_prefix_caching" for name in arguments)
    return not given and not has_gpu() and has_mamba2(model)


def _with_float32_head(more: Mapping[str, Any]) -> dict[str, Any]:
    """Logits in float32, as the learner's are: rounded to bfloat16, one of 20 is off by up to 0.06. A `head_dtype` that is given
    stays."""
    rest = {name: value for name, value in more.items() if name.replace("-", "_") != "hf_overrides"}
    overrides: Any = next((value for name, value in more.items() if name not in rest), {})
    if not isinstance(overrides, Mapping):
        raise _refused(more, "hf_overrides must be a mapping")
    return {**rest, "hf_overrides": {"head_dtype": "float32", **overrides}}


def _tool_parser(settings: EngineSettings) -> str | None:
    """What the user has set, or the one that reads calls as the model's chat template writes them."""
    from transformers import AutoTokenizer

    if settings.server.tool_parser != "auto":
        return settings.server.tool_parser
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model_path, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError, ImportError):
        return None  # vLLM says what is wrong with it
    return parser_of(tokenizer)


def _owned_words(settings: EngineSettings) -> list[str]:
    rollout = settings.rollout
    words = [
        "--model",
        str(settings.model_path),
        "--served-model-name",
        *(settings.role_names or (settings.served_name,)),
        "--dtype",
        settings.dtype,
    ]
    words += ["--max-model-len", str(rollout.max_model_len), "--max-num-seqs", str(settings.max_num_seqs)]
    words += ["--seed", str(settings.seed), "--worker-extension-cls", WORKER_EXTENSION]
    # Behaviour log-probabilities are those of the distribution that was sampled from (after the temperature).
    words += ["--logprobs-mode", "processed_logprobs"]
    # Without this the model folder's generation_config.json silently changes temperature and top-p.
    words += ["--generation-config", "vllm", "--disable-log-stats", "--no-use-tqdm-on-load"]
    words += ["--gpu-memory-utilization", str(rollout.share_of_card(beside_rank=settings.beside_rank))]
    words += ["--tensor-parallel-size", str(rollout.tensor_parallel)]
    if rollout.tensor_parallel > 1:  # not Ray's, which would place its workers on cards of its own choice
        words += ["--distributed-executor-backend", "mp"]
    if parser := _tool_parser(settings):
        words += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    if settings.server.reasoning_parser:
        words += ["--reasoning-parser", settings.server.reasoning_parser]
    kv_cache_gb = rollout.kv_cache_gb
    if not has_gpu():
        if rollout.tensor_parallel > 1:
            raise EngineError(
                f"rollout.tensor_parallel must be 1 without a GPU, got {rollout.tensor_parallel}; set rollout.tensor_parallel=1"
            )
        words += ["--enforce-eager", "--distributed-executor-backend", "uni"]
        kv_cache_gb = kv_cache_gb or CPU_KV_CACHE_GB
    elif rollout.sleep:
        words += ["--enable-sleep-mode"]
    if settings.trust_remote_code:
        words += ["--trust-remote-code"]
    if settings.router_replay and has_gpu():
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the older one does not record them
        words += ["--enable-return-routed-experts"]
    elif settings.router_replay:
        words += ["--additional-config", json.dumps({RECORDS_EXPERTS: True}), "--no-enable-prefix-caching"]
    if settings.lora_rank:
        words += lora_words(rank=settings.lora_rank, kept=settings.kept_versions)
    if kv_cache_gb is not None:
        words += ["--kv-cache-memory-bytes", str(int(kv_cache_gb * 2**30))]
    return words


def words_of(arguments: Mapping[str, Any]) -> list[str]:
    """The words of vLLM's command line: true and false as `--name` and `--no-name`, lists as several words, mappings as JSON."""
    words = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list):
            words += [f"--{option}", *map(_word, value)]
        else:
            words.append(f"--{option}={_word(value)}")
    return words


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _raising_parser() -> Any:
    """vLLM's parser, which raises what it would print before it ends the process, and takes no shortened names."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    return Parser(allow_abbrev=False)


def _refused(arguments: Mapping[str, Any], words: str) -> EngineError:
    return EngineError(
        f"rollout.engine_args must be arguments that vLLM's engine takes, got {dict(arguments)}: {_line(words)}; "
        f"`vllm serve --help=all` lists them"
    )


def _line(words: str) -> str:
    return " ".join(words.split())[:MAX_WORDS_CHARS]


def make_vllm_config(args: Namespace) -> Any:
    """The engine's configuration, for the engine and for the HTTP layer in front of it. Raises EngineError with vLLM's words for
    one that cannot be."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    try:
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        cache, model = config.cache_config, config.model_config
        has_own = model.is_hybrid or model.is_attention_free or model.use_mla
        if cache.block_size == CPU_BLOCK and not (cache.user_specified_block_size or has_own or has_gpu()):
            cache.block_size = SMALL_BLOCK
        return config
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        if "failed to be inspected" in str(error) and find_spec("torchvision") is None:
            raise EngineError(
                f"vLLM's class of the model at model.path={args.model} needs the package torchvision, got none; install the build "
                f"that belongs to this torch: pip install {TORCHVISION}"
            ) from error
        raise EngineError(
            f"vLLM refuses the engine's configuration: {_line(str(error))}; change model.path, or the keys of rollout that it "
            f"names (understudy keys rollout)"
        ) from error


def check_engine_args(settings: EngineSettings) -> None:
    """Raises EngineError for arguments that vLLM refuses; imports vLLM. Where the model's folder is there, its configuration is
    made as well."""
    set_process_environment()
    args = make_args(replace(settings, server=ServerConfig(tool_parser=None)))
    if (settings.model_path / "config.json").is_file():
        logging.disable(logging.ERROR)  # vLLM logs at length what it then raises
        try:
            make_vllm_config(args)
        finally:
            logging.disable(logging.NOTSET)


def has_gpu() -> bool:
    """True if there is a GPU. This does not start CUDA, so that the caller may fork later."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return bool(torch.cuda.is_available())
