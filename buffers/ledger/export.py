"""What a ledger gives to others: its training rows as a parquet file, its conversations as chat messages or ATIF.

Called by `buffers.ledger.cli`, `learner.evaluate` and `learner.import_logs`. Invariant: rows are what a batch of the same episodes
would hold, one for each branch; of the branches' conversations each answer is learned in one; files appear whole or not at all.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from buffers.disk import replacing
from buffers.ledger.batches import group_rows, read_rounds
from buffers.ledger.branches import Branch, branches_of
from buffers.ledger.scores import scores_of
from buffers.ledger.turns import ASSISTANT, PROMPT, TOOL, TokenDecoder, turns_of, words_of
from buffers.log_forms import Message, Session, to_atif, to_messages
from buffers.records import Round
from buffers.row_files import write_rows
from buffers.training_rows import CUT

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_SCHEMA = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.int64()),
        ("task_id", pa.string()),
        ("state", pa.string()),
        ("score", pa.float64()),
        ("branch_score", pa.float64()),
        ("role", pa.string()),
        ("role_score", pa.float64()),
        ("round_scores", pa.list_(pa.struct([("round_index", pa.int32()), ("score", pa.float64())]))),
        ("judges", pa.list_(pa.struct([("judge", pa.string()), ("score", pa.float64())]))),
        ("greedy", pa.bool_()),
        ("hint", pa.string()),
        ("truncated", pa.list_(pa.int32())),
        ("loss_weight", pa.float64()),
        ("ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("rounds", pa.list_(pa.int32())),
    ]
)


def export_parquet(db: sqlite3.Connection, *, path: Path, episodes: Collection[str] | None = None) -> int:
    """Write every row of every scored episode, or of those among these; how many."""
    return write_rows(path, rows=_rows(db, episodes=episodes), schema=_SCHEMA)


def _rows(db: sqlite3.Connection, *, episodes: Collection[str] | None) -> Iterator[dict[str, Any]]:
    groups = db.execute("SELECT group_id, task_id, state FROM grp WHERE num_scored > 0 ORDER BY group_id").fetchall()
    for group_id, task_id, state in groups:
        for row in group_rows(db, group_id=group_id):
            if episodes is not None and row.episode_id not in episodes:
                continue
            nested = {
                "round_scores": [{"round_index": index, "score": s} for index, s in row.round_scores.items()],
                "judges": [{"judge": judge, "score": s} for judge, s in (row.judges or {}).items()],
                "truncated": list(row.truncated),
            }
            of_group = {"group_id": group_id, "task_id": task_id, "state": state}
            flat = {name: getattr(row, name) for name in _SCHEMA.names if name not in nested | of_group}
            yield flat | of_group | nested


def export_messages(sessions: Iterable[RecordedSession], *, path: Path) -> int:
    """Write each conversation as a line of chat messages; how many."""
    number = 0
    with replacing(path) as scratch, scratch.open("w", encoding="utf-8") as sink:
        for number, each in enumerate(sessions, 1):  # noqa: B007
            sink.write(json.dumps(to_messages(each.session), ensure_ascii=False) + "\n")
    return number


def export_atif(sessions: Iterable[RecordedSession], *, folder: Path) -> int:
    """Write each conversation as an ATIF document, with the ids and log-probabilities of its answers; how many."""
    number = 0
    folder.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(sessions, 1):  # noqa: B007
        document = to_atif(each.session, metrics=each.metrics, extra=each.extra)
        with replacing(folder / f"{each.session.source}.json") as scratch:
            scratch.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSession:
    """A branch of an episode as a conversation. An answer that another branch trains, or that was cut, is context in it."""

    session: Session
    metrics: list[dict[str, Any]]
    """What ATIF has room for, of each answer: ids, log-probabilities, versions. Empty: it was not sampled, but in the prompt."""
    extra: dict[str, Any]


def recorded_sessions(
    db: sqlite3.Connection, *, decoder: TokenDecoder, episodes: Collection[str] | None = None
) -> Iterator[RecordedSession]:
    """Those of all scored episodes, or of these, scored or not; each branch that trains something is one. The ledger keeps ids:
    roles, calls and thoughts are read off the template's marks."""
    found = db.execute(
        "SELECT episode_id, score, task_id, group_id, grp.state FROM episode JOIN grp USING (group_id) "
        "WHERE episode.state = 'scored' OR ? ORDER BY group_id, sample_index",
        (episodes is not None,),
    ).fetchall()
    for episode_id, score, task_id, group_id, state in found:
        if episodes is not None and episode_id not in episodes:
            continue
        branches = [each for each in branches_of(read_rounds(db, episode_id=episode_id)) if each.fresh]
        own = scores_of(db, episode_id=episode_id).branches
        for branch in branches:
            number = "" if len(branches) == 1 else f".{branch.number}"
            messages, metrics = _spoken(branch, decoder=decoder)
            session = Session(
                messages=messages,
                score=next((own[index] for index in sorted(branch.fresh, reverse=True) if index in own), score),
                source=f"{episode_id}{number}",
                model=", ".join(sorted({each.role for each in branch.path if each.round_index in branch.fresh} - {""})),
            )
            extra = {"episode_id": episode_id, "task_id": task_id, "group_id": group_id, "state": state}
            yield RecordedSession(session=session, metrics=metrics, extra=extra)


