"""Rows of the promises in docs/promises.md, and of sentences of the README and the documents: each points to the run or the test that
shows it."""

from __future__ import annotations

from tests.matrix.effects import all_of, always, expect, metric, prints
from tests.matrix.records import Effect, Ended, Row
from tests.matrix.scenarios.learner_runs import learner_name

LEDGER, SERVER, PROJECT = "tests/buffers/ledger", "tests/mocked_server", "tests/project"
PROMISES = {
    "P1": f"{LEDGER}/test_ledger_file.py::test_an_acknowledged_score_survives_kill_9",
    "P2": f"{LEDGER}/test_checkpoints.py::test_whatever_happens_a_lineage_trains_each_group_at_most_once_and_loses_none",
    "P3": f"{PROJECT}/test_resume.py::test_a_run_that_is_killed_again_and_again_makes_its_steps_with_the_same_bits",
    "P4": f"{LEDGER}/test_ledger.py::test_batches_hold_complete_groups_and_the_books_balance_in_any_order",
    "P5": f"{SERVER}/test_server.py::test_scores_are_idempotent_and_conflicts_refused",
    "P6": f"{SERVER}/http/test_client_retries.py::test_a_retry_joins_the_generation_that_runs",
    "P7": f"{PROJECT}/test_run.py::test_agents_that_crash_or_hang_are_counted_and_the_run_goes_on",
    "P8": f"{SERVER}/http/test_client_retries.py::test_hanging_up_aborts_what_is_generated",
    "P9": f"{PROJECT}/test_recovery.py::test_each_part_may_die_and_the_run_makes_all_its_steps",
    "P10": "tests/learner/training/test_trainer.py::test_fresh_tail_of_an_old_episode_trains_as_if_its_old_tokens_were_context",
    "P11": f"{LEDGER}/test_ledger_file.py::test_a_full_disk_loses_nothing_and_all_goes_on_when_space_returns",
    "P12": f"{LEDGER}/test_leases.py::test_a_released_lease_gives_its_groups_back_and_cannot_commit",
    "P13": f"{SERVER}/test_red_team.py::test_a_run_whose_agent_attacks_in_every_episode_ends_with_all_its_steps",
    "P14": f"{SERVER}/test_red_team.py::test_a_run_whose_judge_is_broken_learns_from_what_it_says_at_times",
    "P15": f"{SERVER}/test_server.py::test_an_agent_cannot_score_itself",
    "P16": f"{SERVER}/http/test_request_limits.py::test_a_host_that_others_can_reach_needs_a_secret_of_the_operator",
    "P17": "tests/buffers/tasks/test_parquet.py::test_a_cell_that_cannot_be_used_is_named",
    "P18": f"{SERVER}/conversation/test_restored_rounds.py::test_running_episodes_go_on_after_a_restart_with_the_same_key_and_the_exact_tokens",
    "P19": f"{PROJECT}/test_recovery.py::test_a_guarded_run_whose_own_process_is_killed_goes_on_by_itself",
    "P20": f"{LEDGER}/test_ledger_file.py::test_a_file_of_another_schema_version_is_refused_in_one_line",
    "P21": "tests/buffers/remote/test_remote_ledger.py::test_a_client_plays_and_trains_through_kills_of_the_ledgers_process",
    "P22": f"{SERVER}/test_red_team.py::test_tokens_of_a_changed_distribution_are_recorded_and_not_trained",
    "P23": f"{SERVER}/test_red_team.py::test_a_request_that_deafens_every_engine_is_found_and_its_episode_ended_while_the_others_are_served",
}  # fmt: skip
"""Promise -> the test that would fail if it were not so."""
ENVS, TOOLS = "tests/env_adapters", "tests/agents/tools"
TESTED = {
    "README: can my agent be trained": f"{SERVER}/test_check.py::test_the_command_line_with_the_real_engine",
    "README: understudy eval": "tests/learner/test_evaluate.py::test_a_run_gives_its_newest_weights_not_those_that_it_began_with",
    "README: the RFC's snippet": f"{PROJECT}/test_rfc_demo.py::test_the_rfc_snippet_runs_as_written",
    "README: agents' and plain prompts in one batch": f"{PROJECT}/test_rfc_demo.py::test_a_batch_mixes_agents_prompts_with_plain_prompts_of_the_file",
    "README: --help and errors are told at once": f"{PROJECT}/test_run.py::test_a_bad_configuration_is_one_line_with_key_rule_and_value",
    "agents.md: a large task is in TASK_FILE": "tests/agents/test_external.py::test_a_large_task_is_on_stdin_and_in_a_file_and_need_not_be_read",
    "agents.md: a URL gets truth, output and exit code": "tests/agents/test_external.py::test_a_remote_scorer_gets_the_truth_the_output_and_the_exit_code",
    "agents.md: a program that is started by hand": f"{PROJECT}/test_run.py::test_an_agent_that_is_started_by_hand_is_trained",
    "agents.md: the key may be in the URL": f"{SERVER}/http/test_dialects.py::test_the_key_in_the_path_works_in_every_dialect",
    "agents.md: gsm8k_strict, gsm8k_flexible": f"{ENVS}/scoring/test_rewards.py::test_gsm8k_answers_are_found_strictly_and_flexibly",
    "agents.md: model:FOLDER": f"{ENVS}/scoring/test_reward_model.py::test_a_configuration_names_it_and_two_sources_share_one",
    "environments.md: gymnasium": f"{ENVS}/test_env_adapters.py::test_a_board_is_rendered_and_its_actions_have_names",
    "environments.md: openenv": "tests/outside/test_env_contracts.py::test_an_openenv_server_is_played_in_sessions_of_its_own",
    "environments.md: verifiers": "tests/outside/test_env_contracts.py::test_a_verifiers_environment_is_played_as_its_authors_wrote_it",
    "environments.md: gsm8k": f"{ENVS}/test_gsm8k.py::test_the_environment_gives_several_tries_and_takes_off_for_wrong_ones",
    "environments.md: guessing_game": f"{ENVS}/test_env_adapters.py::test_halving_finds_every_number_and_higher_and_lower_are_true",
    "environments.md: a score may be revised": f"{LEDGER}/test_scores.py::test_another_value_is_a_conflict_unless_it_is_a_revision_before_training",
    "environments.md: every route but /health has a key": f"{SERVER}/http/test_request_limits.py::test_every_route_but_health_asks_for_a_key",
    "agent-loops.md: a loop written for verl": "tests/agents/workers/test_manager.py::test_a_loop_written_for_verl_is_played_recorded_and_scored",
    "agent-loops.md: MCP servers": f"{TOOLS}/test_mcp_server.py::test_a_stdio_servers_tools_are_listed_called_and_ended",
    "agent-loops.md: classes with verl's BaseTool interface": f"{TOOLS}/test_toolbox.py::test_create_kwargs_arrive_as_either_of_verls_loops_gives_them",
    "agent-loops.md: GSM8K with tools": f"{PROJECT}/test_run_loops.py::test_a_tool_agent_trains_from_the_shipped_problems_on_the_real_engine",
    "recovery.md: Ctrl-C": f"{PROJECT}/test_run.py::test_ctrl_c_stops_cleanly_and_says_how_to_go_on",
    "recovery.md: every episode fails": f"{PROJECT}/test_run.py::test_agents_that_never_succeed_end_the_run_with_the_reason",
    "recovery.md: a part that dies again and again": f"{PROJECT}/test_recovery.py::test_what_dies_again_and_again_ends_the_run_with_its_error",
    "recovery.md: a gradient that is not finite": "tests/learner/training/test_bad_batches.py::test_gradient_that_overflows_is_skipped_and_changes_nothing",
    "recovery.md: an environment of a loop that fails": "tests/agents/loops/test_env_agent.py::test_an_environment_that_fails_ends_the_episode_with_the_short_reason",
    "recovery.md: a tool that raises": f"{TOOLS}/test_hostile.py::test_whatever_a_tool_raises_or_returns_is_its_calls_outcome",
    "ledger.md: export, rescore, doctor": f"{LEDGER}/test_tools.py::test_rescoring_replays_episodes_and_revises_what_is_not_trained",
}
"""A sentence of the documents -> the test that shows it."""
EXACT = metric("policy/max_logprob_diff", lambda values: max(values) < 1e-4)


