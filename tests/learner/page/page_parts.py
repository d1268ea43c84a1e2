"""A run's folder as a run leaves it, with a real ledger in it: two trained groups, one evicted, one ready, one open."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from buffers.ledger.ledger import Ledger
from buffers.records import Round, ScoreDetail, Task
from tests.support.buffer_parts import make_round

CONFIG = {
    "run": {"name": "seen", "dir": "runs", "steps": 4, "reward_optimum": 1.0},
    "buffer": {"groups_per_step": 1, "group_size": 2, "max_policy_lag": 1, "node": ""},
    "rollout": {"max_tokens": 4},
    "server": {"host": "127.0.0.1"},
    "agents": {"api_key": "sk-abcdefghijklmnopqrstuvwxyz"},
}
STEPS: list[dict[str, Any]] = [
    {"step": 0, "sft/last_loss": 0.5},
    {"step": 1, "reward/mean": 0.25, "time/step_s": 1.0},
    {"step": 2, "reward/mean": 0.75, "time/step_s": 2.0, "generation/aborted": 1.0},
]
OPENING = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHé, 日本?<|im_end|>\n<|im_start|>assistant\n"
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
TYPES = {"i32": np.int32, "f32": np.float32, "u8": np.uint8}
KEY = "us-1-0-0-" + "0123456789abcdef" * 2


def make_tokenizer() -> Tokenizer:
    """A token for each byte, and the chat marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    return core


TOKENIZER = make_tokenizer()


def ids_of(text: str) -> list[int]:
    """The token ids of a text."""
    found: list[int] = TOKENIZER.encode(text).ids
    return found


def said(episode_id: str, prompt: str, answer: str, *, index: int = 0, **more: Any) -> Round:
    """A round that was asked and sampled in words."""
    memo = more.pop("memo", b"")
    return replace(make_round(episode_id, index=index, tail=ids_of(prompt), sampled=ids_of(answer), **more), memo=memo)


def memo(history: int, cause: str = "") -> bytes:
    """A round's memo as the server writes it."""
    return bytes([history]) * 16 + b"-" * 48 + cause.encode()


def make_run(folder: Path, *, name: str = "seen") -> Path:
    """The folder; its ledger is closed."""
    run = folder / name
    (run / "model").mkdir(parents=True)
    config = {**CONFIG, "run": {**CONFIG["run"], "name": name}}  # type: ignore[dict-item]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    TOKENIZER.save(str(run / "model" / "tokenizer.json"))
    write_lines(run / "metrics.jsonl", STEPS)
    with Ledger(run / "ledger.sqlite") as ledger:
        fill(ledger)
    return run


def write_lines(file: Path, lines: Sequence[dict[str, Any]], *, mode: str = "w") -> None:
    """Write or append JSON lines."""
    with file.open(mode) as sink:
        sink.writelines(json.dumps(line) + "\n" for line in lines)


def machine_line(**more: Any) -> dict[str, Any]:
    """A line of machine.jsonl, of now."""
    engine = {
        "name": "e0",
        "is_up": True,
        "version": 2,
        "running": 3,
        "waiting": 1,
        "kv_share": 0.5,
        "tokens_per_s": 10.0,
    }
    return {
        "at": time.time(), "pid": 1, "host": "elsewhere", "began": 0.0, "phase": "", "step": 2, "steps_planned": 4,
        "learner": "waiting", "tasks": {"admissible_groups": 1}, "prompts_waiting": 2, "generating": 3, "engines": [engine],
        "pool": {"slots": 4, "running": 4, "agents_waiting": 2, "started": 9, "scored": 5, "failed": 1},
        "groups": {"open": 1, "ready": 1, "leased": 0, "trained": 2, "evicted": 1}, "rounds": 12, "tokens": 40, **more,
    }  # fmt: skip


def fill(ledger: Ledger) -> None:
    """Group 1 is trained in step 1, group 2 in step 2, group 3 is evicted, group 4 ready, group 5 open."""
    first = open_group(ledger, 1, version=0)
    long = said(first[0], OPENING, "<think>hm</think>a<|im_end|>", memo=memo(1))
    ledger.put_round(long)
    more = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    ledger.put_round(said(first[0], more, "b<|im_end|>", index=1, parent=0, version=1, memo=memo(2)))
    edited = said(first[0], OPENING + "x", "c", index=2, finish_reason="length", memo=memo(3, "history_edited"))
    ledger.put_round(edited)
    ledger.put_round(said(first[0], more, "lost", index=3, parent=1, finish_reason="abort", memo=memo(4)))
    ledger.put_round(said(first[1], OPENING, HOSTILE, memo=memo(1)))
    ledger.notify_score(first[0], 0.5, detail=ScoreDetail(judge="style", final=False)).result()
    ledger.notify_score(first[0], 1.0, detail=ScoreDetail(judge="truth", hint="think")).result()
    ledger.notify_score(first[0], 0.25, detail=ScoreDetail(round_index=1)).result()
    ledger.notify_score(first[1], 0.0).result()
    train(ledger, step=1)
    for task, version in ((2, 1), (4, 2)):
        for number, episode in enumerate(open_group(ledger, task, version=version)):
            ledger.put_round(said(episode, OPENING, f"the key {KEY}" if task == 4 else "ok", version=version))
            ledger.notify_score(episode, float(number)).result()
        if task == 2:
            train(ledger, step=2)
            failed = open_group(ledger, 3, version=2)
            ledger.put_round(said(failed[0], OPENING, "no"))
            ledger.fail_episode(failed[0], "deadline: 3 s", max_attempts=1).result()
    ledger.put_round(said(open_group(ledger, 5, version=2)[0], OPENING, "wait", version=2))


def open_group(ledger: Ledger, number: int, *, version: int) -> list[str]:
    """A group of two running episodes."""
    agent = "walker" if number == 2 else None
    ledger.put_tasks(
        [
            Task(
                task_id=f"walk-{number}",
                prompt=[{"role": "user", "content": "go"}],
                ground_truth=number,
                agent_name=agent,
            )
        ]
    )
    episodes = ledger.open_group(f"walk-{number}", instance=0, group_size=2).result()
    for episode in episodes:
        ledger.start_episode(episode.episode_id, version=version).result()
    return [episode.episode_id for episode in episodes]


def train(ledger: Ledger, *, step: int) -> None:
    """Claim one group, and commit the step that it was trained in."""
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None
    ledger.commit_step(batch.lease_id, step=step, version=step).result()


def figures_of(batch: Any) -> dict[str, np.ndarray]:
    """Recognisable figures for a batch's trained tokens."""
    number = batch.num_trained_tokens
    return {
        "learner": -np.arange(number, dtype=np.float32),
        "start": np.full(number, -0.5, np.float32),
        "advantage": np.linspace(-1.0, 1.0, number, dtype=np.float32),
        "weighed": np.ones(number, np.uint8),
    }


def unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """(head, arrays) of a window of tokens."""
    assert data[:4] == b"USPT"
    (length,) = struct.unpack_from("<I", data, 4)
    assert (8 + length) % 8 == 0
    head = json.loads(data[8 : 8 + length])
    arrays = {
        each["name"]: np.frombuffer(data, TYPES[each["type"]], count=head["count"], offset=8 + length + each["offset"])
        for each in head["arrays"]
    }
    return head, arrays
