"""Prints what is made from the code and from the benchmarks' reports: `python scripts/made_pages.py NAME`; `--write` writes
all of it where it belongs. NAME: a page or table of `MADE`.

A benchmark's own report (`--json PATH`) has many more figures than a page; `benchmarks/results/figures.json` says of each
claim where it comes from. docs/models.md is made from what `python -m benchmarks.models --json PATH` writes. The fields that
the model API refuses and ignores are those of the server's rules for each; where a run goes out over HTTP, and within which
bounds, is read off the code.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.imports import MAY_IMPORT, OWNERS, PARTS_MEET  # noqa: E402

# docs/results.md, and the rows of it that the README shows.

RESULTS = """\
# Results

One number a row, each seen on this project's code by the command beside it. Two CPU cores that others used too, no GPU: take
ratios, not seconds. `make docs` writes this page from `benchmarks/results/`.

| what | figure | of | command | seen |
|---|---|---|---|---|"""

LEARNING = """
## Which algorithms learn the demo

Each recipe (`configs/algorithms/recipes.toml`) on the demo's game, with its learning rate and batch, from the same weights, on data
that is exactly so many updates old: updates until the mean reward of 5 batches was 0.9 or more (a figure for each seed), and
the mean reward of the last 5 of {steps} (mean of the seeds, and the worst). Nothing was tuned for any of them: a low row
says that this game, this rate and so few updates do not suit it. Seeds: {seeds}; {date}, by an earlier program that played without
an engine. `python -m benchmarks.learning` makes such a table of whole runs, where the lag is the most that there may be.

"""


def reports() -> list[dict[str, Any]]:
    """The files, in their order."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def rows() -> list[dict[str, Any]]:
    """The rows of all files, in their order."""
    return [row for report in reports() for row in report.get("rows", ())]


def learning() -> str:
    """The table of `benchmarks.learning`, where its report is there."""
    return "".join(
        LEARNING.format(
            steps=report["settings"]["steps"],
            seeds=", ".join(map(str, report["settings"]["seeds"])),
            date=report["machine"]["date"],
        )
        + "\n".join(report["table"])
        + "\n"
        for report in reports()
        if "table" in report
    )


def results() -> str:
    """docs/results.md."""
    lines = [
        f"| {row['claim']} | {row['value']} | {row['runs']} | `{row['command']}` | {row['date']} |" for row in rows()
    ]
    return "\n".join([RESULTS, *lines]) + "\n" + learning()


def short() -> str:
    """The README's table."""
    lines = [f"| {row['short']} | {row['value']} | `{row['command']}` |" for row in rows() if "short" in row]
    return "\n".join(["| what | figure | command |", "|---|---|---|", *lines]) + "\n"


# The fields that the model API refuses, in docs/agents.md.


def refused() -> str:
    """A row for each remedy and the dialects that have it."""
    from mocked_server.http import gemini_requests
    from mocked_server.http.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES
    from mocked_server.http.request_fields import RULES

    names_of = {CHAT: "Chat", COMPLETIONS: "Completions", RESPONSES: "Responses", MESSAGES: "Messages"}
    rules = [(rule.field, names_of[path], rule.remedy) for path in names_of for rule in RULES[path]]
    rules += [(field, "Google", remedy) for field, remedy in gemini_requests.REFUSED.items()]
    dialects: dict[tuple[str, str], list[str]] = {}
    for field, dialect, remedy in rules:
        dialects.setdefault((field, remedy), []).append(dialect)
    fields: dict[tuple[str, str], list[str]] = {}
    for (field, remedy), where in dialects.items():
        told = "all but Google's" if where == [*names_of.values()] else ", ".join(where)
        fields.setdefault((told, remedy), []).append(field)
    lines = (
        f"| {', '.join(f'`{name}`' for name in names)} | {where} | {remedy} |"
        for (where, remedy), names in fields.items()
    )
    return "\n".join(chain(("| field | where | instead |", "|---|---|---|"), lines)) + "\n"


# Where a run goes out over HTTP, and within which bounds, in SECURITY.md.

OURS = ("agents", "buffers", "configs", "env_adapters", "learner", "mocked_server")
CLIENTS_OF_OTHERS: dict[str, tuple[str, ...]] = {
    "httpx": (
        "mocked_server/http/attribution.py",
        "agents/examples/lm_eval_harness.py",
        "agents/examples/inspect_harness.py",
    ),
    "websockets": ("env_adapters/openenv.py",),
    "huggingface_hub": ("learner/startup/hub.py",),
    "wandb": ("learner/reporting/tracker.py",),
    "mlflow": ("learner/reporting/tracker.py",),
    "swanlab": ("learner/reporting/tracker.py",),
    "aiohttp": (),
    "requests": (),
    "urllib.request": (),
    "urllib3": (),
    "http.client": (),
}
"""Package that goes out over HTTP by itself -> files that use it for that: another process of the run (`attribution.Forward`),
programs as a user writes them, and what SECURITY.md says of each beside the table."""


