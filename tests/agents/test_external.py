"""Rules of agents/external.py: any command is an agent, with its task on stdin, judged by its output or its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from agents import external
from agents.external import MAX_CRASHES, AgentPerEpisode, AgentPlace, LongLivedAgents
from buffers.errors import AgentError, EpisodeClosed, ScoreError
from buffers.records import LeasedEpisode, Task
from buffers.tasks.parquet import write_tasks
from buffers.tasks.task_pool import PoolClosed
from env_adapters.scoring.rewards import Rewards
from env_adapters.scoring.scorers import SCORERS, ProgramOutput
from tests.env_adapters.scoring.test_rewards import scoring_server
from tests.support.run_parts import assert_nothing_left, start

TASK = Task(task_id="t", prompt=[{"role": "user", "content": "?"}], ground_truth="42", data_source="sums")


class ScriptedService:
    """Hands the tasks out once, and remembers how their episodes ended. `on_lease`: called with each lease."""

    def __init__(self, *tasks: Task) -> None:
        self._tasks = list(tasks)
        self._live: dict[str, Task] = {}
        self._ended: dict[str, asyncio.Event] = {}
        self.scores: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.early: dict[str, float] = {}
        """Scores that somebody else reports while the episode's program still runs."""

    async def lease_episode(self, *, wait_s: float) -> LeasedEpisode | None:
        if not self._tasks:
            raise PoolClosed("no more")
        task = self._tasks.pop(0)
        self._live[task.task_id], self._ended[task.task_id] = task, asyncio.Event()
        if task.task_id in self.early:
            await self.notify_score(task.task_id, self.early[task.task_id])
        return LeasedEpisode(episode_id=task.task_id, api_key=f"key-{task.task_id}", task=task.public(), seed=99)

    async def notify_score(self, episode_id: str, score: float, *, wait_for_disk: bool = False) -> bool:
        self._end(episode_id)
        self.scores[episode_id] = score
        return True

    async def fail_all(self, reason: str, *, worker: str | None = None) -> None:
        for episode_id in list(self._live):
            await self.fail(episode_id, reason)

    async def fail(self, episode_id: str, reason: str) -> None:
        if episode_id in self._live:
            self._end(episode_id)
            self.failed[episode_id] = reason

    def episode_view(self, episode_key: str) -> dict[str, Any]:
        task = self._live.get(episode_key.removeprefix("key-"))
        if task is None:
            raise EpisodeClosed("it ended")
        return {"task": task.private()}

    async def wait_ended(self, episode_id: str) -> None:
        await self._ended[episode_id].wait()

    @property
    def num_scored(self) -> int:
        return len(self.scores)

    @property
    def has_ended(self) -> bool:
        return not self._tasks

    def _end(self, episode_id: str) -> None:
        if self._live.pop(episode_id, None) is None:
            raise EpisodeClosed("it ended")
        self._ended[episode_id].set()


async def play(
    folder: Path, script: str, *, scorer: str | dict[str, str] | None = None, task: Task = TASK, **early: float
) -> ScriptedService:
    """One episode of a shell script."""
    service = ScriptedService(task)
    service.early = early
    place = AgentPlace(environment=lambda key: {"OPENAI_API_KEY": key}, worker_key="w", folder=folder)
    judge = Rewards(scorer) if scorer else None
    await AgentPerEpisode(["sh", "-c", script], place=place, service=service, concurrency=1, judge=judge).run()
    return service


async def test_an_agent_gets_what_programs_need_and_what_is_named_and_no_key_of_the_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"LC_TIME": "C", "TZ": "UTC", "SSL_CERT_FILE": "/certificates", "no_proxy": "127.0.0.1", "JUDGE_URL": "x"}
    secret = {
        "HF_TOKEN": "1",
        "WANDB_API_KEY": "2",
        "AWS_SECRET_ACCESS_KEY": "3",
        "RAY_AUTH_TOKEN": "4",
        "PYTHONPATH": "5",
    }
    ours = {
        "OPENAI_API_KEY": "the operator's",
        "HTTPS_PROXY": "http://me:secret@proxy:1",
        "HTTP_PROXY": "http://proxy:1",
    }
    for name, value in (kept | secret | ours).items():
        monkeypatch.setenv(name, value)
    place = AgentPlace(
        environment=lambda key: {"OPENAI_API_KEY": key}, worker_key=lambda _: "w", folder=tmp_path, named=("JUDGE_URL",)
    )
    await AgentPerEpisode(
        ["sh", "-c", "env -0 > seen"], place=place, service=ScriptedService(TASK), concurrency=1
    ).run()
    seen = dict(entry.split("=", 1) for entry in (tmp_path / "lane-0" / "seen").read_text().rstrip("\0").split("\0"))
    assert {name: seen.get(name) for name in kept} == kept
    assert set(secret) & set(seen) == set() and "HTTPS_PROXY" not in seen
    assert (seen["OPENAI_API_KEY"], seen["HTTP_PROXY"]) == ("key-t", "http://proxy:1")
    assert seen["PATH"] == os.environ["PATH"] and seen["HOME"] == os.environ["HOME"]


