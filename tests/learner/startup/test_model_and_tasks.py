"""What is said of a run's task files before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from buffers.errors import TaskError
from buffers.records import Task
from buffers.tasks.parquet import write_tasks
from configs.load import load_config
from learner.players import make_players
from learner.startup.model_and_tasks import prepare_files

ANSWERS_ITSELF = "the run itself answers each prompt once, and data.scorer scores that"


async def _makes_nothing(*_: object) -> None: ...


@pytest.mark.parametrize(
    ("names", "overrides", "is_told"),
    [
        ([None, None], ["data.scorer=contains"], True),
        (["mine", None], ["data.scorer=contains"], True),  # some of the rows
        ([None], ["data.scorer={math: contains, default: exact_match}"], True),
        (["single_turn_agent"], ["data.scorer=contains"], False),  # the rows say so themselves
        (["mine"], ["data.scorer=contains"], False),
        ([None], [], False),  # waits for agents
        ([None], ["data.scorer=contains", "agents.command=[python, agent.py]", "agents.processes=0"], False),
    ],
)
async def test_a_run_that_answers_its_tasks_itself_says_so_at_the_start(
    tmp_path: Path, names: list[str | None], overrides: list[str], is_told: bool
) -> None:
    tasks = [
        Task(task_id=f"t{number}", prompt=[{"role": "user", "content": "Hi"}], ground_truth="x", agent_name=name)
        for number, name in enumerate(names)
    ]
    write_tasks(tmp_path / "tasks.parquet", tasks)
    bare = ["data.make=[]", "agents.command=[]", "env.command=[]", "sft.demonstrations=", "data.scorer="]
    config = load_config(overrides=[f"data.tasks={tmp_path / 'tasks.parquet'}", *bare, *overrides])
    lines: list[str] = []
    await prepare_files(
        config,
        folder=tmp_path,
        make=_makes_nothing,
        players=make_players(config),
        begins_with_sft=False,
        warn=lines.append,
    )
    assert [ANSWERS_ITSELF in line and "leave data.scorer out" in line for line in lines] == [True] * is_told


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"reward_model": '{"ground_truth": "4"}', "ability": "math", "__index_level_0__": 3}, ""),
        ({"reward_model": '{"ground_truth": "4"}', "agent": "mine", "extra": "x"}, "of the columns agent, extra"),
        ({"reward_model": '{"ground_truth": "4"}', "ground_truth": "4"}, "of the columns ground_truth"),
    ],
)
async def test_columns_that_are_not_read_are_named_at_the_start(tmp_path: Path, columns: dict, told: str) -> None:
    lines = await prepared(tmp_path, columns)
    assert [told in line for line in lines] == [True] * bool(told), lines


async def test_a_truth_in_a_column_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="must have the truth in a column 'reward_model', got one 'ground_truth'"):
        await prepared(tmp_path, {"ground_truth": "4"})


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [POINTER, b"<html>404 Not Found</html>", b"", None])
async def test_a_file_that_holds_no_weights_is_named_before_anything_starts(
    tiny_model: Path, tmp_path: Path, name: str, content: bytes | None
) -> None:
    """Clones without git-lfs, error pages, downloads that were cut off (None)."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    if content is None:
        weights = load_file(tiny_model / "model.safetensors")
        (save_file if name.endswith(".safetensors") else torch.save)(weights, model / name)
        content = (model / name).read_bytes()[:5000]
    (model / name).write_bytes(content)
    with pytest.raises(TaskError, match=f"{name} must be a .*; download the model again") as refused:
        await prepared(tmp_path, {}, f"model.path={model}")
    assert "\n" not in str(refused.value)


async def prepared(folder: Path, columns: dict, *overrides: str) -> list[str]:
    path = folder / "tasks.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "2 + 2?", **columns}]), path)
    bare = ["data.make=[]", "agents.command=[]", "env.command=[]", "sft.demonstrations=", "data.scorer="]
    config, lines = load_config(overrides=[f"data.tasks={path}", *bare, *overrides]), list[str]()
    await prepare_files(
        config,
        folder=folder,
        make=_makes_nothing,
        players=make_players(config),
        begins_with_sft=False,
        warn=lines.append,
    )
    return lines
