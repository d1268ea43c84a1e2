"""Rules of buffers/ledger/answers.py: what a person reads of an episode is what was asked and what was said last."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from buffers.ledger.answers import LONGEST, Answer, answers, first_and_last, in_a_line, samples
from buffers.ledger.ledger import Ledger
from buffers.ledger.reader import LedgerReader
from buffers.records import Task
from tests.support.buffer_parts import make_round, open_running


def said(task: str, *, score: float | None, episode: str = "", text: str = "") -> Answer:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{task}?"}]
    return Answer(
        episode_id=episode or task, task=Task(task_id=task, prompt=prompt), answer=text, score=score, reason=None,
        group_state="validated", version=0,
    )  # fmt: skip


def test_ended_episodes_come_with_their_last_words(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        (scored,) = open_running(ledger, task=1)
        ledger.put_round(make_round(scored.episode_id, sampled=(5, 6)))
        ledger.put_round(make_round(scored.episode_id, index=1, tail=(4,), sampled=(7, 8)))
        ledger.notify_score(scored.episode_id, 0.5).result()
        (silent,) = open_running(ledger, task=2)
        ledger.fail_episode(silent.episode_id, "deadline: it took too long", max_attempts=1).result()
        open_running(ledger, task=3)  # under way
        with closing(LedgerReader(path)) as reader, reader.read() as db:
            found = list(answers(db, decode=lambda ids: " ".join(map(str, ids))))
            none = list(answers(db, decode=str, tasks_of="val/"))
    assert [(each.answer, each.score) for each in found] == [("7 8", 0.5), ("", None)] and none == []
    assert found[1].reason == "deadline: it took too long"
    assert found[0].record()["question"] == found[0].question != ""


def test_the_best_the_worst_and_some_between_are_shown_each_of_another_task() -> None:
    scored = [(number / 10, f"t{number}", f"e{number}") for number in range(10)]
    shown = samples(scored, number=3)
    assert shown[0] == ("best", "e9") and shown[-1] == ("worst", "e0") and shown[1][0] == "drawn"
    assert samples([], number=3) == [] and samples(scored[:1], number=3) == [("best", "e0")]
    assert len(samples([(1.0, "same", str(number)) for number in range(4)], number=3)) == 1


def test_first_and_last_answers_of_the_tasks_that_changed_most(tmp_path: Path) -> None:
    """Of a task that was played in one group only there is no answer before and after, however many members that has."""
    path = tmp_path / "ledger.sqlite"
    played = [("val/kept", 1.0), ("val/learned", 0.0), ("val/once", 0.5), ("val/kept", 0.9), ("val/learned", 1.0)]
    with Ledger(path) as ledger:
        for number, (task_id, score) in enumerate(played):
            prompt = [{"role": "user", "content": task_id}]
            (group,) = ledger.open_validation(
                [Task(task_id=task_id, prompt=prompt)], group_size=2, greedy=False, min_size=2
            ).result()
            for member in range(2):
                episode_id = f"{group}-{member}-0"
                ledger.start_episode(episode_id, version=0).result()
                ledger.put_round(make_round(episode_id, sampled=(number,)))
                ledger.notify_score(episode_id, score).result()
        with closing(LedgerReader(path)) as reader, reader.read() as db:
            found = first_and_last(db, decode=lambda ids: str(ids[0]), tasks_of="val/", number=5)
            none = first_and_last(db, decode=str, tasks_of="other/", number=5)
    assert [(one.question, one.answer, other.answer) for one, other in found] == [
        ("val/learned", "1", "4"),
        ("val/kept", "0", "3"),
    ]
    assert none == []


def test_a_question_may_have_parts_and_a_long_text_keeps_its_end() -> None:
    parts = [
        {"type": "text", "text": "What is"},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "this?"},
    ]
    asked = said("t", score=0.0)
    asked = Answer(
        **{name: getattr(asked, name) for name in Answer.__slots__ if name != "task"},
        task=Task(task_id="t", prompt=[{"role": "user", "content": parts}]),
    )
    assert asked.question.split() == ["What", "is", "this?"]
    line = in_a_line("first " + "x\n" * 500 + "last")
    assert line.startswith("first") and line.endswith("last") and "\n" not in line and len(line) <= LONGEST + 5
