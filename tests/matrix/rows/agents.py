"""Rows of `agents.*`, `env.*` and `server.*`: mostly what programs were given and wrote down."""

from __future__ import annotations

import json
from typing import Any

from safetensors.torch import load_file

from tests.matrix.effects import absent, all_of, always, counted, expect, metric
from tests.matrix.records import Effect, Ended, NoEffect, Row
from tests.matrix.scenarios.program_runs import NOTES


def rows() -> list[Row]:
    """One for each key and value."""
    return [
        Row("agents.command", "", "program", lambda ended: expect(len(notes(ended)) >= 16, f"{len(notes(ended))} episodes were played by it")),
        Row("agents.loops", "", "loops", all_of(metric("agent_loop/episodes", lambda counts: sum(counts) >= 8), _first_loop_is_default)),
        Row("agents.environment", "", "program", _variables),
        Row("agents.processes", "0", "program", _processes(lambda found: len(found) >= 16)),
        Row("agents.processes", "2", "judged", _processes(lambda found: len(found) == 2)),
        Row("agents.processes", "2 loop workers", "loops", _workers),
        Row("agents.preload", "", "crashes", _preloaded),
        Row("agents.concurrency", "integer", "program", _at_most_running(3)),
        Row("agents.concurrency", "auto", "auto-small", _follows_a_small_cache),
        Row("agents.concurrency", "auto", "auto-large", _grows_into_a_large_cache),
        Row("agents.deadline_s", "", "deadline", _failed("deadline", least=2)),
        Row("agents.deadline_s", "in a generation", "deadline", _aborted),
        Row("agents.silence_s", "null", "judged", counted("SELECT count(*) FROM episode WHERE reason LIKE 'silent%'", 0)),
        Row("agents.silence_s", "set", "silent", _failed("silent agent", least=1)),
        Row("agents.max_attempts", "", "crashes", counted("SELECT max(attempt) FROM episode WHERE state = 'failed'", 1)),
        Row("agents.max_attempts", "1", "given-up", counted("SELECT max(attempt) FROM episode WHERE state = 'failed'", 0)),
        Row("agents.fewest_members", "null", "given-up", all_of(always("batch/episodes", 8), _evicted("failed"))),
        Row("agents.fewest_members", "set", "crashes", always("batch/episodes", 6)),
        Row("env.command", "", "judged", all_of(_env_address, metric("reward/mean", lambda means: max(means) > 0))),
        Row("server.host", "", "program", _address(lambda url: url.startswith("http://127.0.0.2:"))),
        Row("server.port", "", "judged", _at_its_port),
        Row("server.processes", "1", "crashes", _served_by(1)),
        Row("server.processes", "2", "program", _served_by(2)),
        Row("server.tool_parser", "null", "no-parsers", _statuses({400})),
        Row("server.tool_parser", "auto", "parsers", _statuses({200})),
        Row("server.tool_parser", "set", "strict", _statuses({200})),
        Row("server.reasoning_parser", "null", "no-parsers", _reasons(False)),
        Row("server.reasoning_parser", "set", "parsers", _reasons(True)),
        Row("server.replay_match", "tolerant", "parsers", _branches(1.0)),
        Row("server.replay_match", "strict", "strict", _branches(2.0)),
        Row("roles", "", "roles", all_of(_two_speak_and_one_learns, metric("policy/role_version/runner", lambda found: found == [0, 1, 2]))),
        Row("learner.lora.per_role", False, "roles", absent("adapter/scout/version")),
        Row("learner.lora.per_role", True, "roles-apart", all_of(_each_role_has_versions, _adapters_differ)),
        Row("agents.command", "ends with 0", "ends", _says_that_it_ended),
    ]  # fmt: skip


def _two_speak_and_one_learns(ended: Ended) -> str:
    """Rounds of both roles are in the ledger; those of the earlier version are never trained, and were sampled by it."""
    said = "SELECT count(*) FROM round WHERE role = '{}' AND num_sampled > 0 AND trained IS {} NULL"
    scout, runner = (ended.sql(said.format(role, word))[0] for role, word in (("scout", ""), ("runner", "NOT")))
    shares = ended.metric("batch/role_tokens/scout")
    seen = f"{scout} trained rounds of the scout, {runner} of the runner that are not, shares {shares}"
    return expect(min(scout, runner) >= 32 and set(shares) == {1.0}, seen)


