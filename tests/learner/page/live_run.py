"""The folder of a run of `understudy serve` as it leaves it: sessions of two users in a ledger, made by its calls; and versions."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import yaml

from buffers.ledger.ledger import Ledger
from learner.reporting.run_record import began_s
from tests.learner.page.page_parts import CONFIG, OPENING, TOKENIZER, machine_line, said, train, write_lines

GATE = {"tasks": 4, "mean": 0.75, "parent_mean": 0.5, "least_difference": 0.1}
VERSIONS = [
    {"version": 0, "made": 1.0, "state": "candidate", "scores": {"a": 0.5, "b": 0.5}},
    {"version": 2, "made": 2.0, "state": "promoted", "parent": 0, "sessions": ["done", "gone"], "entropy": 2.0, "gate": GATE},
    {"version": 4, "made": 3.0, "state": "refused", "parent": 2, "sessions": ["x"], "entropy": 0.5, "why": "its entropy fell"},
]  # fmt: skip
HISTORY = [
    {"version": 0, "at": 1.5, "why": "first"},
    {"version": 2, "at": 2.5, "why": "gate"},
    {"version": 0, "at": 4.5, "why": "by hand"},
]


def make_live_folder(run: Path) -> Path:
    """All but the ledger. By its last line of the machine it lives, in this process."""
    (run / "model").mkdir(parents=True, exist_ok=True)
    served = {"enabled": True, "gate": {"margin": 0.05, "tasks": "t.parquet"}}
    config = {**CONFIG, "run": {"name": run.name, "steps": 1000000}, "serve": served}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    TOKENIZER.save(str(run / "model" / "tokenizer.json"))
    write_lines(run / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5, "live/users": 2.0}])
    here = {"host": socket.gethostname(), "pid": os.getpid(), "began": began_s(os.getpid())}
    live = {"served": 0, "users": 2, "sessions": 1}
    write_lines(run / "machine.jsonl", [machine_line(steps_planned=1000000, live=live, **here)])
    for about in VERSIONS:
        folder = run / "versions" / f"v{about['version']}"
        folder.mkdir(parents=True)
        (folder / "version.json").write_text(json.dumps(about))
    (run / "versions" / "served.json").write_text(json.dumps({"version": 0, "history": HISTORY}))
    return run


def make_live_run(run: Path) -> Path:
    """`done` is trained, `gone` was forgotten, `late` waits, `now` and bob's goes on, `side` is a title."""
    make_live_folder(run)
    with Ledger(run / "ledger.sqlite") as ledger:
        for episode, user, name in (
            ("done", "ann", "first"),
            ("gone", "ann", ""),
            ("late", "ann", "second"),
            ("now", "bob", ""),
        ):
            ledger.open_session(
                episode_id=episode, user=user, name=name, is_side=False, version=2, client="codex/1"
            ).result()
            ledger.put_round(said(episode, OPENING, "hello", version=2)).result()
        ledger.open_session(episode_id="side", user="bob", name="", is_side=True, version=2).result()
        for episode in ("done", "gone"):
            ledger.give_feedback(
                user=None, session=episode, round_index=0, score=1.0, text="Fine.", source="tests"
            ).result()
            ledger.settle_session(episode_id=episode, words_count=False).result()
            train(ledger, step=1 if episode == "done" else 2)
        ledger.give_feedback(user=None, session="done", round_index=0, score=0.0, source="page").result()  # too late
        ledger.forget_episodes(episode_ids=["gone"]).result()
        ledger.give_feedback(user="ann", session="second", score=0.25).result()
        ledger.settle_session(episode_id="late", words_count=False).result()
    return run