def outgoing_table() -> str:
    """A row for each of the bounds."""
    from buffers import outgoing

    files = [path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    names = {id(value): name for name, value in vars(outgoing).items() if isinstance(value, outgoing.Bounds)}
    lines = ["| asked | most bytes of an answer | seconds in all | by |", "|---|---|---|---|"]
    for bounds in outgoing.BOUNDS:
        asks = re.compile(rf"Outgoing\(\s*{names[id(bounds)]}\b")
        by = ", ".join(f"`{name}`" for name, text in texts.items() if asks.search(text))
        size = f"{bounds.max_bytes >> 20} MiB" + (", each line of a stream" if bounds.is_of_events else "")
        seconds = f"{bounds.total_s:,.0f}" if bounds.total_s is not None else "the asker's own"
        lines.append(f"| {bounds.server} | {size} | {seconds} | {by} |")
    return "\n".join(lines) + "\n"


# docs/models.md, one family a row.

MODELS_REPORT = ROOT / "benchmarks" / "results" / "models.json"
MODELS = """\
# Models

Small random models of {num_families} families (`benchmarks/families.py`: about 2 million weights, none of them 0 or 1), each
through the whole product on a CPU: `python -m benchmarks.models`, {date},
{versions}.
`make docs` writes this page. No real checkpoint is among them.

Qwen3.5 and models that see ran beside a torchvision 0.28.0 without its compiled operators (PyPI's does not load beside a torch for
the CPU, and without one they are refused); those that see as models of text, without image processors.

- *rows*: packed, what they share computed once; or beside one another, where the model mixes rows in any other way.
- *engine*: largest and mean difference of a log-probability, in nats, between what vLLM recorded and the learner computed, over two
  steps and a third after `--resume auto`, on an engine that started from the saved folder. Right is at most 1e-4 (largest) in
  float32, 0.15 (mean) in bfloat16. There a router near a tie chooses other experts: in 2 of about 60 runs of a Qwen3.5-MoE-like
  model a version differed by 0.2 and 0.7 nats, the first, with its tie at the template's `<|im_end|>`, by 0.03 with the engine's
  experts, which a run on a CPU forces (`learner.router_replay`).
- *with*: what a run was given because one without it is refused, and what it took by itself: *bfloat16*, where vLLM's CPU kernels
  have nothing else, with experts *router replay*, and as *other class* vLLM's transformers backend; a line at the start says each.
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
    half = ["bfloat16"] if run.get("dtype") == "bfloat16" else []
    return ", ".join(
        [*settings, *half, *(name.replace("_", " ") for name in ("router_replay", "other_class") if run.get(name))]
    )


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


def models() -> str:
    """docs/models.md."""
    report = json.loads(MODELS_REPORT.read_text(encoding="utf-8"))
    largest = size(report["max_logprob_diff"])
    same = "equals" if report["reload_equals_fresh"] else "does NOT equal"
    hybrids = report["hybrids"]
    summary = (
        f"{report['num_families']} families, {report['runs']} of them in real runs: {len(report['wrong'])} wrong, "
        f"{len(report['tracebacks'])} ended by a traceback, {len(report['refused'])} parts refused with a sentence (below). "
        f"Largest difference of a run in float32: {largest}. What a running engine samples from new weights {same} what the "
        f"learner has, in every run that made its steps. Rows beside one another cost {report['padded_cost']:.2f} times the CPU "
        f"time of packed ones, in a dense model of {report['padded']['weights'] / 1e6:.0f} million weights (8 rows, stem "
        f"256, tails of 164 to 400). A pass over rows that continue a common stem, in models whose layers carry states, is "
        f"{report['tree_speedup_hybrid']:.1f} times as fast as over rows beside one another, or more, at "
        f"{min(each['fewer_tokens'] for each in hybrids.values()):.1f} times fewer tokens ({', '.join(hybrids)})."
    )
    versions = ", ".join(f"{name} {number}" for name, number in report["settings"]["versions"].items())
    head = MODELS.format(
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


# Who may import whom, in docs/architecture.md.


def imports() -> str:
    """A row for each folder."""
    rows = [
        f"| `{folder}` | {', '.join(f'`{one}`' for one in sorted(may)) or 'nothing of ours'} |"
        for folder, may in MAY_IMPORT.items()
    ]
    rows.append(
        f"| {', '.join(f'`{file}`' for file in sorted(PARTS_MEET))} | everything: the only places where parts meet |"
    )
    return "\n".join(["| folder | may import |", "|---|---|", *rows]) + "\n"


def owners() -> str:
    """A row for each file, or kind of files, that may import heavy packages."""
    packages: dict[tuple[str, ...], list[str]] = {}
    for package, files in OWNERS.items():
        packages.setdefault(tuple(sorted(files)), []).append(package)
    rows = [f"| {', '.join(names)} | {', '.join(f'`{file}`' for file in files)} |" for files, names in packages.items()]
    return "\n".join(["| package | imported by |", "|---|---|", *rows]) + "\n"


MADE = {
    "imports": (imports, "docs/architecture.md", "imports"),
    "owners": (owners, "docs/architecture.md", "owners"),
    "results": (results, "docs/results.md", ""),
    "short": (short, "README.md", "results"),
    "models": (models, "docs/models.md", ""),
    "refused": (refused, "docs/agents.md", "refused"),
    "outgoing": (outgoing_table, "SECURITY.md", "outgoing"),
}
"""Name -> what makes it, the file, and the marks in the file between which it stands; none: it is the file."""


def written(name: str) -> str:
    """The file that this belongs into, with it."""
    make, file, mark = MADE[name]
    if not mark:
        return make()
    before, _, rest = (ROOT / file).read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
    return f"{before}<!-- {mark} -->\n{make()}<!-- /{mark} -->{rest.partition(f'<!-- /{mark} -->')[2]}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print("" if name == "--write" else MADE[name][0](), end="")
    if "--write" in sys.argv[1:]:
        for name, (_, file, _) in MADE.items():
            (ROOT / file).write_text(written(name), encoding="utf-8")