def _each_role_has_versions(ended: Ended) -> str:
    """Those that speak are updated in each step and sampled by their own versions; the other one stops nobody."""
    versions = {role: ended.metric(f"adapter/{role}/version") for role in ("scout", "runner", "silent")}
    largest = [max(ended.metric(f"adapter/{role}/policy/max_logprob_diff")) for role in ("scout", "runner")]
    seen = f"versions {versions}, largest differences of log-probabilities {largest}"
    return expect(
        versions == {"scout": [1, 2, 3], "runner": [1, 2, 3], "silent": [0, 0, 0]} and max(largest) < 1e-5, seen
    )


def _adapters_differ(ended: Ended) -> str:
    """The last checkpoint has an adapter for each role; the one that was never trained adds nothing to the model."""
    folder = ended.folder / "last" / "adapters"
    sizes, weights = {}, {}
    for role in ("scout", "runner", "silent"):
        weights[role] = load_file(folder / role / "adapter_model.safetensors")
        sizes[role] = sum(float(part.abs().sum()) for name, part in weights[role].items() if ".lora_B." in name)
    differ = any(not weights["scout"][name].equal(part) for name, part in weights["runner"].items())
    return expect(differ and sizes["silent"] == 0.0 < min(sizes["scout"], sizes["runner"]), f"sizes of B: {sizes}")


def notes(ended: Ended) -> list[dict[str, Any]]:
    """What the run's programs wrote down, one for each episode."""
    found = [json.loads(path.read_text()) for path in sorted((ended.files / "notes").glob("*.json"))]
    if not found:
        raise NoEffect("no program wrote anything down")
    return found


def _first_loop_is_default(ended: Ended) -> str:
    played = ended.sql(
        "SELECT count(*) FROM episode JOIN grp USING (group_id) WHERE task_id LIKE 'first-%' AND score > 0"
    )
    return expect(played[0] > 0, f"{played[0]} episodes of tasks without a name were scored by the first loop")


def _variables(ended: Ended) -> str:
    seen = set().union(*(one["variables"] for one in notes(ended)))
    return expect(NOTES in seen and "MATRIX_UNNAMED" not in seen, f"{NOTES} reached them, MATRIX_UNNAMED did not")


def _processes(holds: Any) -> Effect:
    def effect(ended: Ended) -> str:
        found = {one["pid"] for one in notes(ended)}
        return expect(holds(found), f"{len(found)} processes played {len(notes(ended))} episodes")

    return effect


def _preloaded(ended: Ended) -> str:
    """Each has the module, and a process of its own."""
    found = notes(ended)
    pids = {one["pid"] for one in found if one["preloaded"]}
    return expect(len(pids) == len(found), f"{len(pids)} of {len(found)} processes had the module when they started")


def _workers(ended: Ended) -> str:
    found = {one["pid"] for one in notes(ended)}
    return expect(len(found) == 2, f"{len(found)} workers played {len(notes(ended))} episodes")


def _at_most_running(number: int) -> Effect:
    return metric("pool/running", lambda counts: 0 < max(counts) <= number)


def _follows_a_small_cache(ended: Ended) -> str:
    """With 32 slots the same run preempts 18 to 26 times; in blocks of 128 tokens its cache has 24."""
    slots, preempted = ended.metric("pool/slots"), ended.metric("engine/e0/preemptions")[-1]
    return expect(1 <= max(slots) <= 20 and preempted <= 7, f"slots {slots}, {preempted:g} preemptions")


def _grows_into_a_large_cache(ended: Ended) -> str:
    """It begins with 10: the cache holds so many episodes of 2,048 tokens."""
    slots, preempted = ended.metric("pool/slots"), ended.metric("engine/e0/preemptions")[-1]
    return expect(slots[-1] >= 13 and preempted == 0, f"slots {slots}, {preempted:g} preemptions")


