"""Real coding agents under users' keys, two users at once, with nothing configured in them: their sessions are told apart, side
calls from the main line, and a session that its client resumes goes on, also over a restart of the server."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from buffers.ledger.ledger import Ledger
from configs.schema import RolloutConfig
from tests.outside.agent_environments import npm_program
from tests.support.server_parts import ServerThread

pytestmark = [pytest.mark.outside, pytest.mark.slow]

PROGRAMS = {
    "codex": ("@openai/codex@0.169.0", "codex"),
    "claude": ("@anthropic-ai/claude-code@2.1.197", "claude"),
    "opencode": ("opencode-ai@1.18.33", "opencode"),
}
TRAINED = '{name="trained", base_url="%s/v1", env_key="OPENAI_API_KEY", wire_api="responses"}'
BEGINS, RESUMES = "What is 12 + 30?", "And 12 + 31?"


def words_of(client: str, url: str, *, again: bool) -> list[str]:
    """How its users start it without a screen, and resume what they did last."""
    text = RESUMES if again else BEGINS
    if client == "claude":
        return ["--print", text, "--model", "policy", *(["--continue"] if again else [])]
    if client == "opencode":
        return ["run", "--model", "trained/policy", *(["--continue"] if again else []), text]
    return [
        "exec", "--skip-git-repo-check", "--sandbox", "read-only", "-c", 'model="policy"', "-c", 'model_provider="trained"',
        "-c", f"model_providers.trained={TRAINED % url}", *(["resume", "--last"] if again else []), text,
    ]  # fmt: skip


def play(client: str, folder: Path, *, url: str, key: str, again: bool = False) -> None:
    package, program = PROGRAMS[client]
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "CODEX_HOME": str(folder / ".codex"), "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }  # fmt: skip
    if not again:
        folder.mkdir(parents=True)
        (folder / ".codex").mkdir()
        subprocess.run(["git", "init", "--quiet", "."], cwd=folder, check=True)
        (folder / "opencode.json").write_text(
            '{"provider": {"trained": {"npm": "@ai-sdk/openai-compatible", "models": {"policy": {}}, '
            f'"options": {{"baseURL": "{url}/v1", "apiKey": "{key}"}}}}}}}}'
        )
    else:  # the server may have another port now
        settings = folder / "opencode.json"
        settings.write_text(
            settings.read_text().split('"baseURL": "')[0] + f'"baseURL": "{url}/v1", "apiKey": "{key}"}}}}}}}}'
        )
    done = subprocess.run(
        [str(npm_program(package, program)), *words_of(client, url, again=again)],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def sessions_of(ledger: Ledger, user: str) -> dict[str, list[tuple[str, str, int]]]:
    """(episode, name, rounds) of a user's running episodes: main lines and side calls."""

    def read(db):
        found = db.execute(
            "SELECT is_side, episode_id, name, (SELECT count(*) FROM round WHERE round.episode_id = session.episode_id) "
            "FROM session WHERE user = ?",
            (user,),
        ).fetchall()
        return {kind: [tuple(row[1:]) for row in found if row[0] == side] for kind, side in (("main", 0), ("side", 1))}

    return ledger.run(read).result()


@pytest.mark.parametrize("client", list(PROGRAMS))
def test_the_sessions_of_a_real_agent_are_told_apart_and_go_on(client, tmp_path, tiny_model, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # their first prompts have 20,000 tokens
    npm_program(*PROGRAMS[client])
    rollout = RolloutConfig(max_tokens=64, max_model_len=131_072)
    keys: dict[str, str] = {}
    rounds: dict[str, int] = {}
    for again in (False, True):  # the second time by another server on the same ledger
        ledger = Ledger(tmp_path / "ledger.sqlite", resume_episodes=True)
        server = ServerThread(
            tiny_model,
            rollout=rollout,
            ledger=ledger,
            users=tmp_path / "live",
            tool_parser="hermes",
            reasoning_parser="qwen3",
        )
        server.start()
        try:
            keys = keys or {user: server.users.add(user) for user in ("ann", "bob")}
            said = server.ids("It is 42.")
            server.engine.answer = lambda _, said=said: said
            with ThreadPoolExecutor(2) as at_once:
                playing = [
                    at_once.submit(play, client, tmp_path / user, url=server.server.base_url, key=key, again=again)
                    for user, key in keys.items()
                ]
                for one in playing:
                    one.result()
            for user in keys:
                found = sessions_of(ledger, user)
                mains = [each for each in found["main"] if each[2]]
                assert len(mains) == 1, found
                assert mains[0][2] > rounds.get(user, 0), found
                rounds[user] = mains[0][2]
                assert mains[0][1], "its client names it"
                side = sum(number for _, _, number in found["side"])
                assert (side > 0) == (client == "opencode"), found
            names = {user: sessions_of(ledger, user)["main"][0][1] for user in keys}
            assert names["ann"] != names["bob"]
        finally:
            server.stop()
