"""Rules of learner/startup/hub.py, with huggingface_hub's own client in front of a stand-in for the hub on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from buffers.errors import UnderstudyError
from buffers.tasks.parquet import read_tasks
from configs.schema import Config
from learner.startup.hub import is_hub_model, with_local_files
from tests.learner.startup.fake_hub import FakeHub, fake_hub

pytestmark = pytest.mark.seconds

COLUMNS = {"prompt": "question", "ground_truth": "answer"}
GSM8K = [{"question": f"{n} + 1?", "answer": f"One more.\n#### {n + 1}", "level": "easy"} for n in range(5)]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.chdir(tmp_path)
        yield served


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "video.mp4").write_bytes(b"not of a model")
    return folder


def config_of(tmp_path: Path, **sections: dict[str, object]) -> Config:
    return Config(**{"run": {"dir": str(tmp_path / "runs")}, **sections})


def test_a_model_of_the_hub_is_downloaded_once_and_is_a_folder_then(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("models", "owner/small", model(tmp_path / "served"))
    config = config_of(tmp_path, model={"path": "owner/small"})
    folder = Path(with_local_files(config).model.path)
    assert folder.is_relative_to(tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert Path(with_local_files(config).model.path) == folder
    assert hub.asked == []


def test_a_folder_stays_a_folder_whatever_the_hub_has(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("models", "owner/small", model(tmp_path / "served"))
    model(tmp_path / "owner" / "small")
    config = config_of(tmp_path, model={"path": "owner/small"})
    assert not is_hub_model("owner/small") and with_local_files(config).model.path == "owner/small"
    assert hub.asked == []


def test_a_name_that_is_neither_is_refused_with_both_readings(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(UnderstudyError) as refused:
        with_local_files(config_of(tmp_path, model={"path": "owner/none"}))
    told = str(refused.value)
    assert f"{tmp_path / 'owner' / 'none'} is not a folder, and {hub.url} has no such model" in told
    assert "\n" not in told


def test_a_model_without_a_config_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    hub.add("models", "owner/empty", tmp_path / "served")
    with pytest.raises(UnderstudyError, match=r"got owner/empty, which has no config\.json on the hub"):
        with_local_files(config_of(tmp_path, model={"path": "owner/empty"}))


@pytest.mark.parametrize(("offline", "told"), [("1", "HF_HUB_OFFLINE is set"), ("0", "did not give it")])
def test_without_a_network_one_line_says_so(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: str, told: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    with pytest.raises(UnderstudyError, match=told) as refused:
        with_local_files(config_of(tmp_path, model={"path": "owner/small"}))
    assert "\n" not in str(refused.value)


def parquet(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(GSM8K), path)


@pytest.mark.parametrize(
    ("file", "branch"),
    [("main/train-00000-of-00001.parquet", "main"), ("main/train/0000.parquet", "refs/convert/parquet")],
)
def test_a_data_set_of_the_hub_becomes_a_task_file(hub: FakeHub, tmp_path: Path, file: str, branch: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "README.md").touch()
    hub.add("datasets", "openai/gsm8k", empty)
    parquet(tmp_path / "served" / file)
    hub.add("datasets", "openai/gsm8k", tmp_path / "served", branch=branch)
    data = {"tasks": "hf://openai/gsm8k/main/train", "columns": COLUMNS}
    config = config_of(tmp_path, data=data)
    path = with_local_files(config).data.tasks
    assert path == with_local_files(config).data.tasks
    tasks = list(read_tasks(Path(str(path))))
    assert [task.prompt for task in tasks] == [[{"role": "user", "content": row["question"]}] for row in GSM8K]
    assert [task.ground_truth for task in tasks] == [row["answer"] for row in GSM8K]
    assert {task.data_source for task in tasks} == {"openai/gsm8k"}


def saved_split(folder: Path, *, batches: int) -> Path:
    """As `datasets.Dataset.save_to_disk` writes a split: streams of Arrow's, and a file that lists them."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{batches:05}.arrow" for number in range(batches)]
    for number, name in enumerate(names):
        table = pa.Table.from_pylist(GSM8K[number::batches])
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_split_on_this_disk_becomes_a_task_file(tmp_path: Path) -> None:
    folder = saved_split(tmp_path / "sums" / "train", batches=2)
    config = config_of(tmp_path, data={"tasks": {str(folder): 2.0}, "columns": COLUMNS})
    ((path, weight),) = with_local_files(config).data.task_files.items()
    assert weight == 2.0
    told = [str(task.prompt[0]["content"]) for task in read_tasks(Path(path))]
    assert told == [row["question"] for row in (*GSM8K[0::2], *GSM8K[1::2])]


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({}, "data.columns must say which column of train is the prompt, got {}; it has question, answer, level"),
        ({"prompt": "text"}, "data.columns.prompt must be a column of train, got 'text'"),
    ],
)
def test_columns_that_are_not_there_are_refused(tmp_path: Path, columns: dict[str, str], told: str) -> None:
    folder = saved_split(tmp_path / "sums" / "train", batches=1)
    with pytest.raises(UnderstudyError) as refused:
        with_local_files(config_of(tmp_path, data={"tasks": str(folder), "columns": columns}))
    assert told in str(refused.value)
    assert not (tmp_path / "runs" / ".tasks").exists()


def test_a_folder_of_several_splits_is_refused_with_one_of_them(tmp_path: Path) -> None:
    saved_split(tmp_path / "sums" / "train", batches=1)
    (tmp_path / "sums" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(UnderstudyError, match=r"got the splits \['train'\]; name .*sums/train"):
        with_local_files(config_of(tmp_path, data={"tasks": str(tmp_path / "sums"), "columns": COLUMNS}))