def rows() -> list[Row]:
    """First the promises, then the sentences."""
    tests = [Row("claim", words, test) for words, test in TESTED.items()]
    return [*[Row(f"promise {name}", "", test) for name, test in PROMISES.items()], *_sentences(), *tests]


def _sentences() -> list[Row]:
    claim = "claim"
    return [
        Row(claim, "README: unmodified agents", "tests/outside/test_clients.py::test_a_program_is_trained_exactly"),
        Row(claim, "README: coding agents are trained exactly", "tests/outside/test_clients.py::test_a_coding_agent_is_trained_exactly"),
        Row(claim, "README: the learner computes each log-probability again", "prompts", all_of(EXACT, always("policy/checked_share", 1))),
        Row(claim, "README: also over several rounds", "rounds", EXACT),
        Row(claim, "README: also through programs and an environment", "judged", EXACT),
        Row(claim, "README: any process may die and is restarted", "deaths", _all_steps(12)),
        Row(claim, "README: a run prints a line per step", "prompts", prints("step 1/3  reward ", "step 3/3  reward ")),
        Row(claim, "README: results are in runs/<name>/", "judged", _files),
        Row(claim, "README: last/ is a folder that transformers loads", "prompts", _loads),
        Row(claim, "README: an earlier run of that name is moved aside", "prompts", _has_own_folder),
        Row(claim, "README: understudy init, run", "tests/learner/test_cli.py::test_an_installed_wheel_trains_the_project_that_it_writes"),
        Row(claim, "README: understudy resume", "resumed", _continues),
        Row(claim, "README: understudy compare", "tests/learner/reporting/test_compare.py::test_it_shows_the_keys_that_differ_the_figures_and_a_picture"),
        Row(claim, "README: understudy why", "tests/project/test_run.py::test_agents_that_never_succeed_end_the_run_with_the_reason"),
        Row(claim, "README: hostile requests harm neither server nor engine", "tests/fuzz/test_fuzz.py::test_no_request_harms_the_real_engine_or_who_else_it_answers"),
        Row(claim, "agents.md: SEED is the same in a group", "program", _seeds),
        Row(claim, "agents.md: exit codes", "crashes", _exit_code_is_the_reason),
        Row(claim, "environments.md: scores of rounds, branches and several judges", "parts", _parts),
        Row(claim, "environments.md: a scorer's mapping: several judges and a hint", "mapped", _mapped),
        Row(claim, "environments.md: POST /tasks", "posted", _posted_are_played),
        Row(claim, "environments.md: the documented program", "tests/documents/test_pages.py::test_a_page_does_what_it_says"),
        Row(claim, "agent-loops.md: the documented loops", "tests/documents/test_pages.py::test_a_page_does_what_it_says"),
        Row(claim, "agent-loops.md: an environment's step rewards", "step-rewards", metric("critic/vf_loss", lambda losses: min(losses) > 0)),
        Row(claim, "agent-loops.md: trajectories with a reward each", "trajectories", all_of(always("batch/rows", 16), metric("policy/grad_norm", lambda norms: max(norms) > 0))),
        Row(claim, "environments.md: roles play the players of an environment", "players", all_of(EXACT, _each_side_has_its_score)),
        Row(claim, "environments.md: the policy plays both sides", "players-alone", all_of(EXACT, always("batch/rows", 16), metric("policy/grad_norm", lambda norms: max(norms) > 0))),
        Row(claim, "metrics.md: lag is bounded", learner_name("grpo"), _lag_is_bounded),
        Row(claim, "numerics.md: more than rounding explains is told", "drifts", prints("engine and learner disagree: a log-probability differs by", "rollout.engine_args")),
        Row(claim, "numerics.md: far more ends the run before its first step", "disagrees", prints("engine and learner must compute the same log-probabilities, and differ by", "of 0 to 1 is the first that differs", "trying rollout.engine_args={model_impl: transformers}")),
        Row(claim, "configuration.md: every key as it is used", "prompts", _config_is_complete),
    ]  # fmt: skip


