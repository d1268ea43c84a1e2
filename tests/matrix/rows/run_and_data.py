"""Rows of `run.*`, `model.*`, `data.*`, `sft.*` and `serve.*`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.matrix.effects import all_of, always, counted, expect, metric, refused, trains
from tests.matrix.records import Effect, Ended, Row
from tests.matrix.scenarios.learner_runs import learner_name
from tests.matrix.scenarios.refusals import REFUSALS

FOLDERS = "tests/project/test_run_folders.py"
SFT = "tests/learner/test_sft_loop.py"
SHOWN = "tests/mocked_server/vllm/test_demonstrations.py"
JUDGE = "tests/env_adapters/scoring/test_judge.py"
NEXT = "tests/mocked_server/test_next_turn.py"
LIVE = "tests/project/test_live.py"
REFUSED = "tests/project/test_live_refusals.py::test_candidates_are_refused_for_sessions_entropy_and_likeness_and_sessions_are_forgotten"
WATCHED = "tests/mocked_server/test_watching.py"
LEARNED = "tests/project/test_live_watched.py::test_what_another_model_says_is_learned_and_then_said_without_it"
GATE = "tests/learner/test_live_versions.py"
WHOSE = "tests/mocked_server/test_whose_data.py"
CHECKS = "tests/learner/startup/test_input_check.py"


def rows() -> list[Row]:
    """One for each key and value."""
    return [*_run_rows(), *_data_rows()]


def _run_rows() -> list[Row]:
    return [
        Row("run.name", "", "mix", _results_in("another-name")),
        Row("run.dir", "", "mix", lambda ended: expect((ended.base / "another-name").is_dir(), f"results in {ended.base}")),
        Row("run.steps", "", "mix", lambda ended: expect(_steps(ended) == [1, 2, 3, 4], f"steps {_steps(ended)}")),
        Row("run.seed", "", "mix", all_of(_other_order, _other_weights)),
        Row("run.checkpoints.every", "", "mix", _checkpoints([3, 4], of="prompts")),
        Row("run.checkpoints.keep", "", "mix", _checkpoints([3, 4], of="prompts")),
        Row("run.trackers", "tensorboard", "mix", _tensorboard),
        *[Row("run.trackers", name, name, refused(*REFUSALS[name][1])) for name in ("wandb", "mlflow", "swanlab")],
        Row("run.debug", True, "tests/project/test_debug.py::test_a_debugged_run_stops_in_the_users_code_with_learner_and_loops_in_its_process_and_goes_on"),
        Row("run.debug", False, "tests/learner/training/test_ranks.py::test_death_of_a_rank_names_it_and_ends_the_others"),
        Row("run.reward_optimum", "null", "prompts", _optimum(None)),
        Row("run.reward_optimum", "set", "mix", _optimum(1.0)),
        Row("model.path", "tiny", "prompts", _made_here),
        Row("model.path", "a folder", "dapo", _started_from_the_folder),
        Row("model.dtype", "float32", "prompts", all_of(_written_in("F32"), metric("policy/max_logprob_diff", lambda v: max(v) < 1e-4))),
        Row("model.dtype", "bfloat16", learner_name("opo"), _written_in("BF16")),
        Row("model.trust_remote_code", True, f"{FOLDERS}::test_a_folder_of_the_hub_learns"),
        Row("model.trust_remote_code", False, f"{CHECKS}::test_a_model_that_cannot_be_used_is_refused_with_a_remedy"),
        Row("sft.demonstrations", "", "mix", all_of(_warmed, trains("sft.demonstrations", ""))),
        Row("sft.steps", "set", "mix", trains("sft.steps", 2)),
        Row("sft.lr", "", "mix", trains("sft.lr", 1e-4)),
        Row("sft.batch_size", "", "mix", trains("sft.batch_size", 8)),
        Row("sft.steps", "null", f"{SFT}::test_each_pass_goes_through_all_conversations_in_an_order_of_its_own"),
        Row("sft.epochs", "", f"{SFT}::test_each_pass_goes_through_all_conversations_in_an_order_of_its_own"),
        *[Row("sft.validation", kind, f"{SFT}::test_what_is_held_out_is_never_trained") for kind in ("text", "number")],
        Row("sft.min_score", "null", f"{SFT}::test_what_is_refused_is_counted_and_named_and_low_scores_are_left_out"),
        Row("sft.min_score", "set", f"{SFT}::test_what_is_refused_is_counted_and_named_and_low_scores_are_left_out"),
        Row("sft.patience", "null", f"{SFT}::test_a_resumed_stage_makes_the_updates_that_were_left"),
        Row("sft.patience", "set", f"{SFT}::test_it_ends_early_with_the_weights_of_the_lowest_loss"),
        *[Row("sft.train_on", value, f"{SHOWN}::test_weights_choose_the_answers_that_are_trained") for value in ("all", "last")],
        Row("serve.enabled", True, f"{LIVE}::test_users_are_served_learned_from_and_found_again_after_a_kill"),
        Row("serve.enabled", False, "tests/configs/test_serve.py::test_what_cannot_be_served_is_refused_by_name"),
        Row("serve.silence_s", "", "tests/mocked_server/test_live_sessions.py::test_silence_ends_what_was_scored_and_forgets_what_was_not"),
        Row("serve.batch_age_s", "", "tests/buffers/test_datasets.py::test_a_batch_that_waited_for_long_is_smaller"),
        Row("serve.gate.tasks", "", f"{GATE}::test_a_candidate_that_may_be_worse_is_refused_and_the_served_one_stays"),
        Row("serve.gate.every", "", f"{LIVE}::test_users_are_served_learned_from_and_found_again_after_a_kill"),
        Row("serve.gate.samples", "", f"{GATE}::test_each_task_is_played_as_often_as_asked"),
        Row("serve.gate.margin", "", f"{GATE}::test_a_candidate_that_may_be_worse_is_refused_and_the_served_one_stays"),
        *[Row(f"serve.gate.{key}", "", REFUSED) for key in ("min_entropy", "max_likeness", "session_hours")],
        Row("serve.gate.max_drift", "", f"{GATE}::test_a_candidate_that_drifted_from_the_model_is_refused"),
        *[Row(f"serve.gate.{key}", "", f"{GATE}::test_a_candidate_is_tried_on_a_share_of_the_sessions") for key in ("session_share", "sessions")],
        Row("serve.sessions_keep_version", True, f"{GATE}::test_sessions_keep_the_last_four_versions_that_were_served"),
        Row("serve.sessions_keep_version", False, f"{GATE}::test_sessions_move_on_where_they_do_not_keep_their_version"),
        Row("serve.judge.model", "", f"{NEXT}::test_the_policy_judges_its_own_answers_by_what_is_said_next"),
        *[Row(f"serve.judge.{key}", "", f"{NEXT}::test_a_judge_behind_a_url_is_asked") for key in ("name", "key_variable")],
        Row("serve.judge.prompt", "", f"{NEXT}::test_a_prompt_without_places_is_refused"),
        Row("serve.judge.max_tokens", "", f"{NEXT}::test_the_policy_judges_its_own_answers_by_what_is_said_next"),
        Row("serve.judge.timeout_s", "", f"{NEXT}::test_a_judge_that_fails_changes_nothing_and_the_next_is_judged"),
        Row("serve.private_patterns", "", f"{WHOSE}::test_what_has_private_text_is_answered_and_leaves_nothing"),
        Row("serve.retention_days", "set", f"{WHOSE}::test_what_is_old_is_forgotten_some_at_a_time_and_its_space_given_back"),
        Row("serve.retention_days", "null", f"{WHOSE}::test_without_a_retention_nothing_is_forgotten_by_itself_and_one_shorter_than_a_silence_is_refused"),
        *[
            Row(f"serve.upstream.{key}", value, f"{WATCHED}::{test}")
            for key, value, test in (
                ("url", "", "test_a_chat_with_a_tool_passes_and_is_a_demonstration"),
                ("model", "", "test_a_chat_with_a_tool_passes_and_is_a_demonstration"),
                ("dialect", "null", "test_claudes_client_passes"),
                ("dialect", "anthropic", "test_a_client_of_another_dialect_is_the_policys"),
                ("dialect", "openai", "test_claudes_client_is_the_policys_where_it_speaks_openais_dialect"),
                ("share", "", "test_a_named_session_and_its_side_are_of_one_model"),
                ("step", "", "test_the_share_falls_with_each_promoted_version_to_its_floor"),
                ("floor", "", "test_the_share_falls_with_each_promoted_version_to_its_floor"),
                ("min_score", "", "test_feedback_weighs_and_leaves_out"),
                ("timeout_s", "", "test_one_that_is_silent_is_a_time_out"),
            )
        ],
        *[Row(f"serve.upstream.{key}", value, LEARNED) for key, value in (("key_variable", ""), ("lesson_sessions", ""), ("terms_allow_learning", True))],
        Row("serve.upstream.terms_allow_learning", False, "tests/configs/test_serve.py::test_what_cannot_be_served_is_refused_by_name"),
        Row("learner.stage", "sft", "tests/project/test_sft.py::test_a_killed_run_of_sft_goes_on_as_if_it_had_not_been"),
        Row("learner.stage", "rl", "prompts", lambda ended: expect(_steps(ended) != [], f"steps {_steps(ended)}")),
    ]  # fmt: skip


def _data_rows() -> list[Row]:
    letters, truth = "val/mean/letters", "val/mean/truth"
    return [
        Row("data.tasks", "text", "prompts", counted("SELECT count(*) > 0 FROM task WHERE task_id LIKE 'tasks-%'", 1)),
        Row("data.columns", "", "tests/learner/startup/test_hub.py::test_a_data_set_of_the_hub_becomes_a_task_file"),
        Row("data.tasks", "mapping", "mix", _three_of_one_for_each_of_the_other),
        Row("data.sampler", "uniform", "prompts", lambda ended: expect(not any("sampler/tasks" in line for line in ended.lines), "nothing is drawn by its scores")),
        Row("data.sampler", "thompson", "mapped", _drawn_by_scores),
        Row("data.sampler", "pass_rate", "dapo", _drawn_by_scores),
        Row("data.make", "", "mix", lambda ended: expect((ended.files / "many.parquet").is_file(), "many.parquet was made")),
        Row("data.make", "demonstrations missing", "made-demonstrations", _warmed),
        Row("data.validation.tasks", "", "mix", metric("val/tasks", lambda counts: set(counts) == {3})),
        Row("data.validation.every", "", "mix", metric("val/step", lambda steps: set(steps) >= {0, 2, 4} and not {1, 3} & set(steps))),
        Row("data.validation.samples", "", "mix", counted("SELECT count(DISTINCT sample_index) FROM episode JOIN grp USING (group_id) WHERE grp.state = 'validated'", 3)),
        Row("data.scorer", "text", "prompts", _scored_by_letters),
        Row("data.scorer", "mapping", "mix", all_of(metric(letters, lambda means: any(means)), metric(truth, lambda means: len(means) > 0))),
        Row("data.judge.mode", "absolute", "model-judge", _tenths),
        Row("data.judge.mode", "ranking", "ranked", _places),
        Row("data.judge.rubric", "", "model-judge", _asked_by_the_rubric),
        Row("data.judge.truth", "", "model-judge", metric("judge/agreement_truth", lambda shares: all(0 <= each <= 1 for each in shares))),
        Row("data.judge.max_tokens", "", "model-judge", counted("SELECT max(num_sampled) BETWEEN 9 AND 300 FROM round WHERE role = 'judge'", 1)),
        Row("data.judge.timeout_s", "", f"{JUDGE}::test_a_judge_that_is_late_fails_the_whole_group_and_the_next_attempts_are_ranked"),
        Row("data.reward_manager", "naive", "prompts", _scored_by_letters),
        Row("data.reward_manager", "batch", "batch", _scored_as_lists),
        Row("data.reward_manager", "dapo", "dapo", all_of(always("batch/equal_groups", 0), metric("reward/overlong", lambda v: min(v) < 0), _dropped)),
        Row("run.checkpoints.keep", "named by its own validation", "mix", _named_by_its_own_validation),
    ]  # fmt: skip


def _results_in(name: str) -> Effect:
    return lambda ended: expect(
        ended.folder.name == name and ended.summary["name"] == name, f"results in {ended.folder.name}"
    )


def _steps(ended: Ended) -> list[int]:
    return [int(line["step"]) for line in ended.lines if "reward/mean" in line]


def _other_order(ended: Ended) -> str:
    from buffers.tasks.task_order import endless_tasks

    stream = endless_tasks(
        {Path(path): weight for path, weight in ended.config["data.tasks"].items()}, seed=0, opened={}
    )
    with_0 = [next(stream).task_id for _ in range(8)]
    own = ended.sql("SELECT task_id FROM grp WHERE state != 'validated' AND reason IS NULL ORDER BY group_id LIMIT 8")
    return expect(own != with_0, f"the first tasks are {own[:3]}, with seed 0 {with_0[:3]}")


def _other_weights(ended: Ended) -> str:
    from tests.matrix.replay import largest_difference, load_file

    weights = [load_file(one.folder / "model" / "model.safetensors") for one in (ended, ended.others["prompts"])]
    difference = largest_difference(*weights)
    return expect(difference > 0.01, f"the random model differs by {difference:.2g} from that of seed 0")


def _checkpoints(steps: list[int], *, of: str) -> Effect:
    """These, of which the best one may be older; the run `of` had one at its end only."""

    def effect(ended: Ended) -> str:
        def names(run: Ended) -> list[int]:
            return sorted(int(path.name[5:11]) for path in (run.folder / "checkpoints").glob("step-*"))

        own, other = names(ended), names(ended.others[of])
        newest = [step for step in own if step in steps]
        return expect(
            newest == steps and len(own) <= len(steps) + 1 and len(other) == 1,
            f"checkpoints of steps {own}; {of}: {other}",
        )

    return effect


def _tensorboard(ended: Ended) -> str:
    own, other = (list((one.folder / "tensorboard").glob("events*")) for one in (ended, ended.others["prompts"]))
    return expect(own and not other, f"{len(own)} files of tensorboard, {len(other)} where it is not named")


def _optimum(value: float | None) -> Effect:
    return lambda ended: expect(
        (found := ended.summary["reward_optimum"]) == value, f"reward_optimum {found} in the summary"
    )


def _made_here(ended: Ended) -> str:
    path = ended.folder / "model" / "config.json"
    return expect(path.is_file(), f"a model of {json.loads(path.read_text())['num_hidden_layers']} layers was made")


def _started_from_the_folder(ended: Ended) -> str:
    made = (ended.folder / "model").exists()
    layers = json.loads((ended.folder / "last" / "config.json").read_text())["num_hidden_layers"]
    return expect(not made and layers == 1, f"no model was made; the checkpoint's has {layers} layer, as the folder's")


def _written_in(dtype: str) -> Effect:
    def effect(ended: Ended) -> str:
        from safetensors import safe_open

        with safe_open(ended.folder / "last" / "model.safetensors", framework="pt") as file:
            found = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        return expect(found == {dtype}, f"the checkpoint's weights are {sorted(found)}")

    return effect


_warmed = metric("sft/loss_last", lambda losses: len(losses) == 1 and losses[0] > 0)


def _three_of_one_for_each_of_the_other(ended: Ended) -> str:
    many, few = (
        ended.sql(f"SELECT count(*) FROM grp WHERE task_id LIKE '{name}::%' AND state != 'validated'")[0]
        for name in ("many", "few")
    )
    return expect(many >= 2 * few > 0 and abs(many - 3 * few) <= 3, f"{many} groups of one file, {few} of the other")


def _scored_by_letters(ended: Ended) -> str:
    scores = set(ended.sql("SELECT DISTINCT score FROM episode WHERE state = 'scored'"))
    return expect(scores == {0.0, 1.0}, f"scores {sorted(scores)}")


def _tenths(ended: Ended) -> str:
    scores = set(ended.sql("SELECT DISTINCT score FROM episode WHERE state = 'scored'"))
    trained = ended.sql("SELECT max(CAST(hex(trained) AS INTEGER)) FROM round WHERE role = 'judge'")
    return expect(
        scores <= {each / 10 for each in range(11)} and trained == [0], f"scores {sorted(scores)}, none trained"
    )


def _places(ended: Ended) -> str:
    means = ended.sql(
        "SELECT avg(score) FROM episode JOIN grp USING (group_id) WHERE grp.state = 'trained' AND episode.state = 'scored' "
        "GROUP BY group_id"
    )
    return expect(means and all(abs(mean - 0.5) < 1e-9 for mean in means), f"mean places of groups: {means}")


def _asked_by_the_rubric(ended: Ended) -> str:
    tokens = ended.sql("SELECT avg(length(body)) FROM round WHERE role = 'judge'")[0]
    others = ended.others["ranked"].sql("SELECT avg(length(body)) FROM round WHERE role = 'judge'")[0]
    return expect(
        tokens < others, f"a question and its answer have {tokens:.0f} bytes, with the shipped rubric {others:.0f}"
    )


def _scored_as_lists(ended: Ended) -> str:
    number = ended.sql("SELECT count(*) FROM episode WHERE score IN (0, 1)")[0]
    return expect(number >= 6, f"{number} answers were scored by a function that takes lists only")


def _dropped(ended: Ended) -> str:
    buffer = ended.summary["buffer"]
    number = buffer.get("evicted/no variance", 0)
    return expect(number > 0, f"{number} groups evicted without variance")


def _drawn_by_scores(ended: Ended) -> str:
    trained = ended.sql("SELECT count(DISTINCT task_id) FROM trained JOIN grp USING (group_id)")[0]
    tried = ended.metric("sampler/tasks")
    return expect(tried[-1] >= trained > 0, f"{tried} tasks had scores, {trained} were trained")


def _named_by_its_own_validation(ended: Ended) -> str:
    """A checkpoint's score is that of the validation of its own weights."""
    validated = {int(line["val/step"]): line["val/mean"] for line in ended.lines if "val/step" in line}
    records = [json.loads(path.read_text()) for path in sorted((ended.folder / "checkpoints").glob("step-*/run.json"))]
    told = {record["step"]: record["score"] for record in records if record["step"] in validated}
    wrong = {step: score for step, score in told.items() if score != validated[step]}
    return expect(told and not wrong, f"scores of checkpoints {told}, validations {validated}")
