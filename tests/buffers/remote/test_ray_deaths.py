"""What Ray says of an actor that is no more, in its own words, and what is made of that."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from agents.workers.manager import AgentLoopManager, _Worker
from buffers.errors import AgentError
from buffers.records import Task
from buffers.remote.ray_deaths import died, in_short, refusal

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
    assert died(error) and refusal(error) is None
    assert in_short(error) == IN_ONE_LINE


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
    assert refusal(error) == sentence and died(error) == (sentence is None)
    assert in_short(error) == " ".join(raised.split())


def test_a_killed_process_is_a_death_and_an_error_of_a_call_is_none() -> None:
    assert died(RayActorError(error_msg="The actor died unexpectedly.\n\tpid: 3"))
    assert not died(ValueError("x")) and refusal(ValueError("x")) is None and not died(None)


async def test_a_worker_of_loops_that_the_memory_monitor_ended_is_started_again() -> None:
    """Its episode failed with that line, and is tried again."""

    async def ended(*_: Any, **__: Any) -> None:
        raise OutOfMemoryError(MEMORY)

    async def ready() -> None: ...

    def actor() -> Any:
        return SimpleNamespace(run_agent_loop=SimpleNamespace(remote=ended), ready=SimpleNamespace(remote=ready))

    manager = AgentLoopManager([], num_workers=1)
    manager._make_actor = actor  # type: ignore[assignment]
    manager._workers = [worker] = [_Worker(first := actor())]
    with pytest.raises(AgentError, match="died and is started again: Ray's memory monitor ended it") as failed:
        await manager.play(Task(task_id="t", prompt=[], agent_name="loop"), api_key="k", seed=0)
    assert "\n" not in str(failed.value) and worker.actor is not first
    assert worker.starting is not None
    await asyncio.wait_for(worker.starting, 10.0)