def _all_steps(number: int) -> Effect:
    return lambda ended: expect(
        ended.summary["steps"] == number, f"{ended.summary['steps']} steps, restarts {ended.summary['restarts']}"
    )


def _files(ended: Ended) -> str:
    names = ("summary.json", "reward.png", "metrics.jsonl", "last", "best", "checkpoints", "ledger.sqlite", "traces.jsonl",
             "config.yaml", "log.txt", "env.log", "agents")  # fmt: skip
    missing = [name for name in names if not (ended.folder / name).exists()]
    return expect(not missing, f"{len(names) - len(missing)} of {len(names)} are there; missing: {missing}")


def _loads(ended: Ended) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(ended.folder / "last")
    template = AutoTokenizer.from_pretrained(ended.folder / "last").chat_template
    return expect(template, f"a model of {sum(each.numel() for each in model.parameters())} numbers and its template")


def _has_own_folder(ended: Ended) -> str:
    return expect(ended.folder.is_dir(), f"{ended.folder.name} is a folder of its own")


def _continues(ended: Ended) -> str:
    steps = [int(line["step"]) for line in ended.lines if "reward/mean" in line]
    seen = "resuming after step 2" in ended.output
    return expect(seen and steps == [1, 2, 3], f"resumed after step 2, steps {steps}")


