"""Rules of the page's routes: each answer says what the run's folder holds, in the form that a browser reads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from buffers.ledger.batches import group_rows
from buffers.ledger.ledger import Ledger
from buffers.ledger.reader import LedgerReader
from buffers.records import TrainBatch
from learner.page.run_set import RunSet
from learner.page.serve import build_app
from learner.reporting.token_figures import TokenFigures, TokenFiles
from tests.learner.page.page_parts import (
    HOSTILE,
    OPENING,
    figures_of,
    ids_of,
    machine_line,
    make_run,
    unpacked,
    write_lines,
)
from tests.support.patience import PATIENCE_S


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs; the first has lines of the machine and figures of the tokens of step 1."""
    runs = tmp_path_factory.mktemp("runs")
    run = make_run(runs)
    make_run(runs, name="other")
    write_lines(run / "machine.jsonl", [machine_line(at=1.0 * second) for second in range(1, 8)])
    reader = LedgerReader(run / "ledger.sqlite")
    with reader.read() as db:
        batch = TrainBatch(rows=group_rows(db, group_id=1))
    reader.close()
    TokenFiles(run).add(batch, TokenFigures(**figures_of(batch)), step=1)
    return runs


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    runs = RunSet([folder / "seen", folder], meanings={"history_edited": "keep messages"})
    yield TestClient(build_app(runs, default="seen", about={"reward/mean": "mean score"}))
    runs.close()


