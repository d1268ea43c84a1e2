"""Rows of `rollout.*` and `buffer.*`."""

from __future__ import annotations

import re

from tests.matrix.effects import SAME, absent, all_of, always, counted, expect, metric, prints
from tests.matrix.records import Effect, Ended, Row
from tests.matrix.scenarios.learner_runs import learner_name

HOSTS = "tests/project/cluster/test_run_hosts.py::test_a_run_on_three_hosts_goes_on_when_one_joins_and_one_dies"
DEFAULTS = "tests/learner/startup/test_model_defaults.py"
ELIGIBLE = "tests/buffers/ledger/test_stored_groups.py::test_which_groups_are_eligible"
SHARES = "tests/mocked_server/vllm/test_engine_arguments.py::test_an_engine_takes_its_share_of_a_card"


def rows() -> list[Row]:
    """One for each key and value."""
    lagged = learner_name("grpo")
    return [
        Row("rollout.engine", "", "tests/project/servers/test_run_servers.py::test_a_vllm_server_is_trained_through_its_death"),
        Row("rollout.engine", "", "tests/project/servers/test_run_servers.py::test_a_server_with_sglangs_routes_is_trained"),
        Row("rollout.temperature", "", "batch", _sampled_at_its_temperature),
        Row("rollout.max_tokens", "", "batch", counted("SELECT max(num_sampled) FROM round", 5)),
        Row("rollout.max_model_len", "", "batch", _long_prompts_fail),
        Row("rollout.engine_timeout_s", "", "deaths", metric("restarts/engine", lambda counts: max(counts) == 1)),
        Row("rollout.engines", "integer", "fleet", _engines_die_and_nothing_is_lost),
        Row("rollout.engines", "mapping", HOSTS),
        Row("rollout.threads", "null", f"{DEFAULTS}::test_in_turns_learner_and_engines_have_all_cores_and_beside_one_another_one_each"),
        Row("rollout.threads", "set", f"{DEFAULTS}::test_engines_compute_with_as_many_threads_as_the_run_says"),
        Row("rollout.kv_cache_gb", "null", "batch", _cache(0.25, token_bytes=1024)),
        Row("rollout.kv_cache_gb", "set", "dapo", _cache(0.03, token_bytes=512)),
        Row("rollout.tensor_parallel", "", "tests/learner/placement/test_counted_gpus.py::test_each_rank_sees_its_own_card"),
        Row("rollout.gpu_memory_utilization", "null", SHARES),
        Row("rollout.gpu_memory_utilization", "set", SHARES),
        Row("rollout.engine_args", "", "dapo", _logged("enable_prefix_caching=False")),
        Row("rollout.sleep", True, "batch", metric("time/sleep_s", lambda seconds: min(seconds) > 0)),
        Row("rollout.sleep", False, "prompts", absent("time/sleep_s")),
        Row("buffer.groups_per_step", "", "batch", counted("SELECT DISTINCT num_groups FROM step", 1)),
        Row("buffer.group_size", "", "batch", all_of(counted("SELECT DISTINCT size FROM grp", 3), always("batch/episodes", 3))),
        Row("buffer.max_policy_lag", "0", "batch", always("staleness/max", 0)),
        Row("buffer.max_policy_lag", "2", lagged, metric("staleness/max", lambda lags: 1 <= max(lags) <= 2)),
        Row("buffer.replay.share", "", "replayed", _replayed),
        Row("buffer.replay.oldest", "", "replayed", metric("replay/age_max", lambda ages: 1 <= max(ages) <= 2)),
        Row("buffer.replay.only", "all", ELIGIBLE),
        Row("buffer.replay.only", "mixed", ELIGIBLE),
        Row("buffer.replay.only", "solved", "replayed", _only_solved),
        Row("buffer.replay.times", "", "replayed", counted("SELECT max(num_trained) FROM grp", 3)),
        Row("buffer.node", "", "no-such-node", prints("error: buffer.node", "nowhere")),
        Row("run.trusted_network", True, "tests/project/cluster/test_run_cluster.py::test_what_crosses_a_trusted_network_is_signed_only"),
        Row("run.trusted_network", False, "tests/project/cluster/test_run_cluster.py::test_a_run_goes_on_when_its_ledgers_process_dies_and_ends_it_in_the_end"),
        Row("buffer.node", "", "tests/project/cluster/test_run_cluster.py::test_a_run_goes_on_when_its_ledgers_process_dies_and_ends_it_in_the_end"),
    ]  # fmt: skip