def test_a_variable_that_is_named_and_not_set_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"agents\.environment must name variables that are set, got NO_SUCH_VARIABLE"):
        AgentPlace(environment=lambda _: {}, worker_key=str, folder=tmp_path, named=("PATH", "NO_SUCH_VARIABLE"))


async def test_a_program_that_ends_before_the_tasks_is_started_again_and_one_that_does_nothing_ends_the_run(
    tmp_path: Path,
) -> None:
    place = AgentPlace(environment=lambda _: {}, worker_key=str, folder=tmp_path)
    service = ScriptedService(TASK)

    def agents(script: str) -> LongLivedAgents:
        return LongLivedAgents(["sh", "-c", script], place=place, service=service, processes=1, concurrency=1)

    reason = r"ended 5 times in a row without finishing an episode \(exit code 0\); such a program"
    with pytest.RaisesGroup(pytest.RaisesExc(AgentError, match=reason)):
        await agents("echo started >> ../starts; exit 0").run()
    assert (tmp_path / "starts").read_text().count("started") == MAX_CRASHES
    await service.lease_episode(wait_s=0.0)  # the last one
    await agents("exit 0").run()


def log_of(folder: Path) -> str:
    return (folder / "lane-0" / "log.txt").read_text()


async def test_the_task_is_on_stdin_and_in_the_environment_with_the_groups_seed(tmp_path: Path) -> None:
    script = 'cat > seen.json; echo "$TASK_JSON" > env.json; echo "$SEED $EPISODE_ID $OPENAI_API_KEY" > words.txt'
    await play(tmp_path, script)
    lane = tmp_path / "lane-0"
    assert json.loads((lane / "seen.json").read_text()) == TASK.public()
    assert json.loads((lane / "env.json").read_text()) == TASK.public()
    assert (lane / "words.txt").read_text() == "99 t key-t\n"
    assert "42" not in (lane / "seen.json").read_text(), "the ground truth is not the agent's"


async def test_a_large_task_is_on_stdin_and_in_a_file_and_need_not_be_read(tmp_path: Path) -> None:
    task = Task(task_id="t", prompt=[{"role": "user", "content": "x" * 300_000}])
    service = await play(tmp_path, 'wc -c < "$TASK_FILE"; test -z "$TASK_JSON"', task=task, scorer="exit_code")
    assert service.scores == {"t": 1.0} and int(log_of(tmp_path)) > 300_000


@pytest.mark.parametrize(
    ("scorer", "script", "score"),
    [
        ("exit_code", "exit 0", 1.0),
        ("exit_code", "exit 3", 0.0),
        ("exit_code", "kill -9 $$", 0.0),
        ("json_line", 'echo start; echo \'{"score": 0.25, "steps": 7}\'; echo bye', 0.25),
        ("json_line", "echo '{\"score\": 1}'; exit 5", 1.0),
        ("exact_match", "echo 42", 1.0),
        ("gsm8k_strict", "echo thinking; echo '#### 41'", 0.0),
        ({"sums": "contains"}, "echo it is 42, I think; echo 41 >&2", 1.0),
        ("tests.agents.test_external.by_length", "printf four", 4.0),
    ],
)
async def test_a_program_that_ended_without_a_score_is_judged(
    tmp_path: Path, scorer: str | dict[str, str], script: str, score: float
) -> None:
    service = await play(tmp_path, script, scorer=scorer)
    assert service.scores == {"t": score} and service.failed == {}


def by_length(task: Task, answer: str) -> float:
    assert isinstance(answer, ProgramOutput)
    return float(len(answer)) + answer.exit_code


@pytest.mark.parametrize(
    ("scorer", "script", "reason"),
    [
        (None, "exit 0", "agent exited with code 0 before a score was reported"),
        ("contains", "echo 42; exit 7", "agent exited with code 7 before a score was reported"),
        ({"other": "exit_code"}, "exit 0", "agent exited with code 0 before a score was reported"),
        ("json_line", "echo '{\"score\": NaN}'", "scorer: data.scorer json_line failed on task t: ValueError: a line"),
    ],
)
async def test_what_cannot_be_judged_is_a_failure_with_its_reason(
    tmp_path: Path, scorer: Any, script: str, reason: str
) -> None:
    service = await play(tmp_path, script, scorer=scorer)
    assert service.scores == {} and service.failed["t"].startswith(reason)


