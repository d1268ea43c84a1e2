"""Where the log-probabilities of engine and learner part in bfloat16, layer by layer, and what each place of rounding adds.

`python -m benchmarks.rounding [--layers 8] [--hidden 768] [--tokens 256] [--seeds 0 1 2] [--json PATH]`. A Qwen3 of random weights
(norms included) is served by the engine that a run starts, with the arguments of a run; a row of random tokens is read by both
sides. `before`: the learner as transformers rounds, both sides' logits in bfloat16; `after`: as a run has it
(`learner.model.engine_rounding`, float32 logits); between them, one place at a time as transformers has it. Nothing is sampled:
random tokens are unlikely ones, whose log-probabilities differ most; a run's are smaller (`policy/mean_logprob_diff`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.engines import settings_of
from benchmarks.harness import call, parser_of, play
from configs.tiny_model import make_tiny_model
from learner.model import packed_attention
from learner.model.engine_rounding import float32_logits, round_as_engine
from learner.model.policy import Policy
from learner.training.packing import Sequences
from mocked_server.vllm.engine_arguments import make_args, set_process_environment

PLACES = ("attention", "rotary", "sums", "logits")


def make_model(folder: Path, *, seed: int, hidden: int, layers: int) -> Path:
    """A model whose norms have weights other than 1, by which the order of rounding shows."""
    from transformers import AutoModelForCausalLM

    make_tiny_model(
        folder, seed=seed, hidden=hidden, layers=layers, ffn=2 * hidden, heads=hidden // 64, kv_heads=hidden // 128
    )
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if "norm" in name:
                weight.copy_(1.0 + 0.3 * torch.randn(weight.shape, generator=generator))
            elif name.endswith("proj.weight"):
                weight.mul_((128 / hidden) ** 0.5)  # states of a like size at every width
    lm.save_pretrained(folder)
    return folder


def of_engine(folder: Path, ids: Sequence[int], *, float32_head: bool) -> dict[str, Tensor]:
    """What vLLM has for a prompt: `logprobs` [T - 1], and the residual sum behind each layer, [T, hidden] float32."""
    set_process_environment()
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    more = {"enable_prefix_caching": False} | ({} if float32_head else {"hf_overrides": {"head_dtype": "model"}})
    settings = settings_of(folder, dtype="bfloat16", engine_args=more, max_model_len=max(512, len(ids) + 8))
    engine: Any = LLMEngine.from_engine_args(AsyncEngineArgs.from_cli_args(make_args(settings)))
    model = engine.engine_core.engine_core.model_executor.driver_worker.model_runner.model
    found: dict[str, Tensor] = {}

    def keep(name: str, sides: Any) -> None:
        states, residual = sides
        if len(states) == len(ids):
            found[name] = states.float() + residual.float()

    for place, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _, given, sides, place=place: keep(f"layer {place}", sides))
    engine.add_request("row", {"prompt_token_ids": list(ids)}, SamplingParams(max_tokens=1, prompt_logprobs=0))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                known = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
                found["logprobs"] = torch.tensor([each[token].logprob for each, token in known])
    return found


def of_learner(folder: Path, ids: Sequence[int], *, without: Sequence[str] = ()) -> dict[str, Tensor]:
    """The same of the learner. `without`: the places that are rounded as transformers does."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    frequencies = lm.model.rotary_emb.inv_freq.clone()
    lm = lm.bfloat16()
    lm.model.rotary_emb.inv_freq = frequencies  # as sharded modules have it: parameters are rounded, buffers are not
    policy = Policy(lm, value_head=False)
    round_as_engine(lm)
    decoder = lm.get_decoder()
    if "rotary" in without:
        decoder.rotary_emb._forward_hooks.clear()
    if "sums" in without:
        for each in (*decoder.layers, *(norm for norm in decoder.modules() if "forward" in vars(norm))):
            vars(each).pop("forward", None)
    found: dict[str, Tensor] = {}
    for place, layer in enumerate(decoder.layers):
        layer.register_forward_hook(
            lambda _, given, out, place=place: found.__setitem__(f"layer {place}", out[0].float())
        )
    row, length = torch.tensor(ids), len(ids)
    half = packed_attention.HALF
    packed_attention.HALF = () if "attention" in without else half
    try:
        with torch.no_grad():
            mask = np.array([0, *[1] * (length - 1)], dtype=np.uint8)
            pack = Sequences([row.numpy().astype(np.int32)], masks=[mask]).micro_batch([0], device=row.device)
            states = policy._states(pack)[1]
            head = lm.get_output_embeddings()
            logits = type(head).forward(head, states).float() if "logits" in without else float32_logits(head, states)
    finally:
        packed_attention.HALF = half
    found["logprobs"] = logits.log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0]
    return found


def differences(engine: dict[str, Tensor], learner: dict[str, Tensor]) -> dict[str, float]:
    """Largest and mean difference of a log-probability; of each layer's states, as bfloat16, the share that is the same."""
    apart = (engine["logprobs"] - learner["logprobs"]).abs()
    same = {
        f"same after {name}": float((engine[name].bfloat16() == learner[name].bfloat16()).float().mean())
        for name in engine
        if name in learner and name != "logprobs"
    }
    return {"max": float(apart.max()), "mean": float(apart.mean()), **same}


def of_seed(*, seed: int, hidden: int, layers: int, tokens: int, **_: Any) -> dict[str, dict[str, float]]:
    """What is seen with each place rounded as transformers does."""
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        model = make_model(Path(folder) / "model", seed=seed, hidden=hidden, layers=layers)
        ids = torch.randint(9, 512, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
        plain, wide = (of_engine(model, ids, float32_head=head) for head in (False, True))
        found = {"before": differences(plain, of_learner(model, ids, without=PLACES))}
        for place in PLACES:
            side = plain if place == "logits" else wide
            found[f"without {place}"] = differences(side, of_learner(model, ids, without=[place]))
        return found | {"after": differences(wide, of_learner(model, ids))}


def table(found: Sequence[dict[str, dict[str, float]]]) -> str:
    """A row for each way of rounding: means over the seeds, the largest difference of all."""
    layers = [name for name in found[0]["after"] if name.startswith("same")]
    lines = ["| | mean | largest | " + " | ".join(layers) + " |", "|---" * (3 + len(layers)) + "|"]
    for way in found[0]:
        shares = [f"{100 * mean(each[way][name] for each in found):.0f} %" for name in layers]
        size = f"{mean(each[way]['mean'] for each in found):.5f} | {max(each[way]['max'] for each in found):.4f}"
        lines.append(f"| {way} | {size} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Each seed in a process of its own: an engine stays in its process to the end."""
    sizes = {"hidden": arguments.hidden, "layers": arguments.layers, "tokens": arguments.tokens}
    found = [call(of_seed, folder=folder, seed=seed, **sizes)[0] for seed in arguments.seeds]
    print(table(found))
    yield {
        **{f"{size}_logprob_diff_{way}": (max if size == "max" else mean)(each[way][size] for each in found)
           for way in ("before", "after") for size in ("mean", "max")},
        "seeds": found,
        "by_layer": table(found).splitlines(),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("rounding", doc=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--hidden", type=int, default=768, help="width, a multiple of 128 (default 768)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of the row that both sides read")
    arguments = parser.parse_args(argv)
    return play("rounding", arguments, measure, about=f"a Qwen3 of {arguments.layers} layers in bfloat16")


if __name__ == "__main__":
    sys.exit(main())