def _failed(reason: str, *, least: int) -> Effect:
    def effect(ended: Ended) -> str:
        number = ended.sql(f"SELECT count(*) FROM episode WHERE reason = '{reason}'")[0]
        return expect(number >= least, f"{number} episodes failed as {reason!r}")

    return effect


def _aborted(ended: Ended) -> str:
    """The generation of an episode that is past its deadline ends; its client gets no answer."""
    long = [one for one in notes(ended) if one["fate"] == "long"]
    answered = [one for one in long if one["answers"] and one["answers"][0][0] == 200]
    number = max(ended.metric("generation/aborted"))
    return expect(
        long and not answered and number > 0,
        f"of {len(long)} long generations {len(answered)} were answered, {number:g} given up",
    )


def _evicted(kind: str) -> Effect:
    def effect(ended: Ended) -> str:
        number = ended.summary["buffer"].get(f"evicted/{kind}", 0)
        return expect(number > 0, f"{number} groups evicted as {kind}")

    return effect


def _env_address(ended: Ended) -> str:
    scored = ended.sql("SELECT count(*) FROM score WHERE verdict = 'stored'")[0]
    return expect(scored >= 16, f"the environment reported {scored} scores")


def _address(holds: Any) -> Effect:
    def effect(ended: Ended) -> str:
        url = notes(ended)[0]["variables"]["OPENAI_BASE_URL"]
        return expect(holds(url), f"programs found the model at {url}")

    return effect


def _served_by(number: int) -> Effect:
    """Programs of that many addresses had answers, which are recorded exactly."""

    def effect(ended: Ended) -> str:
        answered = [one for one in notes(ended) if any(status == 200 for status, _ in one["answers"])]
        urls = {one["variables"]["OPENAI_BASE_URL"] for one in answered}
        diff = ended.summary["max_logprob_diff"]
        told = {name: figures["requests"] for name, figures in ended.summary["server"].get("processes", {}).items()}
        seen = f"{len(answered)} episodes were served by {len(urls)} processes, log-probabilities differ by {diff:.1e}, {told}"
        return expect(len(urls) == number and len(told) in (0, number) and all(told.values()) and diff < 1e-4, seen)

    return effect


def _at_its_port(ended: Ended) -> str:
    port = ended.config["server.port"]
    return _address(lambda url: f":{port}/" in url)(ended)


def _statuses(wanted: set[int]) -> Effect:
    """Of the calls that offer tools."""

    def effect(ended: Ended) -> str:
        found = {one["answers"][0][0] for one in notes(ended) if one["fate"] == "tools" and one["answers"]}
        return expect(found == wanted, f"calls with tools were answered with {sorted(found)}")

    return effect


def _reasons(wanted: bool) -> Effect:
    def effect(ended: Ended) -> str:
        told = [
            bool(answer["choices"][0]["message"].get("reasoning"))
            for one in notes(ended)
            for status, answer in one["answers"]
            if status == 200
        ]
        return expect(
            told and (any(told) if wanted else not any(told)), f"{sum(told)} of {len(told)} answers have reasoning"
        )

    return effect


def _branches(number: float) -> Effect:
    """Rows of an episode of two rounds whose second request leaves the reasoning out."""

    def effect(ended: Ended) -> str:
        roots = ended.sql(
            "SELECT count(*) FROM round JOIN episode USING (episode_id) JOIN grp USING (group_id) JOIN task USING (task_id) "
            "WHERE parent IS NULL AND episode.state = 'scored' AND payload LIKE '%two rounds%' GROUP BY episode_id"
        )
        mean = sum(roots) / max(len(roots), 1)
        return expect(roots and mean == number, f"{mean:g} branches in each of {len(roots)} episodes of two rounds")

    return effect


def _says_that_it_ended(ended: Ended) -> str:
    line = ended.output.strip().splitlines()[-1]
    return expect("agents.command" in ended.output and "code 0" in ended.output, f"said: {line}")
