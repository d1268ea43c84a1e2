"""Plays both tasksets of this folder with `VerifiersEnv` and the real `verifiers`; prints what happened as JSON.

Run by `tests/outside/test_env_contracts.py` in an environment where verifiers is installed: its requirements exclude
ours.
"""

import asyncio
import json
import sys
from importlib.metadata import version

from buffers.errors import EnvError
from env_adapters.adapter import WithDeadlines
from env_adapters.verifiers_env import VerifiersEnv, tasks_of


async def play(taskset: str, index: int, replies: list[str]) -> dict:
    """An episode: all that was said, whether it ended, its score or its failure."""
    adapter = WithDeadlines(VerifiersEnv(taskset=taskset), deadline_s=20.0)
    said, done = [], False
    try:
        said.append(await adapter.reset({"task_id": "t", "extra_info": {"index": index}}, seed=0))
        for reply in replies:
            step = await adapter.step(reply)
            said.append(step.messages)
            done = step.done
        return {"said": said, "done": done, "score": await adapter.score()}
    except EnvError as error:
        return {"said": said, "reason": error.reason, "error": str(error)}
    finally:
        await adapter.close()


async def main() -> None:
    both = await asyncio.gather(play("verifiers_sums", 0, ["3"]), play("verifiers_sums", 1, ["3"]))
    rows = tasks_of("verifiers_sums", options={}, env="", number=None)
    report = {
        "version": version("verifiers"),
        "rows": [[task.prompt, task.extra_info] for task in rows],
        "right": both[0],
        "wrong": both[1],
        "found": await play("verifiers_guess", 5, ["3", "9", "5"]),
        "cut": await play("verifiers_guess", 5, ["3"]),
        "stopped": await play("verifiers_guess", 9, ["1", "2", "3", "4"]),
        "crashed": await play("verifiers_guess", 5, ["crash"]),
        "missing": await play("verifiers_no_such_taskset", 0, []),
        "beyond": await play("verifiers_sums", 4, []),
    }
    json.dump(report, sys.stdout)


asyncio.run(main())
