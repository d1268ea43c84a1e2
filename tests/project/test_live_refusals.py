"""A whole live run whose gate refuses candidates for what they have become, and which forgets what is asked of it, or old."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import openai
import pyarrow
import pyarrow.parquet
import pytest

from tests.project.test_live import Live, ask, until


@pytest.mark.slow
@pytest.mark.long(minutes=3)
def test_candidates_are_refused_for_sessions_entropy_and_likeness_and_sessions_are_forgotten(tmp_path: Path) -> None:
    live = Live(tmp_path)
    rows = [
        {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": "m"}, "data_source": "g"}
        for text in ("Say a word.", "Name a town.", "Write a line.", "Find a bird.")
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "gate.parquet")
    live.words += ["serve.gate.every=1", "serve.gate.max_drift=99", "serve.gate.max_likeness=0"]
    first = ["serve.gate.session_share=0.5", "serve.gate.session_hours=1e-5", "serve.gate.min_entropy=1"]
    plain, live.words = live.words, [*live.words, *first]
    keys = {name: live.command("serve", "keys", "add", name, *live.words).strip() for name in ("ann", "bob")}
    process = live.start()

    def use(name: str) -> openai.types.chat.ChatCompletion:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key=keys[name]) as client:
            reply = ask(client, "Say a word.")
        body = {"response_id": reply.id, "score": float("m" in (reply.choices[0].message.content or ""))}
        headers = {"Authorization": f"Bearer {keys[name]}"}
        httpx.post(f"{live.url}/feedback", json=body, headers=headers).raise_for_status()
        return reply

    def refused(kind: str) -> bool:
        use("ann")
        return any(each.get("refused_for") == kind for each in live.gated)

    use("bob")
    until(lambda: refused("sessions"), live)
    until(lambda: refused("entropy"), live)
    until(lambda: live.command("ledger", "episodes", str(live.folder), "--where", "user=bob state=scored") != "", live)
    told = live.command("ledger", "forget", str(live.folder), "--user", "bob")
    assert "forgotten: 1 episodes, 1 rounds" in told
    with pytest.raises(AssertionError, match="must have sessions that are stored, got none"):
        live.command("ledger", "export", str(live.folder), "--user", "bob", "--messages", str(tmp_path / "bob.jsonl"))
    os.killpg(process.pid, signal.SIGINT)
    process.wait()

    live.words = [*plain, "learner.lr=1", "serve.gate.min_entropy=0", "serve.retention_days=2e-5"]
    live.start()
    until(lambda: refused("likeness"), live)
    until(lambda: use("ann") and live.steps[-1].get("live/forgotten", 0) > 0, live)
    assert "[data" not in live.command("ledger", "doctor", str(live.folder))
