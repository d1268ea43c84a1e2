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
    found = [said(f"t{number}", score=number / 10) for number in range(10)] + [said("none", score=None)]
    shown = [(name, each.score) for name, each in samples(found, number=3)]
    assert shown[0] == ("best", 0.9) and shown[-1] == ("worst", 0.0) and shown[1][0] == "drawn"
    assert samples([], number=3) == [] and len(samples(found[:1], number=3)) == 1
    assert len(samples([said("same", score=1.0, episode=str(number)) for number in range(4)], number=3)) == 1


def test_first_and_last_answers_of_the_tasks_that_changed_most() -> None:
    found = [said("kept", score=1.0, text="a"), said("learned", score=0.0, text="b"), said("once", score=1.0)]
    found += [said("kept", score=1.0, text="c"), said("learned", score=1.0, text="d")]
    (first, last), other = first_and_last(found, number=2)
    assert (first.answer, last.answer, other[1].answer) == ("b", "d", "c")


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
