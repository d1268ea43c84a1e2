"""What the benchmark of the server measures, on a server whose engine does nothing."""

from __future__ import annotations

import pytest

from benchmarks.gateway import Words, _compared, rounds_of, servers
from benchmarks.gateway_server import Settings


@pytest.fixture(scope="module")
def settings(tiny_model):
    return Settings(model=str(tiny_model), port=0, ledger="", episodes=4, engine=False, max_tokens=8)


def run_of(rounds_per_s: float) -> dict[str, float]:
    return {"rounds_per_s": rounds_per_s, "p50_ms": 100 / rounds_per_s, "p99_ms": 1.0, "cpu_ms_per_round": 2.0}


def test_neighbours_in_time_are_compared():
    seen = {
        "understudy": [run_of(10.0), run_of(30.0), run_of(20.0)],
        "vllm": [run_of(10.0), run_of(20.0), run_of(40.0)],
    }
    compared = _compared(seen)
    assert compared["ratios"] == [1.0, 1.5, 0.5]
    assert compared["ratio"] == 1.0
    assert compared["p50_added_ms"] == pytest.approx(0.0)


@pytest.mark.long
@pytest.mark.slow
def test_both_servers_answer_the_same_agents(settings, tiny_model, tmp_path):
    words = Words(tiny_model)
    plan = {"agents": 2, "rounds": 2, "first": words(100), "later": words(10), "max_tokens": 8}
    results = rounds_of(settings, folder=tmp_path, repeats=1, plan=plan)
    for kind in ("vllm", "understudy"):
        figures = results[kind]
        assert figures["cpu_ms_per_round"] > 0 and figures["rounds_per_s"] > 0
        assert 110 < figures["prompt_tokens_of_the_last_round"] < 250
    with servers(settings, folder=tmp_path, kinds=("understudy",)) as (server,):
        stream = server.load(server.plan(agents=2, rounds=1, first="go", later="", max_tokens=4, stream=True))
        assert stream["streams"] == 2 and stream["errors"] == []
        with pytest.raises(RuntimeError, match="refused"):
            server.load(server.plan(agents=1, rounds=1, first=words(20000), later="", max_tokens=4))
