"""GSM8K: the data set as a task file in verl's columns, and as an environment with several tries.

`python -m env_adapters.gsm8k --out FOLDER [--from LOCAL_COPY] [--tools]` writes `train.parquet` and `test.parquet`. The
local copy is the original (`question`, `answer` ending in `#### 18`), as JSON lines or parquet: a folder with two files whose
names hold `train` and `test`. Without one, the sample beside this module is used: 32 problems written for this project, in
the same form. Invariant: the same copy gives the same bytes. It downloads nothing. How an answer is judged is in
`env_adapters.scoring.scorers`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from buffers.errors import TaskError
from buffers.records import Task
from buffers.tasks.parquet import read_rows, write_tasks
from env_adapters.adapter import EnvAdapter, Message, Step, task_of, user
from env_adapters.scoring.scorers import SCORERS

SAMPLE = Path(__file__).with_name("gsm8k_sample.jsonl")
SPLITS = ("train", "test")
DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = "Think step by step, and write the final answer after `####`."
TOOLS_SYSTEM = (
    "You solve mathematical problems. Think step by step; then call the tool `calc_gsm8k_reward` with your answer, and think "
    "again if it was wrong. Write the final answer as `#### <answer>`."
)
WRONG = "That is not the answer. Try again, and write the final answer after `####`."
_FINAL = re.compile(r"####\s*(-?[\d.,]+)\s*$")


class GSM8KEnv(EnvAdapter):
    """The problem, then up to `tries` answers: 1 when one is right by `scorer`, less `penalty` for each wrong one before."""

    def __init__(self, *, tries: int = 1, penalty: float = 0.0, scorer: str = "gsm8k_strict") -> None:
        if scorer not in SCORERS:
            raise TypeError(f"scorer must be one of {sorted(SCORERS)}, got {scorer!r}")
        self._tries = tries
        self._penalty = penalty
        self._judge = SCORERS[scorer]
        self._score = 0.0
        self._wrong = 0

    async def reset(self, task: dict[str, Any], *, seed: int) -> list[Message]:
        """The task's own prompt. The seed changes nothing: the problem is the task's."""
        self._task = task_of(task)
        return self._task.prompt

    async def step(self, action: str) -> Step:
        right = self._judge(self._task, action)
        if right:
            self._score = right - self._penalty * self._wrong
            return Step(messages=[], done=True, reward=self._score)
        self._wrong += 1
        return Step(messages=[user(WRONG)], done=self._wrong >= self._tries, reward=0.0)

    async def score(self) -> float:
        return self._score


def problems(source: Path, *, split: str) -> Iterator[dict[str, Any]]:
    """The rows of a split, of a folder with a file for each, or of the sample. Raises TaskError."""
    if source == SAMPLE:
        yield from (row for row in _lines(source) if row["split"] == split)
        return
    path = _file_of(source, split=split)
    yield from (read_rows(path, columns=["question", "answer"]) if path.suffix == ".parquet" else _lines(path))


def tasks_of_problems(rows: Iterable[Mapping[str, Any]], *, split: str, tools: bool, source: str) -> list[Task]:
    """Problems as tasks. Raises TaskError naming the row that is none."""
    tasks = []
    for index, row in enumerate(rows):
        question, answer = row.get("question"), row.get("answer")
        final = _FINAL.search(answer) if isinstance(answer, str) else None
        if not isinstance(question, str) or not question or final is None:
            raise TaskError(
                f"{source}, row {index}: must have a question, and an answer that ends in `#### number`, got {dict(row)!r:.150}; "
                "use the original files"
            )
        tasks.append(_task(index, question, str(answer), truth=final[1].replace(",", ""), split=split, tools=tools))
    return tasks


def _task(index: int, question: str, answer: str, *, truth: str, split: str, tools: bool) -> Task:
    text = f"{question} {INSTRUCTION}"
    system = [{"role": "system", "content": TOOLS_SYSTEM}] if tools else []
    return Task(
        task_id=f"gsm8k-{split}:{index}",
        prompt=[*system, {"role": "user", "content": text}],
        data_source=DATA_SOURCE,
        ground_truth=truth,
        agent_name="tool_agent" if tools else None,
        extra_info={
            "index": index,
            "split": split,
            "question": question,
            "answer": answer,
            "need_tools_kwargs": tools,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}},
        },
    )


def _file_of(folder: Path, *, split: str) -> Path:
    kinds = (".parquet", ".jsonl")
    files = sorted(path for path in folder.rglob("*") if split in path.name and path.suffix in kinds)
    if len(files) != 1:
        names = [path.relative_to(folder).as_posix() for path in files]
        raise TaskError(
            f"--from must be a folder with one .jsonl or .parquet file whose name holds {split!r}, got {names} in {folder}; "
            "put the original files there"
        )
    return files[0]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TaskError(
                    f"{path}, row {number}: must be JSON, got {line[:60]!r} ({error}); write it again"
                ) from error
            if not isinstance(row, dict):
                raise TaskError(f"{path}, row {number}: must be a JSON object, got {line[:60]!r}; write it again")
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description="Write GSM8K as task files in verl's columns.")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument(
        "--from", dest="source", type=Path, default=SAMPLE, help="folder with a local copy; default: a sample"
    )
    parser.add_argument("--tools", action="store_true", help="rows for the tool agent, with the tool calc_gsm8k_reward")
    given = parser.parse_args()
    try:
        for split in SPLITS:
            rows = problems(given.source, split=split)
            tasks = tasks_of_problems(rows, split=split, tools=given.tools, source=f"{given.source} ({split})")
            write_tasks(given.out / f"{split}.parquet", tasks, structs=True)
            print(f"{given.out / f'{split}.parquet'}: {len(tasks)} problems")
    except TaskError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
