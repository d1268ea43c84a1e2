"""Rows of `env.harbor.*`: what a scripted `harbor` was given, and what became of its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.matrix.effects import Effect, all_of, expect, metric
from tests.matrix.records import Ended, Row
from tests.matrix.rows.agents import notes
from tests.matrix.scenarios.harbor_runs import URL


def rows() -> list[Row]:
    """One for each key."""
    return [
        Row("env.harbor.agent", "", "harbor", all_of(metric("reward/mean", lambda means: set(means) == {0.25}), _failed_with_reasons)),
        Row("env.harbor.agent_options", "", "harbor-named", _turns),
        Row("env.harbor.environment", "", "harbor", _given("environment", lambda found: found["type"] == "singularity")),
        Row("env.harbor.environment", "yours", "harbor-named", _given("environment", lambda found: found["import_path"] == "mine.rooms:Room")),
        Row("env.harbor.environment", "child", "tests/agents/harbor/test_fence.py::test_a_room_has_files_of_its_own_and_the_machines_programs"),
        Row("env.harbor.environment_options", "", "harbor-named", _given("environment", lambda found: found["kwargs"] == {"auto_mounting": True})),
        Row("env.harbor.command", "", "harbor", lambda ended: expect(len(notes(ended)) >= 16, f"{len(notes(ended))} trials were played by it")),
        Row("env.harbor.server_url", "", "harbor-named", _address),
        Row("env.harbor.reward", "", "harbor-named", metric("reward/mean", lambda means: min(means) >= 0.5)),
        Row("env.harbor.graded_errors", "", "harbor-named", _late_ones_are_scored),
        Row("env.harbor.trial", "", "harbor-named", lambda ended: expect(notes(ended)[0]["config"]["agent_timeout_multiplier"] == 0.1, "it is in the trial's configuration")),
    ]  # fmt: skip


def _failed_with_reasons(ended: Ended) -> str:
    found = {reason.partition(":")[0] for reason in ended.sql("SELECT reason FROM episode WHERE state = 'failed'")}
    wanted = {"AgentTimeoutError", "RewardFileNotFoundError", "SandboxBuildFailedError"}
    return expect({f"harbor {name}" for name in wanted} <= found, f"episodes failed as {sorted(found)}")


def _turns(ended: Ended) -> str:
    """Of the episodes that are scored with rounds: each asked twice."""
    found = set(
        ended.sql(
            "SELECT count(*) FROM round JOIN episode USING (episode_id) JOIN grp USING (group_id) JOIN task USING (task_id) "
            "WHERE episode.state = 'scored' AND task_id LIKE '%letters%' GROUP BY episode_id"
        )
    )
    return expect(found == {2}, f"scored episodes have {sorted(found)} rounds")


def _given(part: str, holds: Callable[[Any], bool]) -> Effect:
    def effect(ended: Ended) -> str:
        found = notes(ended)[0]["config"][part]
        return expect(holds(found), f"a trial's {part} is {found}")

    return effect


def _address(ended: Ended) -> str:
    found = {one["variables"]["OPENAI_BASE_URL"] for one in notes(ended)}
    wanted = f"{URL}:{ended.config['server.port']}/v1"
    return expect(found == {wanted}, f"trials found the model at {sorted(found)}")


def _late_ones_are_scored(ended: Ended) -> str:
    """A trial that was late has the verifier's score: without a model call it fails for that, not for being late."""
    found = set(ended.sql("SELECT DISTINCT reason FROM episode WHERE state = 'failed'"))
    late = [reason for reason in found if "AgentTimeoutError" in (reason or "")]
    return expect(not late and "no rounds" in found, f"failed as {sorted(map(str, found))}")