def get(client: TestClient, path: str, *, status: int = 200, **query: Any) -> Any:
    answer = client.get(path, params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_runs_are_listed_with_the_one_to_open(client):
    found = get(client, "/api/runs")
    assert found["default"] == "seen" and [run["id"] for run in found["runs"]] == ["seen", "other"]
    assert found["runs"][0] | {"seen_at": 0, "folder": ""} == {
        "id": "seen", "name": "seen", "folder": "", "state": "live", "step": 2, "steps_planned": 4, "reward_last": 0.75,
        "started_at": 1.0, "seen_at": 0, "error": None, "serves": False,
    }  # fmt: skip
    assert get(client, "/api/runs/none", status=404)["error"].startswith("a run of this page is needed, got 'none'")
    assert "nothing at /api/what" in get(client, "/api/what", status=404)["error"]


def test_the_index_of_a_run_counts_and_the_configuration_holds_no_secrets(client):
    found = get(client, "/api/runs/seen")
    assert found["counts"]["groups/trained"] == 2 and found["counts"]["failed/deadline"] == 1
    assert (found["version"], found["lineages"], found["ledger"]["available"]) == (2, 1, True)
    assert (found["max_policy_lag"], found["groups_per_step"], found["group_size"], found["max_tokens"]) == (1, 1, 2, 4)
    assert found["machine"]["at"] == 7.0 and found["summary"] is None
    config = get(client, "/api/runs/seen/config")["config"]
    assert config["agents"] == {"api_key": "(left out)"} and config["rollout"] == {"max_tokens": 4}


def test_figures_come_as_columns_in_as_many_points_as_asked_for(client):
    found = get(client, "/api/metrics", runs="seen,other", names="reward/mean,time/step_s")
    assert found["runs"]["seen"] == found["runs"]["other"]
    assert found["runs"]["seen"]["step"] == [0, 1, 2] and found["runs"]["seen"]["bucket"] == 1
    assert found["runs"]["seen"]["columns"] == {"reward/mean": [None, 0.25, 0.75], "time/step_s": [None, 1.0, 2.0]}
    assert found["names"] == ["generation/aborted", "reward/mean", "sft/last_loss", "time/step_s"]
    assert found["about"] == {"reward/mean": "mean score"}
    few = get(client, "/api/metrics", runs="seen", names="reward/mean", points=1, **{"from": 1})["runs"]["seen"]
    assert (few["bucket"], few["step"], few["columns"]) == (2, [2], {"reward/mean": [0.5]})
    assert (few["low"], few["high"]) == ({"reward/mean": [0.25]}, {"reward/mean": [0.75]})
    spread = get(client, "/api/runs/seen/scores")
    assert (spread["step"], spread["n"], spread["min"], spread["max"]) == ([1, 2], [2, 2], [0.0, 0.0], [0.75, 1.0])
    assert spread["p50"] == spread["mean"] == [0.375, 0.5]


def test_the_machine_says_who_waits_for_what(client):
    found = get(client, "/api/runs/seen/machine", since=2.0, points=3)
    assert found["history"]["at"] == [3.0, 5.0, 7.0] and found["history"]["prompts_waiting"] == [2, 2, 2]
    waits = {(each["who"], each["for"]): each["why"] for each in found["now"]["waits"]}
    assert waits["learner", "groups"] == "1 of the 1 groups of a step are ready"
    assert waits["agents", "tasks"] == "all 4 slots are taken, with 2 agents waiting"
    assert waits["prompts", "engines"] == "2 prompts in the queue, 1 without room in a cache"
    assert get(client, "/api/runs/other/machine")["now"] is None


@pytest.mark.parametrize("ended", [True, False])
def test_ages_of_a_run_that_has_ended_count_to_its_end(tmp_path, ended):
    """Not to the moment at which somebody looks, or exports the page."""
    run = make_run(tmp_path)
    if ended:
        (run / "summary.json").write_text("{}")
    for name in ("config.yaml", "metrics.jsonl", *(["summary.json"] if ended else [])):
        os.utime(run / name, (time.time() + (3000.0 if ended else 0.0),) * 2)
    runs = RunSet([run], meanings={})
    with TestClient(build_app(runs, default="seen", about={})) as client:
        groups = get(client, "/api/runs/seen/groups", state="ready,open")["groups"]
        groups += [get(client, "/api/runs/seen/groups/1")["group"]]
    runs.close()
    assert [2900.0 < one["age_s"] < 3100.0 for one in groups] == [ended] * 3


def test_groups_have_an_age_and_the_updates_until_they_are_stale(client):
    ready, opened = (get(client, "/api/runs/seen/groups", state=state)["groups"] for state in ("ready", "open"))
    assert [(one["group_id"], one["mean"], one["std"], one["updates_until_stale"]) for one in ready] == [
        (4, 0.5, 0.5, 2)
    ]
    assert [(one["group_id"], one["num_scored"], one["updates_until_stale"]) for one in opened] == [(5, 0, None)]
    assert 0.0 <= ready[0]["age_s"] < 3600.0
    both = get(client, "/api/runs/seen/groups", state="ready,open", limit=1)
    assert [one["group_id"] for one in both["groups"]] == [5] and both["next"] == "5"
    after = get(client, "/api/runs/seen/groups", state="ready,open", limit=1, cursor=both["next"])
    assert [one["group_id"] for one in after["groups"]] == [4]
    one = get(client, "/api/runs/seen/groups/1")
    assert one["group"]["step"] == 1 and one["task"]["ground_truth"] == 1
    assert [each["episode_id"] for each in one["episodes"]] == ["1-0-0", "1-1-0"]
    assert "a group of this run is needed" in get(client, "/api/runs/seen/groups/99", status=404)["error"]


def test_episodes_are_filtered_by_the_query(client):
    def ids(**query: Any) -> list[str]:
        return [one["episode_id"] for one in get(client, "/api/runs/seen/episodes", sort="oldest", **query)["episodes"]]

    until = time.monotonic() + PATIENCE_S  # a thread looks at the episodes meanwhile
    while (found := get(client, "/api/runs/seen/episodes", limit=4))["indexed"] < 1.0 and time.monotonic() < until:
        time.sleep(0.05)
    assert ids(step="1-2", min_score="0.7") == ["1-0-0", "2-1-0"]
    assert ids(cause="any") == ids(cause="history_edited") == ["1-0-0"] and ids(cause="forked") == []
    assert ids(untrained=1) == ["3-0-0", "3-1-0"] and ids(agent="walker") == ["2-0-0", "2-1-0"]
    assert ids(group_state="ready", q="4-0") == ["4-0-0"]
    assert found["total"] == 10 and found["indexed"] == 1.0
    assert found["facets"]["state"] == {"scored": 6, "running": 2, "failed": 2}
    assert found["facets"]["reason"] == {"deadline": 1, "group given up": 1}
    rest = get(client, "/api/runs/seen/episodes", limit=100, cursor=found["next"])
    assert [one["seq"] for one in found["episodes"] + rest["episodes"]] == list(range(10, 0, -1))
    order = client.get("/api/runs/seen/episodes/order", params={"sort": "-score", "step": "1-9"})
    assert np.frombuffer(order.content, "<i4").tolist() == [4, 1, 3, 2]
    chosen = get(client, "/api/runs/seen/episodes", seqs="3,1,77,x")["episodes"]
    assert [one["episode_id"] for one in chosen] == ["2-0-0", "1-0-0"] and chosen[1]["breaks"] == ["history_edited"]


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"sort": "size"}, "sort must be one of newest"),
        ({"step": "1-x"}, "step must be a number or a span such as 10-20"),
        ({"step": str(2**63)}, "step must be a number or a span such as 10-20"),
        ({"step": f"1-{2**63}"}, "step must be a number or a span such as 10-20"),
        ({"min_tokens": str(2**63)}, "min_tokens must be a number"),
        ({"group": "9" * 5000}, "group must be a number"),
        ({"min_score": "high"}, "min_score must be a number, got 'high'"),
        ({"min_score": "nan"}, "min_score must be a number, got 'nan'"),
        ({"group": "9" * 40}, "group must be a number"),
        ({"cause": "magic"}, "cause must be any, or of"),
        ({"state": "gone"}, "state must be of pending"),
    ],
)
def test_a_query_that_cannot_be_meant_is_named(client, query, told):
    assert told in get(client, "/api/runs/seen/episodes", status=422, **query)["error"]


