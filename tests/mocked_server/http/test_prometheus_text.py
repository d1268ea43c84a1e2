"""`GET /metrics` of the administrator's port, over HTTP and read by Prometheus' own parser."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from mocked_server.fleet.engine_watch import EngineWatch
from mocked_server.http.routes import COUNTERS, GAUGES, PrometheusText
from tests.mocked_server.fleet.scripted_figures import figures

BUSY = figures(
    "e0", version=3, running=4, waiting=1, kv=0.5, sampled_tokens=90, prompt_tokens=80, cached_tokens=70, preemptions=2
)
DOWN = figures("e1", is_up=False, restarts=1, moved_in=6)


def samples(text: str) -> dict[str, float]:
    """`name{engine}` -> value."""
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_figure_of_every_engine_is_a_sample_with_its_name() -> None:
    found = samples(PrometheusText(status=dict, engines=lambda: [BUSY, DOWN]).page().decode())
    assert found["understudy_engine_up{e0}"] == 1 and found["understudy_engine_up{e1}"] == 0
    assert found["understudy_engine_running{e0}"] == 4 and found["understudy_engine_waiting{e0}"] == 1
    assert found["understudy_engine_held_tokens{e0}"] == 500 and found["understudy_engine_kv_share{e0}"] == 0.5
    assert found["understudy_engine_kv_capacity_tokens{e1}"] == 1000 and found["understudy_engine_version{e0}"] == 3
    assert found["understudy_engine_sampled_tokens_total{e0}"] == 90
    assert found["understudy_engine_prompt_tokens_total{e0}"] == 80
    assert found["understudy_engine_cached_tokens_total{e0}"] == 70
    assert found["understudy_engine_preemptions_total{e0}"] == 2
    assert found["understudy_engine_restarts_total{e1}"] == 1 and found["understudy_engine_moved_in_total{e1}"] == 6
    assert len(found) == 2 * (len(GAUGES) + len(COUNTERS))


def test_counts_of_the_status_are_samples_and_what_is_no_number_is_none() -> None:
    status = {"prompts_waiting": 2, "pool/scored": 5, "pool/slots": 16, "engines": {"e0": {}}, "name": "x"}
    text = PrometheusText(status=lambda: status, engines=tuple).page().decode()
    assert samples(text) == {
        "understudy_prompts_waiting": 2,
        "understudy_pool_scored_total": 5,
        "understudy_pool_slots": 16,
    }
    assert "# TYPE understudy_pool_scored_total counter" in text and "# TYPE understudy_pool_slots gauge" in text


def test_the_administrator_reads_engines_and_counts_over_http_and_nobody_else_does(served) -> None:
    server = served.server
    server.engines = EngineWatch(lambda: [BUSY, DOWN], pool=server.pool, admission=None)
    before = server.pool.metrics()
    served.lease()
    assert httpx.get(server.admin_url + "/metrics").status_code == 401
    assert httpx.get(server.base_url + "/metrics").status_code in (401, 404)
    headers = {"authorization": f"Bearer {server.keys.admin}"}
    page = httpx.get(server.admin_url + "/metrics", headers=headers)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/plain; version=")
    found = samples(page.text)
    assert (
        found["understudy_engine_running{e0}"] == 4 and found["understudy_pool_running"] == before["pool/running"] + 1
    )
    assert (
        found["understudy_pool_slots"] == 1024 and found["understudy_pool_started_total"] == before["pool/started"] + 1
    )
    status = httpx.get(server.admin_url + "/status", headers=headers).json()
    assert status["pool/running"] == before["pool/running"] + 1 and set(status["engines"]) == {"e0", "e1"}
    assert status["engines"]["e0"] | {"kv_share": 0.5, "preemptions": 2} == status["engines"]["e0"]
