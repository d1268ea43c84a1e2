"""Rules of benchmarks/models.py, its processes and scripts/made_pages.py: what becomes of a family, in report and page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import models
from benchmarks.learner_sides import stem_rows
from benchmarks.models import ADAPTER, Work, apart, judged, sentence, totals
from scripts.made_pages import engine, given, older, row

RIGHT: dict[str, Any] = {
    "end": "ok", "given": [], "dtype": "float32", "steps": 3, "max_logprob_diff": 3e-6, "mean_logprob_diff": 1e-6,
    "resume": "ok", "reload_equals_fresh": True, "other_class": False,
}  # fmt: skip
LEARNER: dict[str, Any] = {
    "end": "ok",
    "transformers": 1e-6,
    "saved_by_transformers_5": 2e-6,
    "layout": "rows of X are packed",
}


def work(folder: Path, *, limit_s: float = 60.0) -> Work:
    return Work(folder=folder, limit_s=limit_s)


def test_totals_name_what_is_wrong_refused_or_a_traceback() -> None:
    families: dict[str, Any] = {
        "one": {"run": RIGHT, "learner": LEARNER, "lora": {"end": "refused", "said": "no linear layers"}},
        "two": {"run": {**RIGHT, "end": "wrong", "max_logprob_diff": 2e-4, "resume": "refused: no"}, "learner": LEARNER},
        "half": {"run": {**RIGHT, "dtype": "bfloat16", "max_logprob_diff": 0.4}, "learner": {"end": "traceback", "said": "x"}},
        "slow": {"run": {"end": "too slow", "said": "", "dtype": "float32"}, "learner": LEARNER},
    }  # fmt: skip
    found = totals(families)
    assert found["wrong"] == ["two, run", "two, resume"]
    assert (found["tracebacks"], found["too_slow"]) == (["half, learner"], ["slow, run"])
    assert found["refused"] == {"one, lora": "no linear layers"}
    assert (found["num_families"], found["runs"], found["max_logprob_diff"]) == (4, 3, 2e-4)
    assert found["reload_equals_fresh"]
    families["two"]["run"]["reload_equals_fresh"] = False
    assert not totals(families)["reload_equals_fresh"] and not totals({})["reload_equals_fresh"]


@pytest.mark.parametrize(
    ("changed", "end"),
    [
        ({}, "ok"),
        ({"start": [-1.0, -2.0002]}, "wrong"),
        ({"end_of_transformers": [-1.5, -2.6]}, "wrong"),
        ({"end_of_transformers": "ValueError: unknown"}, "wrong"),
        ({"end": [-1.0, -2.0], "end_of_transformers": [-1.0, -2.0]}, "wrong"),
        ({"adapter": ADAPTER}, "wrong"),
    ],
)
def test_a_part_is_right_when_transformers_agrees_and_the_weights_moved(
    changed: dict[str, Any], end: str, tmp_path: Path
) -> None:
    seen = {
        "layout": "", "adapter": [], "start": [-1.0, -2.0], "start_of_transformers": [-1.0, -2.0], "end": [-1.5, -2.5],
        "end_of_transformers": [-1.5, -2.5],
    }  # fmt: skip
    assert judged(seen | changed, part="learner", work=work(tmp_path))["end"] == end
    assert judged({"refused": f"no {tmp_path}/x"}, part="lora", work=work(tmp_path)) == {
        "end": "refused",
        "said": "no FOLDER/x",
    }


def test_how_a_process_ended_is_told_by_its_output(tmp_path: Path) -> None:
    ends = {
        "print('fine')": ("ok", ""),
        "print('error: a:\\n  b\\nerror: c\\nwhat held it back:\\n  d'); raise SystemExit(2)": (
            "refused",
            "a:\n  b; c",
        ),
        "raise KeyError('gate')": ("traceback", "KeyError: 'gate'"),
        "raise SystemExit(3)": ("traceback", ""),
        "import time; time.sleep(60)": ("too slow", ""),
    }
    for program, expected in ends.items():
        end, output = work(tmp_path, limit_s=1.0).start(["-c", program], name="run")
        assert (end, sentence(output)) == expected


def test_differences_are_those_of_the_farthest_token_or_a_sentence() -> None:
    assert apart([-1.0, -2.0], [-1.5, -2.25]) == 0.5
    assert apart([-1.0], "unknown") == apart("unknown", [-1.0]) == "unknown"


def test_rows_of_agents_part_from_a_stem_of_their_group() -> None:
    rows = stem_rows(groups=2, rows=3, stem=5, tails=(4, 6), tokens=np.arange(9, 99))
    parts = np.split(rows.ids, np.cumsum(rows.lengths)[:-1])
    assert rows.groups.tolist() == [0, 0, 0, 1, 1, 1] and set(rows.lengths - 5) <= {4, 5, 6}
    assert all(
        part[:5].tolist() == parts[group * 3][:5].tolist() for part, group in zip(parts, rows.groups, strict=True)
    )
    assert parts[0][:5].tolist() != parts[3][:5].tolist()
    assert rows.mask.sum() == sum(length - 5 - (length - 5) // 2 for length in rows.lengths)


def test_a_row_of_the_page_says_what_was_seen() -> None:
    odd = {**RIGHT, "given": ["model.dtype=bfloat16"], "other_class": True, "end": "wrong", "resume": "refused: no"}
    assert engine(odd) == "3.0e-06, 1.0e-06 **wrong**, resume refused" and engine(None) == "not played"
    assert given(odd) == "`model.dtype=bfloat16`, other class"
    assert given({**RIGHT, "dtype": "bfloat16"}) == "bfloat16"
    assert older({"saved_by_transformers_4": "ValueError"}) == "refused" and older({}) == "not tried"
    assert older({"saved_by_transformers_4": 0.2, "read_by_transformers_4": 0.3}) == "2.0e-01, reads another model"
    learner = {**LEARNER, "saved_by_transformers_4": 1e-6, "read_by_transformers_4": 1e-6}
    assert row("x", {"run": RIGHT, "learner": learner, "lora": {"end": "refused"}}) == (
        "| x | packed | 3.0e-06, 1.0e-06 |  | 1.0e-06, 2.0e-06 | 1.0e-06 | refused |"
    )


@pytest.mark.seconds
def test_what_padding_costs_is_measured_in_turn() -> None:
    model = {"hidden": 64, "layers": 1, "ffn": 64, "heads": 2, "kv_heads": 1}
    batch = {"groups": 1, "rows": 4, "stem": 16, "tails": (4, 64)}
    found = models.passes_cost(repeats=3, model=model, batch=batch)
    assert len(found["packed_s"]) == len(found["padded_s"]) == 3
    assert found["padded_cost"] == np.median(found["padded_s"]) / np.median(found["packed_s"]) > 0.0


@pytest.mark.seconds
def test_what_a_shared_stem_saves_a_model_with_states_is_measured_in_turn() -> None:
    batch = {"groups": 1, "rows": 4, "stem": 64, "tails": (4, 16)}
    found = models.hybrid_speedup(repeats=3, family="falcon_h1", changes={"num_hidden_layers": 1}, batch=batch)
    assert len(found["shared_s"]) == len(found["apart_s"]) == 3 and 2.0 < found["fewer_tokens"] < 4.0
    assert found["speedup"] == np.median(found["apart_s"]) / np.median(found["shared_s"]) > 0.0


@pytest.mark.long
@pytest.mark.engine
def test_a_family_is_played_from_a_run_to_its_adapter(tmp_path: Path) -> None:
    """A mixture of experts, whose weights a CPU's engine packs; this environment's transformers plays the older one."""
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.models", "--json", str(path), "--skip-cost"]
    command += ["--only", "qwen3_moe", "--transformers4", sys.executable]
    done = subprocess.run(command, cwd=models.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(path.read_text())
    record = report["families"]["qwen3_moe"]
    assert record["run"]["steps"] == 3 and record["run"]["max_logprob_diff"] < 1e-4
    assert record["learner"]["end"] == "ok" and record["learner"]["saved_by_transformers_4"] < 1e-4
    assert report["reload_equals_fresh"] and report["wrong"] == report["tracebacks"] == []