async def test_a_score_that_was_reported_stays(tmp_path: Path) -> None:
    service = await play(tmp_path, "exit 0", scorer="exit_code", t=0.5)
    assert service.scores == {"t": 0.5} and service.failed == {}


@pytest.mark.seconds
async def test_a_remote_scorer_gets_the_truth_the_output_and_the_exit_code(tmp_path: Path) -> None:
    with scoring_server() as (url, asked):
        service = await play(tmp_path, "printf 12345; exit 2", scorer=url)
    assert service.scores == {"t": 5.0}
    assert asked == [{"items": [{"task": TASK.private(), "answer": "12345", "exit_code": 2}]}]


@pytest.mark.seconds
async def test_a_program_that_prints_a_hundred_megabytes_is_judged_by_its_end_and_logged_whole(tmp_path: Path) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    script = "yes 0123456789abcde | head -c 100000000; echo; echo '{\"score\": 0.5}'"
    with scoring_server() as (url, asked):
        service = await play(tmp_path, script, scorer=url)
    assert service.scores == {"t": float(external.OUTPUT_BYTES)}
    assert asked[0]["items"][0]["answer"].endswith('{"score": 0.5}\n')
    assert os.path.getsize(tmp_path / "lane-0" / "log.txt") == 100_000_000 + 1 + len('{"score": 0.5}\n')
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 50_000


async def test_output_that_a_left_behind_process_holds_open_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "OUTPUT_WAIT_S", 0.2)
    service = await play(tmp_path, "echo 42; setsid sleep 3 & exit 0", scorer="exit_code")
    assert service.scores == {"t": 1.0}


def test_a_line_counts_when_it_is_an_object_with_a_finite_number() -> None:
    judge = SCORERS["json_line"]
    assert judge(TASK, '{"score": 1}\n{"score": true}\n{"score": "3"}\n[1]\n{"score": 1e999}\n{"score"') == 1.0
    assert judge(TASK, '  {"score": -2.5, "why": "late"}  ') == -2.5
    with pytest.raises(ValueError, match="must be"):
        judge(TASK, "0.5")
    with pytest.raises(TypeError, match="judges programs"):
        SCORERS["exit_code"](TASK, "text")


PROGRAM = """
import json, os, sys
import openai

task = json.load(sys.stdin)
assert int(os.environ["SEED"]) >= 0
if os.environ["EPISODE_ID"].endswith("-0-0"):  # the first attempt of a group's first member never asks the model
    print(json.dumps({"score": 1.0}))
    sys.exit()
reply = openai.OpenAI().chat.completions.create(model=os.environ["MODEL"], messages=task["prompt"], max_tokens=8)
text = reply.choices[0].message.content or ""
print("thinking about", task["task_id"])
print(json.dumps({"score": len(text) % 5, "file": task["task_id"].split(":")[0]}))
"""


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.long
def test_a_run_of_an_unmodified_program_on_two_weighted_files(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for name in ("large", "small"):
        tasks = [Task(task_id=f"{n}", prompt=[{"role": "user", "content": f"{name} {n}"}]) for n in range(6)]
        write_tasks(tmp_path / f"{name}.parquet", tasks)
    run = start(
        tmp_path, "run.steps=2", "sft.demonstrations=''", "env.command=[]", "data.make=[]", "data.scorer=json_line",
        f"data.tasks={{{tmp_path}/large.parquet: 3, {tmp_path}/small.parquet: 1}}",
        f"agents.command=['{{python}}', '{tmp_path / 'program.py'}']", "agents.processes=0", "agents.concurrency=4",
        "buffer.groups_per_step=4", "buffer.group_size=2",
    )  # fmt: skip
    code, output = run.wait()
    assert code == 0, output
    summary = run.summary()
    assert summary["steps"] == 2 and summary["episodes"] == 16
    failed = {name: count for name, count in summary["buffer"].items() if name.startswith("failed/")}
    assert set(failed) == {"failed/no rounds"} and failed["failed/no rounds"] >= 8, failed
    assert not summary["buffer"].get("evicted/failed"), "a score before any model call costs an attempt, not the group"
    logs = "".join(path.read_text() for path in run.folder.glob("agents/lane-*/log.txt"))
    scored = [json.loads(line)["file"] for line in logs.splitlines() if '"file"' in line]
    assert 0 < scored.count("small") < scored.count("large")
    assert "thinking about large::" in logs
    assert_nothing_left(run)


async def test_exit_codes_of_plain_prompts_are_refused() -> None:
    with pytest.raises(ScoreError, match="exit_code failed on task t: TypeError: scorer exit_code judges programs"):
        await Rewards("exit_code").score(TASK, "text")
