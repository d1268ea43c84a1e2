"""Ranks and engines get the cards of the plan; in a cluster, of a real Ray that counts 8 GPUs where there are none."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from configs.fork_server import ending_with_us
from configs.load import load_config
from configs.schema import LearnerConfig
from learner.placement.plan import visible
from learner.placement.run_nodes import RunNodes
from learner.training.ranks import LearnerRanks
from tests.learner.placement.recording_rank import RecordingRank
from tests.support.remote.remote_parts import make_users_token

pytestmark = pytest.mark.seconds

LISTED = "".join(f"{number}, GPU-{number}, 81559\n" for number in range(10))


async def placed(nodes: RunNodes) -> list[dict[str, Any]]:
    """What each of the three ranks says of its place."""
    ranks = LearnerRanks(
        LearnerConfig(ranks=3), model_path="", dtype="float32", temperature=1.0, seed=0, keep_versions=1,
        places=nodes.rank_places, trainer=RecordingRank,
    )  # fmt: skip
    await ranks.start()
    try:
        return await ranks._all("where")
    finally:
        await ranks.close()


CONFIG = ["learner.ranks=3", "rollout.tensor_parallel=4"]
PLACES = [(0, "cuda:0", "2"), (1, "cuda:0", "3"), (2, "cuda:0", "4")]


@pytest.mark.slow
async def test_each_rank_sees_its_own_card() -> None:
    node = visible(LISTED, "2,3,4,5,6,7,8,9")
    nodes = RunNodes(load_config(overrides=CONFIG), nodes=[node])
    found = await placed(nodes)
    assert [(one["rank"], one["device"], one["sees"]) for one in found] == PLACES
    assert [node.devices[card] for card in nodes.placement.engines[0].cards] == ["6", "7", "8", "9"]


@pytest.mark.slow
async def test_in_a_cluster_ray_counts_each_ranks_card() -> None:
    make_users_token()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 8, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        own = replace(visible(LISTED, "2,3,4,5,6,7,8,9"), id=ray.get_runtime_context().get_node_id())
        found = await placed(RunNodes(load_config(overrides=CONFIG), nodes=[own], look=lambda: [own]))
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert [(one["rank"], one["device"], one["sees"]) for one in found] == PLACES
    assert len({card for one in found for card in one["counted"]}) == 3


@pytest.mark.slow
async def test_ranks_on_a_cpu_take_no_card() -> None:
    ranks = LearnerRanks(
        LearnerConfig(), model_path="", dtype="float32", temperature=1.0, seed=0, keep_versions=1, trainer=RecordingRank,
    )  # fmt: skip
    await ranks.start()
    try:
        (found,) = await ranks._all("where")
    finally:
        await ranks.close()
    assert found["device"] == "cpu" and found["threads"] == "1"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_engines_process_sees_its_cards_and_ours_goes_on_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    for name, cards in (("two", {"CUDA_VISIBLE_DEVICES": "2,3"}), ("all", {})):
        context = ending_with_us(multiprocessing.get_context(method), [], environment=cards)
        # A function of Python's own: a new interpreter would import this module, for seconds.
        process = context.Process(target=os.system, args=(f"printf $CUDA_VISIBLE_DEVICES > {tmp_path / name}",))
        process.start()
        process.join()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert ((tmp_path / "two").read_text(), (tmp_path / "all").read_text()) == ("2,3", "0,1,2,3")