def test_one_episode_has_its_tree_scores_and_neighbours(client):
    found = get(client, "/api/runs/seen/episodes/1-0-0")
    assert found["episode"]["score"] == 0.75 and found["episode"]["step"] == 1 and found["episode"]["cut"] is True
    assert found["neighbours"] == {"previous": None, "next": "1-1-0", "group": ["1-0-0", "1-1-0"]}
    assert [(one["judge"], one["value"], one["part"], one["hint"]) for one in found["scores"]] == [
        ("style", 0.5, "whole", None), ("truth", 1.0, "whole", "think"), ("", 0.25, "round", None),
    ]  # fmt: skip
    tree = [(r["round"], r["parent"], r["branch"], r["finish"], r["cause"]) for r in found["rounds"]]
    assert tree == [
        (0, None, 0, "stop", None), (1, 0, 0, "stop", None), (2, None, 1, "length", "history_edited"), (3, 1, 2, "abort", None),
    ]  # fmt: skip
    assert found["rounds"][2]["cause_sentence"] == "keep messages" and found["rounds"][2]["cause_expected"] is False
    assert found["rounds"][1]["scores"][0]["value"] == 0.25 and found["rounds"][1]["versions"] == [1]
    assert [one["trained_tokens"] for one in found["branches"]] == [found["episode"]["tokens"] - 1, 1, 0]
    assert found["advantages"]["min"] == -1.0 and found["why_untrained"] is None
    failed = get(client, "/api/runs/seen/episodes/3-0-0")
    assert failed["why_untrained"] == "its group was given up (failed: deadline: 3 s): a member had no attempt left"
    assert "waits for its turn in a batch" in get(client, "/api/runs/seen/episodes/4-0-0")["why_untrained"]
    assert "an episode of this run is needed" in get(client, "/api/runs/seen/episodes/9-9-9", status=404)["error"]


def test_a_conversation_has_roles_thoughts_and_hostile_text_as_text(client):
    path = "/api/runs/seen/episodes/1-0-0/conversation"
    turns = get(client, path)["turns"]
    assert [(turn["role"], turn["sampled"], turn["trained"]) for turn in turns] == [
        ("system", False, False), ("user", False, False), ("assistant", True, True),
        ("tool", False, False), ("assistant", True, True),
    ]  # fmt: skip
    assert [part["text"] for turn in turns for part in turn["parts"]] == [
        "Be brief.",
        "Hé, 日本?",
        "hm",
        "a",
        "42",
        "b",
    ]
    assert [part["kind"] for turn in turns for part in turn["parts"]] == [
        "text", "text", "thought", "text", "tool_result", "text",
    ]  # fmt: skip
    assert turns[0]["token_start"] == 0 and turns[2]["token_start"] == len(ids_of(OPENING))
    some = get(client, path, start=2, count=1)
    assert some["num_turns"] == 5 and [turn["n"] for turn in some["turns"]] == [2]
    hostile = get(client, "/api/runs/seen/episodes/1-1-0/conversation", start=2)["turns"]
    assert hostile[0]["parts"] == [{"kind": "text", "text": HOSTILE}]
    assert client.get(path).headers["content-type"] == "application/json"
    assert "branch must be one of the episode's 3, got 7" in get(client, path, branch=7, status=404)["error"]