def _replayed(ended: Ended) -> str:
    """The run's weights are those of its batches, stored groups among them."""
    from tests.matrix.replay import batches, mean_difference, replay, trained_weights

    stored = [batch.num_stored for batch in batches(ended)]
    own = mean_difference(replay(ended).weights, trained_weights(ended))
    seen = f"stored groups of each batch of 4: {stored}; trained again, the weights differ by {own:.0e}"
    return expect(stored[0] == 0 and max(stored) == 3 and stored == ended.metric("replay/groups") and own < SAME, seen)


def _only_solved(ended: Ended) -> str:
    best = ended.sql(
        "SELECT max(score) FROM joined JOIN episode USING (group_id) WHERE state = 'scored' GROUP BY group_id"
    )
    return expect(best and min(best) > 0, f"best scores of the stored groups: {best}")


def _engines_die_and_nothing_is_lost(ended: Ended) -> str:
    restarts, diff = max(ended.metric("restarts/engine")), max(ended.metric("policy/max_logprob_diff"))
    failed = ended.sql("SELECT DISTINCT reason FROM episode WHERE state = 'failed'")
    seen = (
        f"{restarts:.0f} of three engines restarted, failed episodes: {failed}, log-probabilities differ by {diff:.1e}"
    )
    return expect(restarts == 2 and not failed and diff < 1e-4, seen)


def _sampled_at_its_temperature(ended: Ended) -> str:
    from tests.matrix.replay import replay

    own = max(ended.metric("policy/max_logprob_diff"))
    other = max(one["policy/max_logprob_diff"] for one in replay(ended, {"rollout.temperature": 1.0}).metrics)
    seen = f"recorded log-probabilities differ by {own:.1e} at 0.5, by {other:.2g} were it 1.0"
    return expect(own < 1e-4 and other > 0.1, seen)


def _long_prompts_fail(ended: Ended) -> str:
    reasons = ended.sql("SELECT DISTINCT reason FROM episode WHERE state = 'failed'")
    scored = ended.sql(
        "SELECT count(*) FROM episode JOIN grp USING (group_id) JOIN task USING (task_id) "
        "WHERE episode.state = 'scored' AND length(payload) > 2000"
    )
    found = [reason for reason in reasons if "256" in reason or "too long" in reason]
    return expect(found and scored == [0], f"prompts beyond it: {scored[0]} scored; failed: {found[:1]}")


def _cache(gib: float, *, token_bytes: int) -> Effect:
    """vLLM's own word on how many tokens its cache holds; each takes 512 bytes in each layer of the tiny model."""

    def effect(ended: Ended) -> str:
        found = re.findall(r"KV cache size: ([\d,]+) tokens", (ended.folder / "log.txt").read_text(errors="replace"))
        tokens = int(found[0].replace(",", "")) if found else 0
        wanted = gib * 2**30 / token_bytes
        return expect(0.95 * wanted < tokens < 1.05 * wanted, f"the engine's cache holds {tokens} tokens")

    return effect


def _logged(words: str) -> Effect:
    """vLLM's own word on how the engine was configured."""

    def effect(ended: Ended) -> str:
        log = (ended.folder / "log.txt").read_text(errors="replace")
        found = re.findall(rf"{words.partition('=')[0]}=\w+", log)
        return expect(words in found, f"the engine's log says {found[:1]}")

    return effect
