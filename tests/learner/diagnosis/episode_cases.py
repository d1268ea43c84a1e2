"""For each rule about episodes and scores a run in which it fires, and one just beside it in which it must not."""

from __future__ import annotations

from pathlib import Path

from buffers.ledger.ledger import Ledger
from buffers.ledger.scores import CONSTRAINED, NO_ROUNDS
from buffers.records import ScoreDetail
from learner.diagnosis.evidence import Severity
from tests.learner.diagnosis.case import Case
from tests.learner.diagnosis.recorded_run import RecordedRun, group, groups
from tests.support.buffer_parts import make_round, make_task

GOOD = [0.0, 1.0, 0.0, 1.0]
NO_SCORE = "agent exited with code 0 before a score was reported"
DROPS = "data.reward_manager=dapo"
CRASHED = "agent exited with code 1 before a score was reported"


def recorded(folder: Path, *overrides: str, **steps: object) -> RecordedRun:
    return RecordedRun(folder, *overrides).steps(**steps)


def failing(reason: str, *, number: int, good: int = 5):
    """Groups of 4 good episodes, and single ones that fail."""
    return groups(*[GOOD] * good, *[[reason]] * number)


def late(number: int):
    def fill(ledger: Ledger) -> None:
        groups(*[GOOD] * 4)(ledger)
        for instance in range(number):
            ended = group(ledger, ["deadline"], task=9, instance=instance)
            ledger.notify_score(f"{ended}-0-0", 1.0).exception()

    return fill


def judged(left_out: int, *, members: int = 20):
    """A group whose second judge leaves some members out."""

    def fill(ledger: Ledger) -> None:
        ledger.put_tasks([make_task(0)])
        for number, episode in enumerate(ledger.open_group("t:0", instance=0, group_size=members).result()):
            ledger.start_episode(episode.episode_id, version=0)
            ledger.put_round(make_round(episode.episode_id))
            ledger.notify_score(episode.episode_id, number % 2, detail=ScoreDetail(judge="strict", final=False))
            if number >= left_out:
                ledger.notify_score(episode.episode_id, 1.0, detail=ScoreDetail(judge="kind"))
            else:
                ledger.settle_scores(episode.episode_id)
        ledger.counts()

    return fill


def hinted(without: int) -> list[dict[str, float]]:
    """12 steps, of whose last 10 so many have no row with a hint."""
    return [{"policy/hinted_share": 0.0 if number < 2 + without else 0.1, "reward/mean": 0.4} for number in range(12)]


def answers(*, cut: int, whole: int, tokens: int = 4, scores: tuple[float, float] = (0.0, 1.0)):
    """Groups whose answers were cut at `tokens`, and others, with these scores; each group has a member that scores otherwise."""

    def fill(ledger: Ledger) -> None:
        for number in range(cut):
            group(ledger, [scores[0]] * 3, task=number, tokens=tokens, finish_reason="length")
        for number in range(whole):
            group(ledger, [scores[1]] * 3, task=cut + number)

    return fill


def lost(number: int):
    """Groups with three scored members, whose fourth fails for good; and others."""
    return groups(*[[0.0, 1.0, 0.0, "agent exited with code 7"]] * number, *[GOOD] * (16 - number))


def tasks(*, first: int, of: int = 8, tokens: int = 3):
    """A group of each task, and `first` of the first one, whose answers have this length."""

    def fill(ledger: Ledger) -> None:
        for instance in range(first):
            group(ledger, GOOD, task=0, instance=instance, tokens=tokens)
        for number in range(1, of):
            group(ledger, GOOD, task=number)

    return fill


LIVE = (
    "serve.enabled=true", "buffer.group_size=1", "learner.advantage=reinforce_plus_plus", "learner.critic=none", "data.tasks=",
    "agents.command=", "env.command=",
)  # fmt: skip


