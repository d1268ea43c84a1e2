"""Each rule of `understudy why` finds what it is for, and nothing in a run just beside it; each remedy's keys can be set."""

from __future__ import annotations

import re

import pytest

from configs.load import load_config
from learner.diagnosis.diagnose import OF_TASKS, ORDER, RULES, findings
from learner.diagnosis.evidence import Severity
from tests.learner.diagnosis import episode_cases, figure_cases
from tests.learner.diagnosis.case import Case
from tests.learner.diagnosis.recorded_run import RecordedRun

CASES = [*episode_cases.CASES, *figure_cases.CASES]
KEY = re.compile(r"\b((?:run|model|data|agents|env|server|rollout|buffer|learner)\.[\w.]+=[\w.+-]*\w)")


def names(cases: list[Case]) -> list[str]:
    return [f"{case.rule}-{number}" for number, case in enumerate(cases)]


@pytest.mark.seconds
@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_a_rule_fires_where_it_must_and_only_there(tmp_path, case):
    found = case.fires(tmp_path / "fires").judge(case.rule)
    assert found is not None
    assert (found.severity, found.figure) == (case.severity, pytest.approx(case.figure))
    told = f"{found.sentence} {found.remedy}"
    assert [words for words in case.says if words not in told] == [], told
    quiet = case.quiet(tmp_path / "quiet").judge(case.rule)
    assert quiet is None, quiet


@pytest.mark.seconds
@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_a_remedy_can_be_set_in_the_run_that_it_is_for(tmp_path, case):
    run = case.fires(tmp_path)
    for finding in findings(run.evidence()):
        for choice in re.split(r", | or |; ", finding.remedy):
            keys = KEY.findall(choice)
            changed = load_config(run.folder / "config.yaml", keys)
            assert not keys or changed != run.evidence().config, f"{finding.rule}: {choice} is in force"


def test_every_rule_has_a_case():
    assert {case.rule for case in CASES} == {rule.name for rule in RULES}


def test_a_run_in_which_all_is_well_is_told_so_with_figures(tmp_path):
    run = RecordedRun(tmp_path).steps().ledger(episode_cases.groups(*[episode_cases.GOOD] * 5)).summary()
    (found,) = findings(run.evidence())
    assert (found.rule, found.severity, found.remedy) == ("healthy", Severity.NOTE, "")
    assert "the reward went from 0.255 to 0.691 in 12 steps; 0 % of the episodes failed" in found.sentence
    assert "policy/max_logprob_diff 2.9e-06" in found.sentence


def test_a_run_that_serves_users_is_told_nothing_of_agents_tasks_and_scorers(tmp_path):
    idle = {"time/wait_s": 1.6, "time/engine_idle_s": 1.5, "batch/equal_groups": 1.0}
    told = {}
    for name, overrides in (("tasks", ()), ("live", episode_cases.LIVE)):
        run = RecordedRun(tmp_path / name, *overrides).steps(idle, rises=False)
        run.ledger(episode_cases.sessions(open_=4, settled=16))
        told[name] = {finding.rule for finding in findings(run.evidence())}
    assert told["tasks"] >= {"idle_learner", "constant_scores"} and not told["live"] & OF_TASKS


def test_a_reward_that_no_rule_explains_is_told_so(tmp_path):
    (found,) = findings(RecordedRun(tmp_path).steps(rises=False).evidence())
    assert (found.rule, found.severity) == ("unexplained", Severity.HARMS)
    assert "0.400 in the first 3, 0.400 in the last 5" in found.sentence and "run.steps=24" in found.remedy


@pytest.mark.parametrize(
    "held", [{"time/save_s": 1.0}, {"time/wait_s": 1.5}, {"policy/clipfrac": 0.3}], ids=lambda held: next(iter(held))
)
def test_nothing_was_found_never_stands_beside_a_finding(tmp_path, held):
    found = [finding.rule for finding in findings(RecordedRun(tmp_path).steps(held).evidence())]
    assert len(found) == 1 and found != ["healthy"]
    few = RecordedRun(tmp_path / "few").steps(number=3).evidence()
    assert [finding.rule for finding in findings(few)] == ["few_steps"]


def test_no_remedy_asks_for_cards_that_the_machine_does_not_have(tmp_path):
    """Neither engines nor ranks on a CPU, nor where all cards are taken or the engine is another's."""
    taken = ("rollout.engines=2", "learner.ranks=2")
    for number, (overrides, cards) in enumerate([((), 0), (taken, 2), (("rollout.engine=http://127.0.0.1:80",), 8)]):
        waits = RecordedRun(tmp_path / f"waits{number}", *overrides).steps({"time/wait_s": 1.5}).machine(cards=cards)
        busy = {"time/engine_idle_s": 0.9, "time/wait_s": 0.2}
        idles = RecordedRun(tmp_path / f"idles{number}", *overrides).steps(busy).machine(cards=0)
        told = [finding.remedy for run in (waits, idles) for finding in findings(run.evidence())]
        assert len(told) == 2 and not re.search(r"rollout\.engines|learner\.ranks|GPU", " ".join(told)), told


def test_the_worst_comes_first(tmp_path):
    figures = {"policy/entropy": 0.001, "time/save_s": 1.0, "policy/clipfrac": 0.3, "policy/grad_norm": 0.0}
    found = findings(RecordedRun(tmp_path).steps(figures, rises=False).evidence())
    assert [finding.rule for finding in found] == ["no_gradient", "entropy_gone", "clipped_tokens", "long_saving"]
    assert sorted(found, key=lambda finding: ORDER.index(finding.severity)) == found
