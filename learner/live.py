"""`understudy serve keys` and `understudy feedback`: the users of a run that serves agents in use, and what they say of it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from buffers.errors import UnderstudyError
from buffers.ledger.forgetting import Forgotten
from configs.load import ConfigError, load_config
from learner.ask import ask_run
from learner.live_versions import trained_in
from learner.reporting.tracker import FILE as TRACES
from learner.reporting.tracker import drop_lines

WATCHED = "watched/demonstrations.jsonl"
"""Conversations with another model, in a run's folder."""


class Users(Protocol):
    """The keys of a run's users: `mocked_server.live_keys.LiveKeys`."""

    def read(self) -> dict[str, dict[str, Any]]: ...
    def add(self, name: str, *, excluded: bool = False) -> str: ...
    def revoke(self, name: str) -> None: ...


def keys(words: list[str], *, users: Callable[[Path], Users]) -> int:
    """The exit code; 2 where there is nothing to do. `users`: those of the run in a folder."""
    parser = argparse.ArgumentParser(
        prog="understudy serve keys",
        description="Keys that open the model API to the agents of a user. A key is shown once, and stored as a hash.",
    )
    parser.add_argument("action", choices=("add", "list", "revoke"))
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="the user: letters, digits and _")
    parser.add_argument(
        "--config", type=Path, default=Path("live"), help="the configuration of `understudy serve` (default: live)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="its overrides, such as run.name=mine"
    )
    parser.add_argument(
        "--no-learning",
        action="store_true",
        help="add: the user's requests are answered, and nothing of them is stored",
    )
    arguments = parser.parse_intermixed_args(words)
    if (arguments.action == "list") != (not arguments.name) and "=" not in arguments.name:
        parser.error(f"{arguments.action} takes {'no name' if arguments.name else 'a NAME'}")
    if "=" in arguments.name:
        arguments.overrides.insert(0, arguments.name)
    try:
        config = load_config(arguments.config, [*arguments.overrides, "serve.enabled=true"])
        keys = users(Path(config.run.dir) / config.run.name)
        if arguments.action == "add":
            print(keys.add(arguments.name, excluded=arguments.no_learning))
        elif arguments.action == "revoke":
            keys.revoke(arguments.name)
            print(f"the key of {arguments.name} opens nothing any more")
        else:
            for name, key in keys.read().items():
                made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key["made"]))
                marks = "  revoked" * key["revoked"] + "  nothing is stored" * key["excluded"]
                print(f"{name:<20} made {made}{marks}")
    except (ConfigError, UnderstudyError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def versions(action: str, words: list[str]) -> int:
    """`understudy serve promote | rollback | status`. The exit code."""
    parser = argparse.ArgumentParser(
        prog=f"understudy serve {action}", description="The versions that users of a live run are served."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="its folder, runs/NAME")
    if action != "status":
        parser.add_argument("version", type=int, nargs="?" if action == "rollback" else None, default=None)
    arguments = parser.parse_args(words)
    told = _ask(arguments.run, "admin", "versions", {"action": action, "version": getattr(arguments, "version", None)})
    if told is None:
        return 2
    print(f"version {told['served']} is served")
    if action == "status":
        if (compared := told.get("compared")) is not None:
            print("  ".join(_mean(compared, who) for who in ("policy", "upstream")))
        for each in told["versions"]:
            gate, trial = each.get("gate", {}), each.get("trial", {})
            parts = [
                f"gate {gate['mean']:.3f} (version {gate.get('against', each['parent'])}: {gate['parent_mean']:.3f})"
                if "mean" in gate
                else "",
                *(f"{name} {gate[name]:.3g}" for name in ("drift", "likeness") if name in gate),
                f"users {trial['mean']:.3f} in {trial['sessions']} ({trial['parent_mean']:.3f} in {trial['parent_sessions']})"
                if "mean" in trial
                else "",
                f"{len(each.get('sessions', []))} sessions", each.get("why", ""),
            ]  # fmt: skip
            print("  ".join([f"{each['version']:>6}", f"{each['state']:<9}", *filter(None, parts)]))
    return 0


def _mean(compared: dict[str, Any], who: str) -> str:
    mean, number = compared[who], compared[f"{who}_sessions"]
    return f"{who}: no feedback" if mean is None else f"{who}: {mean:.3f} in {number} sessions with feedback"


def _ask(run: Path, who: str, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """The answer of a running run; None, and the reason is printed."""
    try:
        return asyncio.run(ask_run(run, who, route, body))
    except UnderstudyError as error:
        print(f"understudy: {error}", file=sys.stderr)
        return None


def forget(run: Path, what: dict[str, str]) -> dict[str, Any]:
    """Has a live run forget: the fields of `buffers.ledger.forgetting.Forgotten`. Raises RunAway, RunRefused."""
    return asyncio.run(ask_run(run, "admin", "forget", what))


def clean_up(run: Path, forgotten: Forgotten) -> Iterator[str]:
    """Take what was forgotten out of the other files of a run's folder; lines on what was trained on it, and on what may hold
    it."""
    named = {*forgotten.episodes}
    watched = Path(WATCHED)
    files = [run / TRACES, *(run / watched.parent).rglob(watched.name)]  # those of a lesson too
    number = sum(drop_lines(path, episodes=named) for path in files)
    for name in named:
        (run / WATCHED).with_name(f"{name}.jsonl").unlink(missing_ok=True)
    copies = sorted(path for path in run.rglob("*.json") if path.name.partition(".")[0] in named)
    for path in copies:
        path.unlink()
    if number or copies:
        yield f"removed: {number} lines of {TRACES} and {WATCHED}, {len(copies)} exported conversations"
    if forgotten.steps:
        yield trained_in(run, forgotten.steps)
    own = ("metrics.jsonl", "machine.jsonl", TRACES)
    if others := sorted(
        str(path.relative_to(run))
        for path in run.rglob("*")
        if path.suffix in (".jsonl", ".parquet") and path.name not in own
    ):
        yield f"look at {', '.join(others[:20])}: what was exported before is as it was"


def feedback(words: list[str]) -> int:
    """The exit code: 0 it is stored, 2 it is not."""
    parser = argparse.ArgumentParser(
        prog="understudy feedback",
        description="Tell a live run what you think of a session, or of an answer in it. Later feedback of the same source takes "
        "the place of earlier one, until it was learned from.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="its folder, runs/NAME")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--session", default="", help="the session: its name as its client sends it, or its id")
    what.add_argument("--answer", default="", metavar="ID", help="an answer, by the id in it")
    parser.add_argument("--round", type=int, default=None, help="of --session: a model call, counted from 0")
    parser.add_argument("--score", type=float, default=None)
    parser.add_argument("--text", default="", help="what should have been otherwise")
    parser.add_argument("--source", default="", help="who says it (default: nobody by name)")
    arguments = parser.parse_args(words)
    body = {
        "session": arguments.session, "response_id": arguments.answer, "round_index": arguments.round,
        "score": arguments.score, "text": arguments.text, "source": arguments.source,
    }  # fmt: skip
    told = _ask(arguments.run, "scorer", "feedback", body)
    if told is None:
        return 2
    print(f"stored of {told['episode_id']}" + ("" if told["trains"] else "; it was learned from already"))
    return 0