def _seeds(ended: Ended) -> str:
    from tests.matrix.rows.agents import notes

    groups: dict[str, set[str]] = {}
    for one in notes(ended):
        groups.setdefault(one["variables"]["EPISODE_ID"].split("-")[0], set()).add(one["variables"]["SEED"])
    alike = all(len(seeds) == 1 for seeds in groups.values())
    several = len(set().union(*groups.values()))
    return expect(
        alike and several == len(groups), f"{len(groups)} groups, {several} seeds, one in each group: {alike}"
    )


def _exit_code_is_the_reason(ended: Ended) -> str:
    reasons = set(ended.sql("SELECT DISTINCT reason FROM episode WHERE state = 'failed'"))
    return expect(
        any("exited with code 3" in str(reason) for reason in reasons), f"reasons {sorted(map(str, reasons))}"
    )


def _mapped(ended: Ended) -> str:
    from tests.matrix import replay

    rows = [row for batch in replay.batches(ended) for row in batch.rows]
    told = {(row.hint, tuple(sorted(row.judges or {}))) for row in rows}
    expect(told == {("Say abc.", ("brief", "letters"))}, f"rows have hint and judges {told}")
    mean = all(abs(row.score - sum((row.judges or {}).values()) / 2) < 1e-6 for row in rows)
    return expect(
        mean and max(ended.metric("policy/grad_norm")) > 0, f"{len(rows)} rows have a hint and the mean of two judges"
    )


def _parts(ended: Ended) -> str:
    found = dict(ended.sql("SELECT part || judge, count(*) FROM score WHERE verdict = 'stored' GROUP BY 1"))
    halves = ended.sql(
        "SELECT count(*) FROM episode WHERE score > 0.5 AND episode_id IN (SELECT episode_id FROM score WHERE judge = 'strict')"
    )
    fine = {"round", "branch", "wholestrict"} <= found.keys() and halves == [0]
    return expect(fine, f"scores stored: {found}; none of the episodes with a strict judge is above 0.5")


def _each_side_has_its_score(ended: Ended) -> str:
    sums = ended.sql(
        "SELECT sum(value) FROM score WHERE part = 'role' GROUP BY episode_id HAVING count(DISTINCT role) = 2"
    )
    won = [ended.metric(f"reward/role/{role}") for role in ("first", "second")]
    fine = len(sums) >= 24 and set(sums) == {0.0} and any(map(any, won)) and set(ended.metric("batch/rows")) == {16.0}
    return expect(
        fine, f"{len(sums)} episodes have a score for each role, which add up to {set(sums)}; mean scores {won}"
    )


def _posted_are_played(ended: Ended) -> str:
    number = ended.sql(
        "SELECT count(DISTINCT task_id) FROM grp JOIN episode USING (group_id) WHERE task_id LIKE 'posted-%' AND score IS NOT NULL"
    )[0]
    return expect(number > 0, f"{number} added tasks were played and scored")


def _lag_is_bounded(ended: Ended) -> str:
    lags = ended.metric("staleness/max")
    return expect(
        max(lags) <= ended.config["buffer.max_policy_lag"],
        f"staleness/max {lags}, bound {ended.config['buffer.max_policy_lag']}",
    )


def _config_is_complete(ended: Ended) -> str:
    from configs.keys import all_keys

    return expect(set(ended.config) == set(all_keys()), f"{len(ended.config)} keys in config.yaml")
