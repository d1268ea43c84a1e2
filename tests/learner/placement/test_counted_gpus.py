"""Ranks and engines get the cards of the plan: with a real Ray that counts 8 GPUs where there are none."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from configs.schema import LearnerConfig
from learner.placement.plan import visible
from learner.placement.run_nodes import RunNodes
from learner.training.ranks import LearnerRanks
from mocked_server.vllm.process.fork_server import ending_with_us, engines_see
from tests.learner.placement.recording_rank import RecordingRank
from tests.support.remote.own_ray import own_ray

pytestmark = pytest.mark.seconds

LISTED = "".join(f"{number}, GPU-{number}, 81559\n" for number in range(10))


@pytest.fixture(scope="module")
def _counted() -> Iterator[None]:
    with own_ray(num_cpus=2, num_gpus=8):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_counted")
async def test_each_rank_sees_its_own_card_and_ray_counts_it() -> None:
    node = visible(LISTED, "2,3,4,5,6,7,8,9")
    config = load_config(overrides=["learner.ranks=3", "rollout.tensor_parallel=4"])
    nodes = RunNodes(config, nodes=[node])
    ranks = LearnerRanks(
        LearnerConfig(ranks=3), model_path="", dtype="float32", temperature=1.0, seed=0, keep_versions=1,
        places=nodes.rank_places, trainer=RecordingRank,
    )  # fmt: skip
    await ranks.start()
    try:
        found: list[dict[str, Any]] = await ranks._all("where")
    finally:
        await ranks.close()
    assert [(one["rank"], one["device"], one["sees"]) for one in found] == [
        (0, "cuda:0", "2"),
        (1, "cuda:0", "3"),
        (2, "cuda:0", "4"),
    ]
    assert len({card for one in found for card in one["counted"]}) == 3
    assert [node.devices[card] for card in nodes.placement.engines[0].cards] == ["6", "7", "8", "9"]


@pytest.mark.slow
@pytest.mark.usefixtures("_counted")
async def test_ranks_on_a_cpu_take_no_card() -> None:
    ranks = LearnerRanks(
        LearnerConfig(), model_path="", dtype="float32", temperature=1.0, seed=0, keep_versions=1, trainer=RecordingRank,
    )  # fmt: skip
    await ranks.start()
    try:
        (found,) = await ranks._all("where")
    finally:
        await ranks.close()
    assert (found["device"], found["counted"]) == ("cpu", [])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_engines_process_sees_its_cards_and_ours_goes_on_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    context = ending_with_us(multiprocessing.get_context(method), [])
    for name, devices in (("two", ("2", "3")), ("all", ())):
        with engines_see(devices):
            # A function of Python's own: a new interpreter would import this module, for seconds.
            process = context.Process(target=os.system, args=(f"printf $CUDA_VISIBLE_DEVICES > {tmp_path / name}",))
            process.start()
        process.join()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert ((tmp_path / "two").read_text(), (tmp_path / "all").read_text()) == ("2,3", "0,1,2,3")
