"""Every generator of Reasoning Gym: three tasks, the score of their own answers, and of an answer that is none; printed as JSON."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from reasoning_gym.factory import DATASETS

from buffers.tasks.reasoning_gym_tasks import SCHEME, score, task_rows

sys.stdout = sys.stderr  # some scorers print dots
report = {"refused": {}, "own": {}, "none": {}, "prompts": 0}
for name in sorted(DATASETS):
    try:
        rows = list(task_rows(f"{SCHEME}{name}?size=3"))
    except ValueError as error:
        report["refused"][name] = str(error)
        continue
    report["prompts"] += len(rows)
    own = [
        score(row["data_source"], **row["extra_info"], answer=f"So <answer>{row['ground_truth']}</answer>")
        for row in rows
    ]
    report["own"][name] = min(own)
    said = []
    for row in rows:
        try:
            said.append(score(row["data_source"], **row["extra_info"], answer="no idea"))
        except ValueError:  # int("no idea")
            said.append(0.0)
    report["none"][name] = max(said)
first = [next(task_rows(f"{SCHEME}chain_sum?size=1&level={level}"))["prompt"][0]["content"] for level in (0, 3)]
report["levels"] = [len(text) for text in first]
report["system"] = next(task_rows(f"{SCHEME}chain_sum?size=1&system=direct"))["prompt"][0]["role"]
sums = [row["prompt"][0]["content"] for row in task_rows(f'{SCHEME}basic_arithmetic?size=20&operators=["+"]')]
report["plus"] = all("+" in text and " * " not in text for text in sums)
report["again"] = list(task_rows(f"{SCHEME}chain_sum?size=4&seed=7")) == list(
    task_rows(f"{SCHEME}chain_sum?size=4&seed=7")
)
told = []
for address in (
    "chain_summ",
    "chain_sum?terms=2",
    "chain_sum?min_digits=9&max_digits=2",
    "chain_sum?level=-1",
    "chain_sum?system=x",
):
    try:
        next(task_rows(SCHEME + address))
    except ValueError as error:
        told.append(str(error))
report["told"] = told
print(json.dumps(report), file=sys.__stdout__)
