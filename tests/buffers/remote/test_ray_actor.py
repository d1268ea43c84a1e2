"""What Ray says of an actor that is no more, in its own words, and what is made of that."""

from __future__ import annotations

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from buffers.errors import TaskError
from buffers.remote.actor import ActorDied, ActorRefused, CallFailed
from buffers.remote.ray_actor import in_short, meaning, refusal

MEMORY = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 4386) was 22.90GB used"
    " / 23.54GB limit (0.97)\nOOM kill reason: Memory usage 24B exceeded threshold of 23B\nConsidered workers: [\n"
    "Selected to kill: (Task: job ID=01, task name=T.train_step, pid=9982, actual memory used=1.10GB, worker ID=b58)\n]\n"
    "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n71\t12.50\tpython somebody_elses.py --all\n9982\t1.10\tray::Trainer.train_step\n"
    "12\t0.90\tVLLM::EngineCore\n13\t0.10\tbash\n"
    "Refer to the documentation on how to address the out of memory issue.\n" + "Consider more.\n" * 40
)
IN_ONE_LINE = (
    "Ray's memory monitor ended it, as 22.90 of the machine's 23.54 GB were taken: 1.10 GB by itself; most by 12.50 GB python "
    "somebody_elses.py --all (71), 1.10 GB ray::Trainer.train_step (9982), 0.90 GB VLLM::EngineCore (12)"
)
RAISED = (
    "The actor died because of an error raised in its creation task, \x1b[36mray::T.__init__()\x1b[39m (pid=1, repr=<T>)\n"
    '           ^^^^^^^\n  File "/x/t.py", line 8, in __init__\n    raise {call}\n          ^^^^\n'
)


def not_built(raised: str) -> RayActorError:
    return RayActorError(error_msg=RAISED.format(call=raised) + raised, actor_init_failed=True)


@pytest.mark.parametrize("error", [OutOfMemoryError(MEMORY), RayActorError(error_msg=f"The actor died.\n{MEMORY}")])
def test_an_end_by_the_memory_monitor_is_a_death_that_one_line_tells(error: Exception) -> None:
    assert isinstance(meaning(error), ActorDied) and str(meaning(error)) == IN_ONE_LINE


@pytest.mark.parametrize(
    ("raised", "sentence"),
    [
        ("buffers.errors.TaskError: model.path: a thing;\n  name another", "model.path: a thing;\n  name another"),
        ("learner.model.load.NoModel: it has no layers", "it has no layers"),
        ("ValueError: Unrecognized configuration class", "ValueError: Unrecognized configuration class"),
        ("RuntimeError: the address is in use", None),
        ("torch.OutOfMemoryError: CUDA out of memory", None),
    ],
)  # fmt: skip
def test_what_a_constructor_refuses_is_no_death(raised: str, sentence: str | None) -> None:
    error = not_built(raised)
    meant = meaning(error)
    assert isinstance(meant, ActorDied if sentence is None else ActorRefused)
    assert refusal(error) == sentence and str(meant) == (sentence or in_short(error))
    assert in_short(error) == " ".join(raised.split())


def test_a_killed_process_is_a_death_and_an_error_of_a_call_is_none() -> None:
    assert isinstance(meaning(RayActorError(error_msg="The actor died unexpectedly.\n\tpid: 3")), ActorDied)
    raised = RayTaskError("train_step", "...", ValueError("no rows"))
    assert isinstance(meaning(raised), CallFailed) and str(meaning(raised)) == "ValueError: no rows"
    assert meaning(RayTaskError("open", "...", ours := TaskError("a row"))) is ours
