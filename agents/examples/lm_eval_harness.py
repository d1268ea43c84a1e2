"""lm-eval as an agent: a lease is a document, its request is sent with the lease's key, and its metric goes back to that episode.

Start it beside a run that waits for agents (no `agents.command`, no `data.scorer`), and put your own prompt and metric into `TASK`:

    set -a; . runs/mine/agent.env; . runs/mine/scorer.env; python lm_eval_harness.py

It needs lm-eval and openai, and nothing of the trainer's.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets
import httpx
import lm_eval
import openai
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask

AT_ONCE = int(os.environ.get("CONCURRENCY", "16"))
"""An episode's deadline begins with its lease: take no more than are played at once."""
TASK: dict[str, Any] = {
    "task": "leased",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 64},
    "metric_list": [{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}],
}
METRIC = "exact_match"
worker = openai.OpenAI()
judge = httpx.Client(
    base_url=os.environ["SERVER_URL"], headers={"Authorization": f"Bearer {os.environ['SCORER_KEY']}"}, timeout=60.0
)


class Leased(LM):  # type: ignore[misc]
    """Sends each document's request with the key of its own episode."""

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(self._answer, requests))

    def _answer(self, request: Instance) -> str:
        text, options = request.args
        client = worker.with_options(api_key=request.doc["api_key"], base_url=f"{request.doc['base_url']}/v1")
        reply = client.chat.completions.create(
            model=os.environ["MODEL"],
            messages=[{"role": "user", "content": text}],
            max_tokens=options["max_gen_toks"],
            stop=options["until"],
        )
        return reply.choices[0].message.content or ""

    def loglikelihood(self, requests: list[Instance]) -> Any:
        raise NotImplementedError("answers are trained, likelihoods of given texts are not")

    loglikelihood_rolling = loglikelihood


def document() -> Any:
    """The next lease as a document, with the truth, for which the scorer's key is needed; None: there is none yet. Raises EOFError
    when there are no more."""
    try:
        lease = worker.get(f"{os.environ['TASKS_URL']}?wait=5", cast_to=httpx.Response)
    except openai.APIStatusError as error:
        if error.status_code == 410:
            raise EOFError from None
        raise
    if not lease.content:
        return None
    leased = lease.json()
    truth = judge.get("/episode", headers={"X-Episode-Key": leased["api_key"]}).raise_for_status().json()["task"]
    return {
        **{name: leased[name] for name in ("episode_id", "api_key", "base_url")},
        "question": leased["task"]["prompt"][-1]["content"],
        "answer": str(truth["ground_truth"]),
    }


def main() -> None:
    ended = False
    while not ended:
        documents: list[Any] = []
        try:
            while len(documents) < AT_ONCE and (one := document()):
                documents.append(one)
        except EOFError:
            ended = True
        if not documents:
            continue
        rows = datasets.Dataset.from_list(documents)
        task = ConfigurableTask(config={**TASK, "custom_dataset": lambda rows=rows: {"test": rows}})
        results = lm_eval.simple_evaluate(model=Leased(), tasks=[task], bootstrap_iters=0, log_samples=True)
        for sample in results["samples"][TASK["task"]]:
            body = {"episode_id": sample["doc"]["episode_id"], "score": float(sample[METRIC])}
            judge.post("/scores", json=body).raise_for_status()


if __name__ == "__main__":
    main()
