"""Prints docs/models.md, one family a row, from benchmarks/results/models.json; `--write`: writes it.

The file is what `python -m benchmarks.models --json PATH` writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "benchmarks" / "results" / "models.json"
HEAD = """\
# Models

Small random models of {num_families} families (`benchmarks/families.py`: about 2 million weights, none of them 0 or 1), each
through the whole product on a CPU: `python -m benchmarks.models`, {date},
{versions}.
`make docs` writes this page. No real checkpoint is among them.

How it was played: Qwen3.5 and the models that see ran beside a patched copy of torchvision 0.28.0, without its compiled operators,
which no product code has: PyPI's build does not load beside a torch for the CPU, and without torchvision these runs are refused.
Models that see ran as models of text (`language_model_only`), for their folders have no image processor. 17 families were played on
the code that has this page, the other 50 on earlier commits of the same day.

- *rows*: packed, what they share computed once; or beside one another, where the model mixes rows in any other way.
- *engine*: largest and mean difference of a log-probability, in nats, between what vLLM recorded and the learner computed, over two
  steps and a third after `--resume auto`, on an engine that started from the saved folder. Right is at most 1e-4 (largest) in
  float32, 0.15 (mean) in bfloat16.
- *with*: what a run was given because one without it is refused; by itself it took *bfloat16*, or as *other class* vLLM's
  transformers backend.
- *learner*: largest difference to transformers' own forward, float32, of the folder that was read and, after two more steps, of the
  one that was saved.
- *transformers 4*: that of version 4.57 from the learner, of the saved folder. *Reads another model*: before training as well;
  *refused*: it does not know the family, or not this form of its configuration.
- *LoRA*: as *learner*, with adapters of rank 4, and of the folder with the adapter merged.

{summary}

| family | rows | engine | with | learner | transformers 4 | LoRA |
|---|---|---|---|---|---|---|
"""


def size(value: Any) -> str:
    """A difference in two digits."""
    return f"{value:.1e}" if isinstance(value, float) else str(value)


def engine(run: Mapping[str, Any] | None) -> str:
    """What a real run came to."""
    if run is None:
        return "not played"
    if "steps" not in run:
        return str(run["end"])
    figures = f"{size(run['max_logprob_diff'])}, {size(run['mean_logprob_diff'])}"
    resumed = "" if run["resume"] == "ok" else ", resume refused"
    return f"{figures}{' **wrong**' if run['end'] == 'wrong' else ''}{resumed}"


def given(run: Mapping[str, Any]) -> str:
    """Settings without which a run is refused, and the class that it took."""
    settings = [f"`{each}`" for each in run.get("given", ())] if "steps" in run else []
    half = ["bfloat16"] if run.get("dtype") == "bfloat16" and not any("bfloat16" in each for each in settings) else []
    return ", ".join([*settings, *half, *(["other class"] if run.get("other_class") else [])])


def computed(part: Mapping[str, Any]) -> str:
    """What the learner and transformers make of a folder."""
    if "transformers" not in part:
        return str(part["end"])
    both = f"{size(part['transformers'])}, {size(part['saved_by_transformers_5'])}"
    return both if part["end"] == "ok" else f"{both} **wrong**"


def older(part: Mapping[str, Any]) -> str:
    """What version 4 makes of the saved folder."""
    saved, read = part.get("saved_by_transformers_4"), part.get("read_by_transformers_4")
    if saved is None:
        return "not tried"
    if isinstance(saved, str):
        return "refused"
    return size(saved) if isinstance(read, float) and read <= 1e-4 else f"{size(saved)}, reads another model"


def row(name: str, record: Mapping[str, Any]) -> str:
    """One family."""
    learner, lora = record["learner"], record["lora"]
    run = record.get("run")
    layout = learner.get("layout", "")
    rows = "packed" if "are packed" in layout else "beside" if layout else ""
    cells = [name, rows, engine(run), given(run or {}), computed(learner), older(learner), computed(lora)]
    return f"| {' | '.join(cells)} |"


def page(report: Mapping[str, Any]) -> str:
    """docs/models.md."""
    largest = size(report["max_logprob_diff"])
    same = "equals" if report["reload_equals_fresh"] else "does NOT equal"
    summary = (
        f"{report['num_families']} families, {report['runs']} of them in real runs: {len(report['wrong'])} wrong, "
        f"{len(report['tracebacks'])} ended by a traceback, {len(report['refused'])} parts refused with a sentence (below). "
        f"Largest difference of a run in float32: {largest}. What a running engine samples from new weights {same} what the "
        f"learner has, in every run that made its steps. Rows beside one another cost {report['padded_cost']:.2f} times the CPU "
        f"time of packed ones, in a dense model of {report['padded']['weights'] / 1e6:.0f} million weights (8 rows, stem "
        f"256, tails of 164 to 400)."
    )
    versions = ", ".join(f"{name} {number}" for name, number in report["settings"]["versions"].items())
    head = HEAD.format(
        num_families=report["num_families"], date=report["machine"]["date"], versions=versions, summary=summary
    )
    rows = [row(name, record) for name, record in report["families"].items()]
    lines = [head + "\n".join(rows), ""]
    for title, told in (
        ("Wrong", dict.fromkeys(report["wrong"], "")),
        ("Ended by a traceback", dict.fromkeys(report["tracebacks"], "")),
        ("Too slow", dict.fromkeys(report["too_slow"], "")),
        ("Refused", report["refused"]),
    ):
        if told:
            lines += [f"## {title}", ""]
            lines += [f"- {where}{': ' if said else ''}{escaped(said)}" for where, said in told.items()] + [""]
    return "\n".join(lines)


def escaped(said: str) -> str:
    """A sentence of a program as Markdown's plain text."""
    return "".join(f"\\{each}" if each in "[]<>*_`|" else each for each in said)


def main() -> None:
    text = page(json.loads(REPORT.read_text(encoding="utf-8")))
    if "--write" in sys.argv[1:]:
        (ROOT / "docs" / "models.md").write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
