"""A run's folder as a run leaves it, made in a second: a ledger, metrics, states of the machine and a tokenizer of bytes.

It holds what the page must show: trained, ready, open, evicted and failed groups, an episode with branches and a cause, one that is
hostile, and one of 100,000 tokens.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from buffers.ledger.branches import MEMO_BYTES
from buffers.ledger.ledger import Ledger
from buffers.records import Round, ScoreDetail, Task

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>\u202e"
LONG_LINE = 1_000_000
LONG_TOKENS = 100_000
STEPS = 40
TRAINED, SIZE = 24, 4
MARKS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """The folder, and the episodes that tests open."""

    folder: Path
    branched: str
    hostile: str
    long: str


def byte_tokenizer() -> Tokenizer:
    """A token a byte, one of 1,000 letters, and the marks of ChatML."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "x" * 1000])}
    made = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return made


class RunMaker:
    """Writes the ledger by the same calls as a run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.tokenizer = byte_tokenizer()
        (folder / "model").mkdir()
        self.tokenizer.save(str(folder / "model" / "tokenizer.json"))
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.num_tasks = 0

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def turn(self, role: str, text: str) -> list[int]:
        return self.ids(f"<|im_start|>{role}\n{text}<|im_end|>\n")

    def open(self, *, version: int, size: int = SIZE) -> list[str]:
        """A group whose members run."""
        self.num_tasks += 1
        prompt = [{"role": "user", "content": f"walk to {self.num_tasks}"}]
        task = Task(task_id=f"walk:{self.num_tasks}", prompt=prompt, ground_truth=self.num_tasks, agent_name="walk")
        self.ledger.put_tasks([task]).result()
        opened = self.ledger.open_group(task.task_id, instance=0, group_size=size).result()
        for one in opened:
            self.ledger.start_episode(one.episode_id, version=version).result()
        return [one.episode_id for one in opened]

    def round(
        self, episode: str, *, index: int, tail: Sequence[int], said: Sequence[int], version: int,
        parent: int | None = None, cause: str = "", finish: str = "stop",
    ) -> None:  # fmt: skip
        places = np.arange(len(said))
        memo = index.to_bytes(1, "little") * MEMO_BYTES + cause.encode()
        self.ledger.put_round(
            Round(
                episode_id=episode, round_index=index, parent=parent, finish_reason=finish, memo=memo,
                tail_ids=np.array(tail, dtype=np.int32), sampled_ids=np.array(said, dtype=np.int32),
                logprobs=-(np.abs(np.sin(places + index)) ** 4 * 9).astype(np.float32),
                versions=np.full(len(said), version, dtype=np.int32),
            )
        ).result()  # fmt: skip

    def talk(self, episode: str, *, version: int, said: str = "left") -> None:
        prompt = self.turn("user", "Left or right?") + self.ids("<|im_start|>assistant\n")
        self.round(episode, index=0, tail=prompt, said=self.ids(f"{said}<|im_end|>"), version=version)

    def score(self, episode: str, value: float, *, judge: str = "") -> None:
        assert self.ledger.notify_score(episode, value, detail=ScoreDetail(judge=judge)).result()

    def trained_groups(self) -> None:
        for step in range(1, TRAINED + 1):
            for place, episode in enumerate(self.open(version=step - 1)):
                self.talk(episode, version=step - 1)
                self.score(episode, place / SIZE if step % 5 else 0.5)
            batch = self.ledger.claim(1, min_version=0).result()
            assert batch is not None
            self.ledger.commit_step(batch.lease_id, step=step, version=step).result()

    def branched(self) -> str:
        """Thoughts, a tool, and a history that the agent changed."""
        first, *others = self.open(version=TRAINED)
        start = self.ids("<|im_start|>assistant\n")
        asked = self.turn("system", "You walk on a line.") + self.turn("user", "You are at 3, the goal at 7.") + start
        call = '<think>Four to the right.</think>I look first.<tool_call>look({"far": true})</tool_call><|im_end|>'
        self.round(first, index=0, tail=asked, said=self.ids(call), version=TRAINED - 1, finish="tool_calls")
        seen = self.ids("\n") + self.turn("tool", "nothing but numbers") + start
        self.round(first, index=1, parent=0, tail=seen, said=self.ids("right, right<|im_end|>"), version=TRAINED)
        edited = self.turn("user", "You are at 4.") + start
        self.round(
            first, index=2, tail=edited, said=self.ids("right<|im_end|>"), version=TRAINED, cause="history_edited"
        )
        for other in others:
            self.talk(other, version=TRAINED)
        for one in (first, *others):
            self.score(one, 0.25)
        return first

    def hostile(self) -> str:
        """Markup, a line of a million letters, and characters that turn the reading direction."""
        (episode,) = self.open(version=TRAINED, size=1)
        wide = self.tokenizer.token_to_id("x" * 1000)
        tail = self.turn("user", HOSTILE) + self.ids("<|im_start|>tool\n") + [wide] * (LONG_LINE // 1000)
        start = self.ids("<|im_end|>\n<|im_start|>assistant\n")
        self.round(episode, index=0, tail=tail + start, said=self.ids(f"{HOSTILE}<|im_end|>"), version=TRAINED)
        self.score(episode, 0.0)
        return episode

    def long(self) -> str:
        """So many tokens that nobody wants them at once."""
        (episode,) = self.open(version=TRAINED, size=1)
        asked = self.turn("user", "Tell all.") + self.ids("<|im_start|>assistant\n")
        said = (self.ids("one step to the right and ") * (LONG_TOKENS // 20))[: LONG_TOKENS - len(asked)]
        self.round(episode, index=0, tail=asked, said=said, version=TRAINED, finish="length")
        return episode

    def failed(self) -> None:
        """Two episodes that passed their deadline, and will be tried no more."""
        for _ in range(2):
            (episode,) = self.open(version=TRAINED, size=1)
            self.talk(episode, version=TRAINED)
            self.ledger.fail_episode(episode, "deadline: 30 s", max_attempts=1).result()


def write_metrics(folder: Path, *, steps: int, lift: float = 0.0) -> None:
    lines = []
    for step in range(1, steps + 1):
        wave = math.sin(step / 5)
        lines.append(
            {
                "step": step, "reward/mean": 0.2 + step / 60 + lift, "reward/std": 0.1, "policy/entropy": 2.0 - wave / 4,
                "reward/min": 0.0, "reward/max": 1.0, "batch/episodes": 32,
                "policy/approx_kl": 10.0 ** (-4 + wave), "batch/equal_groups": 0.25, "time/step_s": 3.0 + wave,
            }
        )  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def machine_line(*, at: float, step: int = TRAINED, prompts: int = 3, learner: str = "waiting") -> dict[str, object]:
    """A line of machine.jsonl."""
    engine = {
        "name": "e0", "is_up": True, "version": step, "running": 9, "waiting": 2, "kv_share": 0.4, "tokens_per_s": 812.0,
        "cached_share": 0.7, "restarts": 0, "preemptions": 0,
    }  # fmt: skip
    return {
        "at": at, "pid": 1, "host": "elsewhere", "began": 0.0, "phase": "", "step": step, "steps_planned": 60,
        "version": step, "learner": learner, "learner_since": at, "tasks": {"opened": 96, "admissible_groups": 0},
        "pool": {"slots": 16, "running": 12, "agents_waiting": 4, "started": 700, "scored": 650, "failed": 3},
        "prompts_waiting": prompts, "generating": 9, "engines": [engine, {**engine, "name": "e1", "is_up": False}],
        "groups": {"open": 3, "ready": 1, "leased": 0, "trained": TRAINED, "evicted": 1}, "rounds": 9000, "tokens": 120000,
    }  # fmt: skip


CONFIG = """\
run: {name: NAME, steps: 60, reward_optimum: 1.0}
buffer: {groups_per_step: 8, group_size: 4, max_policy_lag: 1}
rollout: {max_tokens: 64}
"""


def prepare(folder: Path) -> PreparedRun:
    """Make the run of the tests."""
    maker = RunMaker(folder)
    with maker.ledger:
        maker.trained_groups()
        branched = maker.branched()
        hostile = maker.hostile()
        long = maker.long()
        maker.failed()
    write_metrics(folder, steps=STEPS)
    (folder / "config.yaml").write_text(CONFIG.replace("NAME", folder.name))
    now = time.time()
    lines = [machine_line(at=now - 120 + second, prompts=second % 7) for second in range(120)]
    (folder / "machine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return PreparedRun(folder=folder, branched=branched, hostile=hostile, long=long)


def prepare_curves(folder: Path) -> Path:
    """A second run, of which only the curves are looked at."""
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG.replace("NAME", folder.name))
    write_metrics(folder, steps=STEPS, lift=0.1)
    return folder
