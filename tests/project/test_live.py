"""A whole live run: users with stock clients, feedback, updates, a gate, promote, rollback, a kill, and what is found after it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import psutil
import pyarrow
import pyarrow.parquet
import pytest

from tests.support.patience import PATIENCE_S
from tests.support.run_parts import ROOT, STARTED

WORDS = [
    "server.port=0", "rollout.max_tokens=6", "rollout.max_model_len=512", "serve.silence_s=0.5", "buffer.groups_per_step=4",
    "serve.gate.every=2", "serve.gate.margin=2", "data.scorer=contains",
]  # fmt: skip


class _Ends:
    """Ends a process and all below it with its test."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Live:
    def __init__(self, base: Path) -> None:
        tasks = base / "gate.parquet"
        row = {
            "prompt": [{"role": "user", "content": "Say a word."}],
            "reward_model": {"ground_truth": "m"},
            "data_source": "g",
        }
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 4), tasks)
        self.folder = base / "runs" / "live"
        self.words = [f"run.dir={base / 'runs'}", "run.name=live", f"serve.gate.tasks={tasks}", *WORDS]

    def command(self, *words: str) -> str:
        done = subprocess.run([sys.executable, "-m", "learner.cli", *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self) -> subprocess.Popen[bytes]:
        place = self.folder / "agent.env"
        place.unlink(missing_ok=True)
        with (self.folder.parent / "live.out").open("ab") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "learner.cli", "serve", *self.words], cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip
        STARTED.append(_Ends(process))
        until(place.is_file, self)
        self.find()
        return process

    def find(self) -> None:
        told = dict(word.split("=", 1) for word in shlex.split((self.folder / "agent.env").read_text()))
        self.url = told["OPENAI_BASE_URL"].removesuffix("/v1")

    @property
    def lines(self) -> list[dict[str, float]]:
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    @property
    def steps(self) -> list[dict[str, float]]:
        return [line for line in self.lines if "reward/mean" in line]

    @property
    def history(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads((self.folder / "versions" / "served.json").read_text())["history"]
        return found

    def answered(self, session: str) -> set[int]:
        """Versions that answered a session of this name."""
        listed = self.command(
            "ledger", "episodes", str(self.folder), "--where", "user=ann", "--limit", "9999", "--json"
        )
        found = [json.loads(line) for line in listed.splitlines()]
        return {
            version
            for each in found
            if each["session"]["name"] == session
            for version in (each["version"], each["max_version"])
        }

    @property
    def gated(self) -> list[dict[str, object]]:
        found = [json.loads(path.read_text()) for path in self.folder.glob("versions/v*/version.json")]
        return [each for each in found if each["state"] in ("promoted", "refused")]


def until(holds, live: Live) -> None:
    deadline = time.monotonic() + 4 * PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, (live.folder.parent / "live.out").read_text()[-3000:]
        time.sleep(0.1)


def clients_of(live: Live, keys: dict[str, str]) -> dict[str, openai.OpenAI]:
    return {name: openai.OpenAI(base_url=f"{live.url}/v1", api_key=key) for name, key in keys.items()}


def close(clients: dict[str, openai.OpenAI]) -> None:
    for client in clients.values():
        client.close()


def ask(client: openai.OpenAI, text: str, **more):
    return client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}], **more)


@pytest.mark.slow
@pytest.mark.long(minutes=3)
def test_users_are_served_learned_from_and_found_again_after_a_kill(tmp_path):
    live = Live(tmp_path)
    live.words += ["serve.gate.session_share=0.5", "serve.gate.sessions=4", "serve.sessions_keep_version=true"]
    live.words += ["buffer.replay.share=0.5", "buffer.replay.only=all"]
    patterns = tmp_path / "private.txt"
    patterns.write_text("codeword-\\w+\n")
    live.words.append(f"serve.private_patterns={patterns}")
    keys = {name: live.command("serve", "keys", "add", name, *live.words).strip() for name in ("ann", "bob")}
    process = live.start()
    clients = clients_of(live, keys)

    kept = {"x-session-id": "kept"}
    ask(clients["ann"], "Say a word.", extra_headers=kept)
    ask(clients["ann"], "Say codeword-apple.", extra_headers={"x-session-id": "hidden"})

    def use() -> bool:
        for name, client in clients.items():
            reply = ask(client, "Say a word.")
            score = float("m" in (reply.choices[0].message.content or ""))
            body = {"response_id": reply.id, "score": score}
            httpx.post(
                f"{live.url}/feedback", json=body, headers={"Authorization": f"Bearer {keys[name]}"}
            ).raise_for_status()
        return len(live.gated) >= 2

    until(use, live)
    assert {step["live/users"] for step in live.steps[1:]} == {2}
    assert all(step["live/sessions"] > 0 for step in live.steps)
    assert [step["replay/groups"] for step in live.steps[:3]] == [0, 2, 2] and live.steps[1]["replay/age_max"] == 1
    assert "feedback alone is learned from" in (live.folder.parent / "live.out").read_text()
    assert max(step["policy/max_logprob_diff"] for step in live.steps) < 1e-4
    for each in live.gated:
        assert each["state"] == "promoted" and each["gate"]["tasks"] == 4 and abs(each["gate"]["drift"]) < 2.0
        assert min(each["trial"]["sessions"], each["trial"]["parent_sessions"]) >= 4
    before = live.history[-1]["version"]
    assert before > 0
    ask(clients["ann"], "Say a word.", extra_headers=kept)
    ask(clients["ann"], "Say a word.", extra_headers={"x-session-id": "begun now"})
    assert live.answered("hidden") == set() and live.steps[-1]["live/unrecorded"] == 1
    assert live.answered("kept") == {0} and live.answered("begun now") == {before}
    assert "version 0 is served" in live.command("serve", "rollback", str(live.folder), "0")
    assert (0, "by hand") in [(each["version"], each["why"]) for each in live.history]
    assert f"{before:>6}  promoted" in live.command("serve", "status", str(live.folder))

    until(lambda: use() and "users are served version 0 again" in (live.folder.parent / "live.out").read_text(), live)

    place = live.folder / "agent.env"
    began = place.stat().st_mtime_ns
    psutil.Process(process.pid).children()[0].kill()  # the run's own process, which its guard starts again
    until(lambda: place.stat().st_mtime_ns != began and "ENV_ADDRESS" in place.read_text(), live)
    live.find()
    close(clients)
    clients = clients_of(live, keys)
    named = ask(clients["ann"], "Say a word.", extra_headers={"x-session-id": "mine"})
    assert named.id
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    history = live.history
    live.start()
    told = live.command("serve", "status", str(live.folder))
    assert live.history[: len(history)] == history
    assert any(f"version {each['version']} is served" in told for each in live.history[len(history) - 1 :])
    assert "stored of ann-" in live.command(
        "feedback", str(live.folder), "--session", "mine", "--score", "1", "--text", "Good."
    )
    steps = len(live.steps)
    close(clients)
    clients = clients_of(live, keys)
    until(lambda: use() and len(live.steps) > steps, live)
    close(clients)
