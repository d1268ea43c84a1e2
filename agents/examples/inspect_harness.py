"""inspect-ai as an agent: a lease is a task of one sample with a model of its own, and its score goes back to that episode.

Start it beside a run that waits for agents (no `agents.command`, no `data.scorer`), and put your own solver and scorer into `Task`:

    set -a; . runs/mine/agent.env; . runs/mine/scorer.env; python inspect_harness.py

It needs inspect-ai and openai, and nothing of the trainer's.
"""

import os
from typing import Any

import httpx
import inspect_ai
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, get_model
from inspect_ai.scorer import includes, value_to_float
from inspect_ai.solver import generate

AT_ONCE = int(os.environ.get("CONCURRENCY", "16"))
"""An episode's deadline begins with its lease: take no more than are played at once."""
ROLES = {"system": ChatMessageSystem, "user": ChatMessageUser}
worker = httpx.Client(headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}, timeout=60.0)
judge = httpx.Client(
    base_url=os.environ["SERVER_URL"], headers={"Authorization": f"Bearer {os.environ['SCORER_KEY']}"}, timeout=60.0
)


def lease(*, wait_s: float) -> Any:
    """The next episode; None: there is none yet. Raises EOFError when there are no more."""
    answer = worker.get(os.environ["TASKS_URL"], params={"wait": wait_s})
    if answer.status_code == 410:
        raise EOFError
    return answer.raise_for_status().json() if answer.content else None


def task_of(leased: Any) -> inspect_ai.Task:
    """Your part: any solver (agents and tools too) and any scorer. The truth is for those who have the scorer's key."""
    truth = judge.get("/episode", headers={"X-Episode-Key": leased["api_key"]}).raise_for_status().json()["task"]
    messages = [ROLES[each["role"]](content=each["content"]) for each in leased["task"]["prompt"]]
    return inspect_ai.Task(
        dataset=[Sample(id=leased["episode_id"], input=messages, target=str(truth["ground_truth"]))],
        solver=generate(),
        scorer=includes(),
        model=get_model(
            f"openai/{os.environ['MODEL']}",
            base_url=f"{leased['base_url']}/v1",
            api_key=leased["api_key"],
            config=GenerateConfig(max_tokens=64),
            responses_api=False,
        ),
    )


def report(log: EvalLog) -> None:
    """The score of the log's one sample, or why there is none."""
    sample = (log.samples or [None])[0]
    if sample is None or sample.error is not None or not sample.scores:
        print(f"a sample failed: {(sample and sample.error) or log.error}")
        body: dict[str, Any] = {"failed": "inspect: the sample failed"}
    else:
        body = {"score": value_to_float()(next(iter(sample.scores.values())).value)}
    judge.post("/scores", json={"episode_id": log.eval.dataset.sample_ids[0], **body}).raise_for_status()


def main() -> None:
    ended = False
    while not ended:
        leases: list[Any] = []
        try:
            while len(leases) < AT_ONCE and (leased := lease(wait_s=0.0 if leases else 30.0)):
                leases.append(leased)
        except EOFError:
            ended = True
        if leases:
            for log in inspect_ai.eval(
                [task_of(each) for each in leases], max_tasks=AT_ONCE, display="none", fail_on_error=False
            ):
                report(log)


if __name__ == "__main__":
    main()