def sessions(*, open_: int, settled: int, never_trained: int = 0):
    """Fills a ledger with sessions of a user, of which so many have feedback; beside them side calls and watched ones."""

    def fill(ledger) -> None:
        for number in range(open_ + settled):
            name = f"s{number}"
            ledger.open_session(episode_id=name, user="ann", name=name, is_side=False, version=0).result()
            ledger.put_round(make_round(name)).result()
            if number < settled:
                ledger.give_feedback(user="ann", session=name, score=1.0).result()
                ledger.settle_session(episode_id=name, words_count=False).result()
        for number in range(never_trained):
            kind = {"is_side": number % 2 == 0, "is_watched": number % 2 == 1}
            ledger.open_session(episode_id=f"n{number}", user="ann", name=f"n{number}", version=0, **kind).result()

    return fill


CASES = [
    Case(
        rule="no_model_calls",
        fires=lambda folder: recorded(folder).ledger(failing(NO_ROUNDS, number=20)),
        quiet=lambda folder: recorded(folder).ledger(failing(NO_ROUNDS, number=1)),
        severity=Severity.HARMS, figure=0.5, says=("20 episodes (50 % of the attempts)", "OPENAI_BASE_URL"),
    ),
    Case(
        rule="no_model_calls",
        fires=lambda folder: RecordedRun(folder).ledger(failing(NO_ROUNDS, number=3, good=0)),
        quiet=lambda folder: RecordedRun(folder).ledger(failing("deadline", number=3, good=0)),
        severity=Severity.STOPS, figure=1.0, says=("understudy check",),
    ),
    Case(
        rule="nothing_scored",
        fires=lambda folder: recorded(folder).ledger(failing("scorer: no number in 'x'", number=5)),
        quiet=lambda folder: recorded(folder).ledger(failing("scorer: no number in 'x'", number=1)),
        severity=Severity.SLOWS, figure=0.2, says=("no number in 'x'", "data.scorer gave no score", "and 0 for one"),
    ),
    Case(
        rule="nothing_scored",
        fires=lambda folder: RecordedRun(folder).ledger(failing(NO_SCORE, number=2, good=0)),
        quiet=lambda folder: RecordedRun(folder).ledger(failing(CRASHED, number=2, good=0)),
        severity=Severity.STOPS, figure=1.0, says=("data.scorer=exact_match", "POST /scores"),
    ),
    Case(
        rule="failing_episodes",
        fires=lambda folder: recorded(folder).ledger(failing("deadline", number=20)),
        quiet=lambda folder: recorded(folder).ledger(failing("deadline", number=1)),
        severity=Severity.HARMS, figure=0.5, says=("longer than agents.deadline_s", "agents.deadline_s=240"),
    ),
    Case(
        rule="failing_episodes",  # its after-effects are no failures of their own
        fires=lambda folder: recorded(folder).ledger(groups(*[GOOD] * 4, *[["silent agent", 1.0]] * 2)),
        quiet=lambda folder: recorded(folder).ledger(groups(*[GOOD] * 4, *[["restart", 1.0]] * 2)),
        severity=Severity.SLOWS, figure=2 / 18, says=("agents.silence_s=40",),
    ),
    Case(
        rule="lost_groups",
        fires=lambda folder: recorded(folder).ledger(lost(4)),
        quiet=lambda folder: recorded(folder).ledger(lost(1)),
        severity=Severity.SLOWS, figure=0.2, says=("12 scored episodes (20 %)", "agents.fewest_members=3"),
    ),
    Case(
        rule="late_scores",
        fires=lambda folder: recorded(folder).ledger(late(2)),
        quiet=lambda folder: recorded(folder).ledger(groups(*[GOOD] * 4)),
        severity=Severity.SLOWS, figure=2 / 18, says=("2 scores (11 %", "agents.deadline_s=240"),
    ),
    Case(
        rule="unsaid_sessions",
        fires=lambda folder: recorded(folder, *LIVE).ledger(sessions(open_=16, settled=4)),
        quiet=lambda folder: recorded(folder, *LIVE).ledger(sessions(open_=12, settled=8, never_trained=80)),
        severity=Severity.SLOWS, figure=0.8, says=("of 80 % of 20 sessions nothing was said", "serve.judge.model=policy"),
    ),
    Case(
        rule="missing_judges",
        fires=lambda folder: recorded(folder).ledger(judged(8)),
        quiet=lambda folder: recorded(folder).ledger(judged(0)),
        severity=Severity.HARMS, figure=0.4, says=("the judge 'kind' gave no score to 40 %",),
    ),
    Case(
        rule="constrained_tokens",
        fires=lambda folder: recorded(folder).steps({"generation/constrained_share": 0.6}),
        quiet=lambda folder: recorded(folder).steps({"generation/constrained_share": 0.09}),
        severity=Severity.HARMS, figure=0.6, says=("60 % of the sampled tokens", "tool_choice"),
    ),
    Case(
        rule="constrained_tokens",
        fires=lambda folder: RecordedRun(folder).ledger(failing(CONSTRAINED, number=4, good=0)),
        quiet=lambda folder: RecordedRun(folder).ledger(failing(NO_ROUNDS, number=4, good=0)),
        severity=Severity.STOPS, figure=1.0, says=("response_format",),
    ),
    Case(
        rule="constant_scores",
        fires=lambda folder: recorded(folder, rises=False).ledger(groups(*[[0.5] * 4] * 4)),
        quiet=lambda folder: recorded(folder, rises=False).ledger(groups(*[[0.5] * 4] * 3, [0.5, 0.5, 0.5, 0.25])),
        severity=Severity.STOPS, figure=0.5, says=("all of the 16 newest scored episodes have the score 0.5", "data.scorer"),
    ),
    Case(
        rule="constant_scores",  # 15 are too few, and the best score of a task that was learned is no constant
        fires=lambda folder: recorded(folder, "run.reward_optimum=2").steps({"reward/mean": 1.0}).ledger(groups(*[[1.0] * 4] * 4)),
        quiet=lambda folder: recorded(folder, "run.reward_optimum=1").steps({"reward/mean": 1.0}).ledger(groups(*[[1.0] * 4] * 4)),
        severity=Severity.STOPS, figure=1.0, says=(),
    ),
    Case(
        rule="constant_scores",  # words alone teach, and are no score
        fires=lambda folder: recorded(folder, rises=False).ledger(groups(*[[0.0] * 4] * 4)),
        quiet=lambda folder: recorded(folder, "learner.recipe=sdpo", rises=False).ledger(groups(*[[0.0] * 4] * 4)),
        severity=Severity.STOPS, figure=0.0, says=(),
    ),
    Case(
        rule="cut_answers",
        fires=lambda folder: recorded(folder, "rollout.max_tokens=4").steps({"policy/truncated_share": 0.6})
        .ledger(answers(cut=4, whole=2)),
        quiet=lambda folder: recorded(folder, "rollout.max_tokens=4").steps({"policy/truncated_share": 0.6})
        .ledger(answers(cut=4, whole=2, scores=(1.0, 0.5))),
        severity=Severity.HARMS, figure=0.6, says=("cut at 4 tokens; such episodes score 0, others 1", "rollout.max_tokens=8"),
    ),
    Case(
        rule="cut_answers",  # all are cut: whether that harms is seen from the reward
        fires=lambda folder: recorded(folder, "rollout.max_tokens=40").steps({"policy/truncated_share": 0.2}, rises=False)
        .ledger(answers(cut=4, whole=0)),
        quiet=lambda folder: recorded(folder, "rollout.max_tokens=40").steps({"policy/truncated_share": 0.2})
        .ledger(answers(cut=4, whole=0)),
        severity=Severity.SLOWS, figure=0.2, says=("the agent asks for fewer tokens than rollout.max_tokens (40)",),
    ),
    Case(
        rule="aborted_answers",
        fires=lambda folder: recorded(folder).steps({"generation/aborted": 8.0}).ledger(groups(*[GOOD] * 4)),
        quiet=lambda folder: recorded(folder).steps({"generation/aborted": 1.0}).ledger(groups(*[GOOD] * 4)),
        severity=Severity.HARMS, figure=0.5, says=("8 generations", "agents.concurrency=48"),
    ),
    Case(
        rule="equal_groups",
        fires=lambda folder: recorded(folder, "learner.recipe=grpo").steps({"batch/equal_groups": 0.75}),
        quiet=lambda folder: recorded(folder, "learner.recipe=grpo").steps({"batch/equal_groups": 0.45}),
        severity=Severity.SLOWS, figure=0.75, says=("75 % of the groups", "buffer.group_size=8"),
    ),
    Case(
        rule="equal_groups",  # gae compares the whole batch
        fires=lambda folder: recorded(folder).steps({"batch/equal_groups": 1.0, "reward/std": 0.0}, rises=False),
        quiet=lambda folder: recorded(folder).steps({"batch/equal_groups": 1.0}, rises=False),
        severity=Severity.STOPS, figure=1.0, says=("in 100 % of the steps",),
    ),
    Case(
        rule="equal_groups",  # a task that is solved has no variance
        fires=lambda folder: recorded(folder, "learner.recipe=grpo").steps({"batch/equal_groups": 0.95, "reward/mean": 0.9}),
        quiet=lambda folder: recorded(folder, "learner.recipe=grpo").steps({"batch/equal_groups": 0.95, "reward/mean": 0.995}),
        severity=Severity.HARMS, figure=0.95, says=(),
    ),
    Case(
        rule="no_hints",
        fires=lambda folder: recorded(folder, "learner.recipe=sdpo").steps(*hinted(5)),
        quiet=lambda folder: recorded(folder, "learner.recipe=sdpo").steps(*hinted(4)),
        severity=Severity.SLOWS, figure=0.5,
        says=("in 5 of the last 10 steps no row had a hint", "extra_info.hint", "within the episode", "part marks"),
    ),
    Case(
        rule="no_hints",
        fires=lambda folder: recorded(folder, "learner.recipe=sdft").steps({"policy/hinted_share": 0.0}, rises=False),
        quiet=lambda folder: recorded(folder, "learner.recipe=sdft").steps({"policy/hinted_share": 0.0, "reward/mean": 0.995}),
        severity=Severity.STOPS, figure=1.0, says=("from which alone the policy learns",),
    ),
    Case(
        rule="dropped_groups",
        fires=lambda folder: recorded(folder, DROPS).ledger(groups(*[[0.0] * 4] * 3, GOOD), drop_zero_variance=True),
        quiet=lambda folder: recorded(folder, DROPS).ledger(groups([0.0] * 4, GOOD, GOOD), drop_zero_variance=True),
        severity=Severity.SLOWS, figure=0.75, says=("3 of 4 groups were generated and dropped", "data.reward_manager=naive"),
    ),
    Case(
        rule="one_task",
        fires=lambda folder: recorded(folder).ledger(tasks(first=10)),
        quiet=lambda folder: recorded(folder).ledger(tasks(first=6)),
        severity=Severity.SLOWS, figure=10 / 17, says=("one of 8 tasks, 't:0', makes 59 % of the trained tokens", "data.tasks"),
    ),
    Case(
        rule="one_task",  # one whose answers are long, and tokens are what is counted
        fires=lambda folder: recorded(folder).ledger(tasks(first=1, tokens=200)),
        quiet=lambda folder: recorded(folder, "learner.loss_agg=seq-mean-token-mean").ledger(tasks(first=1, tokens=200)),
        severity=Severity.HARMS, figure=200 / 221, says=("in 12 % of the groups", "learner.loss_agg=seq-mean-token-mean"),
    ),
]  # fmt: skip
