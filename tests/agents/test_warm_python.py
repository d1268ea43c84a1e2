"""Rules of agents/warm_python.py: a program that is forked has what one that starts by itself has, and its modules before."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil
import pytest

from agents.external import AgentPerEpisode, AgentPlace
from agents.warm_python import WarmPython
from buffers.errors import AgentError
from buffers.records import LeasedEpisode
from configs.load import ConfigError, load_config
from env_adapters.scoring.rewards import Rewards
from tests.agents.test_external import TASK, ScriptedService
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.seconds

TELLS = """
import json, os, sys
sys.stderr.write("said\\n")
named = ("LC_TIME", "OPENAI_API_KEY", "EPISODE_ID", "SEED", "TASK_JSON", "TMPDIR", "PYTHONPATH")
told = {
    "argv": sys.argv, "cwd": os.getcwd(), "task": sys.stdin.read(), "file": __file__, "name": __name__,
    "environment": {name: os.environ.get(name) for name in named}, "path": sys.path[0],
    "leads": os.getsid(0) == os.getpid() == os.getpgid(0), "open": sorted(os.listdir("/proc/self/fd")),
    "ours": [name for name in sys.modules if name.split(".")[0] in ("agents", "buffers", "configs", "tests")],
}
preloaded = "colorsys" in sys.modules
with open("told.json", "w") as file:
    json.dump([told, preloaded], file)
print(42)
"""


async def play(
    folder: Path, program: str, *, preload: tuple[str, ...] = ("colorsys",), service: ScriptedService | None = None
) -> ScriptedService:
    """One episode of a program in Python, which `exact_match` judges."""
    folder.mkdir(exist_ok=True)
    (folder / "agent.py").write_text(program)
    service = service or ScriptedService(TASK)
    place = AgentPlace(
        environment=lambda key: {"OPENAI_API_KEY": key}, worker_key=lambda _: "w", folder=folder / "agents"
    )
    await AgentPerEpisode(
        [sys.executable, str(folder / "agent.py"), "word"], place=place, service=service, concurrency=1,
        judge=Rewards("exact_match"), preload=preload,
    ).run()  # fmt: skip
    return service


async def test_a_program_finds_its_modules_and_everything_else_as_one_that_starts_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_TIME", "C")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    told: list[dict[str, Any]] = []
    for name, preload in (("forked", ("colorsys",)), ("alone", ())):
        service = await play(Path("here"), TELLS, preload=preload)  # as `runs/NAME` is
        assert service.scores == {"t": 1.0}
        seen, preloaded = json.loads((tmp_path / "here" / "agents" / "lane-0" / "told.json").read_text())
        assert preloaded is (name == "forked")
        assert (tmp_path / "here" / "agents" / "lane-0" / "log.txt").read_text() == "said\n42\n" * (1 + len(told))
        told.append(seen)
    assert told[0] == told[1]
    assert told[0]["leads"] and told[0]["ours"] == [] and json.loads(told[0]["task"])["task_id"] == "t"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "agent exited with code -9 before a score was reported"),
        ("import sys; sys.exit(7)", "agent exited with code 7 before a score was reported"),
        ("raise ValueError", "agent exited with code 1 before a score was reported"),
    ],
)
async def test_how_a_program_ended_is_told(tmp_path: Path, program: str, reason: str) -> None:
    (tmp_path / "agent.py").write_text(program)
    service = ScriptedService(TASK)
    place = AgentPlace(environment=lambda _: {}, worker_key=lambda _: "w", folder=tmp_path)
    command = [sys.executable, str(tmp_path / "agent.py")]
    await AgentPerEpisode(command, place=place, service=service, concurrency=1, preload=["colorsys"]).run()
    assert service.failed == {"t": reason}


async def test_programs_end_with_the_run_and_with_what_they_started(tmp_path: Path) -> None:
    program = f"""
import pathlib, subprocess, time
child = subprocess.Popen(["sleep", "1000"])
pathlib.Path({str(tmp_path)!r}, "pid").write_text(str(child.pid))
pathlib.Path({str(tmp_path)!r}, "pid").rename({str(tmp_path / "started")!r})
time.sleep(1000)
"""
    playing = asyncio.create_task(play(tmp_path, program))
    await exists(tmp_path / "started")
    child = psutil.Process(int((tmp_path / "started").read_text()))
    parent = child.parent()
    assert parent is not None and "warm_python" in " ".join(parent.cmdline())
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    for each in (child, parent):
        await asyncio.to_thread(each.wait, PATIENCE_S)


async def test_a_program_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    """As when the run is killed, whose connections the system closes then."""
    (tmp_path / "agent.py").write_text("import time; time.sleep(1000)")
    command = [sys.executable, str(tmp_path / "agent.py")]
    async with aclosing(WarmPython(command, modules=["colorsys"], env={}, folder=tmp_path / "warm")) as warm:
        with TemporaryFile() as file:
            forked = await warm.fork(*command, cwd=tmp_path, env={}, stdin=file, stdout=file, stderr=file)
        program = psutil.Process(forked.pid)
        await asyncio.sleep(0)  # it waits now
        forked.ended.cancel()
        await asyncio.to_thread(program.wait, PATIENCE_S)


async def test_an_interpreter_that_was_killed_is_replaced(tmp_path: Path) -> None:
    class Kills(ScriptedService):
        async def lease_episode(self, *, wait_s: float) -> LeasedEpisode | None:
            for each in psutil.Process().children():
                if "warm_python" in " ".join(each.cmdline()):
                    killed.append(each.pid)
                    os.kill(each.pid, signal.SIGKILL)
            return await super().lease_episode(wait_s=wait_s)

    killed: list[int] = []
    tasks = [type(TASK)(**{**TASK.private(), "task_id": name}) for name in "abc"]
    service = await play(tmp_path, "print(42)", service=Kills(*tasks))
    assert service.scores == dict.fromkeys("abc", 1.0) and len(set(killed)) == 3


async def test_a_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await play(tmp_path, "print(42)", preload=("colorsys", "no_such_module"))
    (error,) = raised.value.exceptions
    assert isinstance(error, AgentError)
    assert "agents.preload must name modules that" in str(error)
    assert "No module named 'no_such_module'" in str(error)


def test_what_cannot_be_forked_is_refused(tmp_path: Path) -> None:
    place = AgentPlace(environment=lambda _: {}, worker_key=lambda _: "w", folder=tmp_path)
    with pytest.raises(
        AgentError, match=r"agents.preload=\['json'\] needs an agents.command of an interpreter and a file"
    ):
        AgentPerEpisode(["sh", "-c", "true"], place=place, service=ScriptedService(), concurrency=1, preload=["json"])
    with pytest.raises(ConfigError, match=r"preload needs processes=0, got processes=1"):
        load_config(Path("configs/demo.yaml"), ["agents.preload=[openai]"])


async def exists(path: Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not path.exists():
            await asyncio.sleep(0.02)