def _spoken(branch: Branch, *, decoder: TokenDecoder) -> tuple[list[Message], list[dict[str, Any]]]:
    """The branch's messages, and what ATIF has room for of each answer."""
    ids = np.concatenate([part for each in branch.path for part in (each.tail_ids, each.sampled_ids)]).tolist()
    rounds = {each.round_index: each for each in branch.path}
    turns = turns_of(branch, decoder=decoder)
    words = [words_of(turn, ids[turn.token_start : turn.token_end], decoder=decoder) for turn in turns]
    messages: list[Message] = []
    metrics = []
    calls: list[str] = []
    for number, (turn, text) in enumerate(zip(turns, words, strict=True)):
        results = _RESULT.findall(text) if turn.role == "user" and text.lstrip().startswith("<tool_response>") else None
        results = [text] if turn.role == TOOL else results
        if results is not None and len(results) == len(calls):
            pairs = zip(calls, results, strict=True)
            messages += [{"role": "tool", "content": result, "tool_call_id": call} for call, result in pairs]
        elif turn.role == ASSISTANT:
            following = words[number + 1] if number + 1 < len(words) else None
            messages.append(_answer(text, following=following, number=len(messages)))
            round_ = rounds[turn.round]
            if not (turn.sampled and turn.trained and text) or round_.finish_reason == CUT:
                messages[-1]["weight"] = 0
            metrics.append(_metrics(round_, prompt=ids[: turn.token_start]) if turn.sampled else {})
        else:
            messages.append({"role": "user" if turn.role in (PROMPT, TOOL) else turn.role, "content": text})
        calls = [call["id"] for call in messages[-1].get("tool_calls", ())]
    return messages, metrics


def _answer(text: str, *, following: str | None, number: int) -> Message:
    """An answer with its thought and its calls apart. Calls to which not as many results follow stay text."""
    thought, ends, rest = text.partition("</think>")
    message: Message = {"role": ASSISTANT, "content": rest.lstrip("\n") if ends else text}
    if ends:
        message["reasoning_content"] = thought.removeprefix("<think>").strip("\n")
    found = _CALL.findall(message["content"])
    results = len(found) if following is None else following.count("<tool_response>") or 1
    try:
        calls = [json.loads(each) for each in found] if results == len(found) else []
        parts = [(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls]
    except (ValueError, LookupError, TypeError, RecursionError):
        parts = []
    if parts and all(isinstance(name, str) for name, _ in parts):
        message["content"] = message["content"].partition("<tool_call>")[0].removesuffix("\n")
        message["tool_calls"] = [
            {"id": f"call_{number}_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(parts)
        ]
    return message


def _metrics(round_: Round, *, prompt: list[int]) -> dict[str, Any]:
    extra: dict[str, Any] = {"round": round_.round_index, "finish_reason": round_.finish_reason}
    extra["policy_versions"] = round_.versions.tolist()
    if round_.trained is not None:
        extra["trained"] = round_.trained.tolist()
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(round_.sampled_ids),
        "prompt_token_ids": prompt,
        "completion_token_ids": round_.sampled_ids.tolist(),
        "logprobs": round_.logprobs.tolist(),
        "extra": extra,
    }