def test_a_window_of_tokens_has_texts_and_exact_values(client):
    path = "/api/runs/seen/episodes/1-0-0/tokens"
    head, arrays = unpacked(client.get(path).content)
    assert head["num_tokens"] == head["count"] == len(arrays["ids"]) and head["figures"] == "all"
    assert "".join(head["pieces"]) == (
        OPENING + "<think>hm</think>a<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )
    assert "日" in head["pieces"] and head["pieces"][head["pieces"].index("日") + 1] == ""
    start = len(ids_of(OPENING))
    assert arrays["sampled"][:start].sum() == 0 and np.isnan(arrays["logprob"][:start]).all()
    assert arrays["logprob"][start : start + 3].tolist() == [-0.125, -0.25, -0.375]
    assert arrays["version"][[0, start, -1]].tolist() == [-1, 0, 1] and arrays["round"][[0, start, -1]].tolist() == [
        0,
        0,
        1,
    ]
    trained = arrays["mask"].astype(bool)
    assert arrays["learner"][trained].tolist() == [-float(number) for number in range(trained.sum())]
    assert (arrays["start_logprob"][trained] == -0.5).all() and arrays["advantage"][trained][0] == -1.0
    assert np.isnan(arrays["learner"][~trained]).all() and np.array_equal(arrays["trained"], arrays["mask"])
    part, some = unpacked(client.get(path, params={"start": start - 2, "count": 5}).content)
    assert part["count"] == 5 and np.array_equal(some["ids"], arrays["ids"][start - 2 : start + 3])
    assert unpacked(client.get("/api/runs/seen/episodes/2-0-0/tokens").content)[0]["figures"] == "none"
    beyond, _ = unpacked(client.get(path, params={"start": 10**6}).content)
    assert beyond["count"] == 0 and beyond["num_tokens"] == head["num_tokens"]


def test_an_overview_says_where_to_look(client):
    found = get(client, "/api/runs/seen/episodes/1-0-0/overview", buckets=4)
    assert found["buckets"] == 4 and len(found["logprob"]) == len(found["mask"]) == 4
    assert found["logprob"][0] is None and found["mask"][0] == 0.0 and found["version"][-1] == 1.0
    assert found["difference"][-1] > 0.0 and found["advantage"][-1] is not None


def test_reasons_why_things_were_not_trained_are_a_list(client):
    reasons = get(client, "/api/runs/seen/untrained")["reasons"]
    assert [(one["what"], one["reason"], one["number"]) for one in reasons] == [
        ("group", "failed", 1), ("episode", "deadline", 1), ("episode", "group given up", 1), ("round", "abort", 1),
    ]  # fmt: skip
    assert reasons[1]["filter"] == "untrained=1&reason=deadline" and "agents.deadline_s" in reasons[1]["remedy"]


def test_a_run_without_a_ledger_here_has_figures_and_says_what_is_missing(tmp_path):
    run = make_run(tmp_path)
    (run / "ledger.sqlite").unlink()
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("node: ''", "node: 10.0.0.9"))
    runs = RunSet([run], meanings={})
    client = TestClient(build_app(runs, default="seen", about={}))
    found = get(client, "/api/runs/seen")
    assert found["counts"] is None and "is on node 10.0.0.9 (buffer.node)" in found["ledger"]["why"]
    assert get(client, "/api/metrics", runs="seen", names="reward/mean")["runs"]["seen"]["step"] == [0, 1, 2]
    for path in ("episodes", "groups", "untrained", "scores", "episodes/1-0-0"):
        assert "start `understudy page` on that node" in get(client, f"/api/runs/seen/{path}", status=409)["error"]
    runs.close()


def test_runs_that_appear_are_shown_and_a_replaced_ledger_is_read_anew(tmp_path):
    times = iter(range(0, 1000, 10))
    run = make_run(tmp_path)
    runs = RunSet([tmp_path], meanings={}, clock=lambda: float(next(times)))
    client = TestClient(build_app(runs, default="seen", about={}))
    assert get(client, "/api/runs/seen/episodes")["total"] == 10
    make_run(tmp_path, name="later")
    assert {one["id"] for one in get(client, "/api/runs")["runs"]} == {"seen", "later"}
    for file in run.glob("ledger.sqlite*"):
        file.unlink()
    Ledger(run / "ledger.sqlite").close()
    assert get(client, "/api/runs/seen/episodes")["total"] == 0
    assert get(client, "/api/runs/seen")["counts"]["episodes/scored"] == 0
    runs.close()


@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 2**64, -(2**63) - 1, "9" * 5000, "x"])
def test_a_number_that_no_database_holds_is_refused(client, number):
    assert "group must be a number" in get(client, f"/api/runs/seen/groups/{number}", status=422)["error"]
    assert get(client, "/api/runs/seen/groups", cursor=str(number), status=422)["error"].startswith(
        "cursor must be a number"
    )
    assert get(client, "/api/runs/seen/episodes", seqs=f"1,{number}")["episodes"][0]["seq"] == 1
