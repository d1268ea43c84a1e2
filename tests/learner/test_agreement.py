"""Rules of learner/agreement.py: what engine and learner do not compute alike ends the run, with both numbers and the place."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.families import make_family
from configs.load import load_config
from learner.agreement import ENOUGH, Agreement, Disagreement
from learner.session import run_agreeing
from learner.training.layout import CHUNK
from learner.training.ranks import RankFailed
from mocked_server.fleet.member import EngineLost, probe
from mocked_server.rollout import VLLMRollout
from mocked_server.vllm.engine import free_sampling
from tests.support.learner_parts import make_trainer
from tests.support.run_parts import Run, start

PROMPT = [5, 6, 7]
EXPERTS = "those that the engine used"
STATES = [np.full(4, float(layer), np.float32).tobytes() for layer in (1, 2, 3)]


class Ranks:
    """A learner whose log-probabilities are all -1."""

    def __init__(self, *, states: list[bytes] = STATES, replayed: float = -1.0, agreed: float = 1.0) -> None:
        self.asked: list[str] = []
        self._replayed = replayed, agreed
        self.states = states

    async def probe_prompt(self) -> list[int]:
        return PROMPT

    async def replayed(self, ids: list[int], *, last: int, experts: Any) -> tuple[list[float], float]:
        assert experts == EXPERTS
        logprob, agreed = self._replayed
        return [logprob] * last, agreed

    async def logprobs_of(self, ids: list[int], *, last: int, role: str = "") -> list[float]:
        assert ids[: len(PROMPT)] == PROMPT
        self.asked.append(role)
        return [-1.0] * last

    async def layer_states(self, ids: list[int]) -> list[bytes]:
        assert ids == PROMPT
        return self.states


class Engines:
    """`logprobs`: by engine, of each token that it samples."""

    def __init__(self, *, states: list[bytes] = STATES, experts: Any = None, **logprobs: float) -> None:
        self._states = states
        self._experts = experts
        self._logprobs = logprobs

    async def probe(
        self, prompt: list[int], *, params: int, role: str = ""
    ) -> dict[str, tuple[list[int], list[float], Any]]:
        tokens = params
        return {
            name: ([*prompt, *[1] * 2 * tokens], [value] * 2 * tokens, self._experts)
            for name, value in self._logprobs.items()
        }

    async def layer_states(self, name: str, prompt: list[int], *, role: str = "") -> list[bytes]:
        return self._states


def agreement(engines: Engines, *settings: str, **options: Any) -> Agreement:
    config = load_config(overrides=list(settings))
    return Agreement(config=config, engines=engines, sampling=lambda tokens, temperature: tokens, **options)


@pytest.mark.parametrize(
    ("replayed", "agreed", "agrees"), [(-1.41, 0.97, True), (-1.41, 0.74, False), (-1.2, 1.0, False)]
)
async def test_near_ties_of_routers_pass_and_other_routers_do_not(replayed: float, agreed: float, agrees: bool) -> None:
    ranks: Any = Ranks(replayed=replayed, agreed=agreed)
    compared = agreement(Engines(e0=-1.4, experts=EXPERTS), "model.dtype=bfloat16")
    if agrees:
        assert await compared.probe(ranks) == pytest.approx(0.01) and compared.has_begun
    else:
        with pytest.raises(Disagreement, match="over 48 tokens of a probe"):
            await compared.probe(ranks)


@pytest.mark.parametrize(
    ("apart", "settings", "has_gpu"),
    [
        (2e-5, (), False),
        (9e-3, (), True),
        (0.14, ("model.dtype=bfloat16",), False),
        (0.14, ("model.dtype=bfloat16",), True),
        (0.4, ("learner.max_mean_logprob_diff=0.5",), False),
    ],
)
async def test_what_the_number_format_explains_passes_and_twice_that_ends_the_run(
    apart: float, settings: tuple[str, ...], has_gpu: bool
) -> None:
    ranks: Any = Ranks()
    found = await agreement(Engines(e0=-1.0 - apart), *settings, has_gpu=has_gpu).probe(ranks)
    assert found == pytest.approx(apart, rel=1e-3)
    other = agreement(Engines(e0=-1.0, e1=-1.0 + 2 * apart), *settings, has_gpu=has_gpu)
    with pytest.raises(Disagreement, match=r"engine e1 -.*, learner -1\.0000; .*at most") as told:
        await other.probe(ranks)
    assert told.value.difference == pytest.approx(2 * apart, rel=1e-3)
    other.check_batch(batch(apart), num_tokens=ENOUGH)
    other.check_batch({}, num_tokens=ENOUGH)
    with pytest.raises(Disagreement, match=f"the last {ENOUGH} tokens .* this batch was not trained"):
        other.check_batch(batch(2 * apart), num_tokens=ENOUGH)


def batch(difference: float) -> dict[str, float]:
    return {"policy/mean_logprob_diff": difference, "policy/checked_share": 1.0}


async def test_few_tokens_are_judged_with_those_of_the_next_batches_unless_they_are_far_apart() -> None:
    few = agreement(Engines(), "model.dtype=bfloat16")
    few.check_batch(batch(0.2), num_tokens=ENOUGH // 2)
    few.check_batch(batch(0.05), num_tokens=ENOUGH // 2)
    few.check_batch(batch(0.2), num_tokens=ENOUGH // 2)
    with pytest.raises(Disagreement, match=r"0\.18 nats"):
        few.check_batch(batch(0.16), num_tokens=ENOUGH // 2)
    with pytest.raises(Disagreement, match="the last 8 tokens"):
        agreement(Engines(), "model.dtype=bfloat16").check_batch(batch(3.0), num_tokens=8)


async def test_what_is_no_number_is_no_agreement() -> None:
    ranks: Any = Ranks()
    with pytest.raises(Disagreement, match="nan"):
        await agreement(Engines(e0=math.nan)).probe(ranks)
    with pytest.raises(Disagreement):
        agreement(Engines(e0=-1.0)).check_batch(batch(math.nan), num_tokens=8)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (STATES, "the states behind all 3 layers agree, what follows them"),
        ([STATES[0], STATES[2], STATES[2]], "layer 1 of 0 to 2 is the first that differs, by 0.5 of its state"),
        (
            [*STATES[:2], np.full(4, 3.0003, np.float32).tobytes()],
            "layer 2 of 0 to 2 is the first that differs, by 0.0001 ",
        ),
        ([], "of a probe; take"),
        (STATES[:2], "of a probe; take"),
    ],
)
async def test_the_first_layer_that_differs_is_named_where_the_engine_says_its_states(
    there: list[bytes], said: str
) -> None:
    ranks: Any = Ranks()
    with pytest.raises(Disagreement, match=said):
        await agreement(Engines(e0=-2.0, states=there)).probe(ranks)


async def test_what_does_not_say_its_layers_does_not_hide_that_they_differ() -> None:
    class Silent(Ranks):
        async def layer_states(self, ids: list[int]) -> list[bytes]:
            raise RankFailed("learner rank 0 of 1 failed in layer_states")

    ranks: Any = Silent()
    compared = agreement(Engines(e0=-2.0))
    with pytest.raises(Disagreement, match="of a probe; take"):
        await compared.probe(ranks)
    assert compared.apart is not None


async def test_an_engine_that_dies_of_the_probe_disagrees() -> None:
    class Dying(Engines):
        async def probe(self, prompt: list[int], *, params: int, role: str = "") -> Any:
            raise EngineLost("engine e0 died while it answered probe-1: it crashed (SIGSEGV)", by_itself=True)

    ranks: Any = Ranks()
    compared = agreement(Dying())
    with pytest.raises(Disagreement, match=r"a probe of 3 \+ 48 tokens, .* it crashed \(SIGSEGV\); see the run's log"):
        await compared.probe(ranks)
    assert compared.apart is not None and compared.apart.difference is None and not compared.has_begun


async def test_each_role_that_is_a_policy_of_its_own_is_compared() -> None:
    ranks: Any = Ranks()
    await agreement(Engines(e0=-1.0), roles=("asker", "solver")).probe(ranks)
    assert ranks.asked == ["asker", "solver"]


class Pipeline:
    """Ends as its configuration says: `disagrees` with a `model_impl` or without, or does not come up."""

    def __init__(
        self, config: Any, *, resume: bool, disagrees: tuple[str, ...], down: tuple[str, ...], difference: float | None
    ) -> None:
        self.config, self.resume = config, resume
        impl = str(config.rollout.engine_args.get("model_impl", "own"))
        has_other = not resume and config.rollout.engine == "vllm" and impl == "own"
        self.agreement: Any = SimpleNamespace(has_begun=False, apart=None, has_other=has_other, most=1e-3)
        self.error = None
        if impl in down:
            self.error = Disagreement("the engine did not start", difference=0.0, remedy="look")
        elif impl in disagrees:
            self.error = Disagreement(f"{impl} is off", difference=difference, remedy="look")
            self.agreement.apart = self.error
        else:
            self.agreement.has_begun = True

    async def run(self) -> None:
        if self.error is not None:
            raise self.error

    def stop(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("disagrees", "down", "settings", "again", "classes", "said"),
    [
        ((), (), (), False, ["own"], ""),
        (("own",), (), (), False, ["own", "transformers"], ""),
        (("own", "transformers"), (), (), False, ["own", "transformers"], "transformers is off; look"),
        (("own",), ("transformers",), (), False, ["own", "transformers"], "own is off; vLLM's other class of it was tried"),
        (("own",), (), (), True, ["own"], "own is off; look"),
        (("own",), (), ("rollout.engine=http://127.0.0.1:1",), False, ["own"], "own is off; look"),
        (("auto",), (), ("rollout.engine_args={model_impl: auto}",), False, ["auto"], "auto is off; look"),
    ],
)  # fmt: skip
async def test_vllms_other_class_is_tried_once_before_anything_was_trained(
    disagrees: Any, down: Any, settings: Any, again: bool, classes: list[str], said: str
) -> None:
    made: list[Pipeline] = []

    def make(config: Any, *, resume: bool) -> Any:
        made.append(Pipeline(config, resume=resume, disagrees=disagrees, down=down, difference=0.5))
        return made[-1]

    notes: list[str] = []
    config = load_config(overrides=list(settings))
    pipeline, code, errors = await run_agreeing(make, config=config, again=again, note=notes.append)
    assert [str(one.config.rollout.engine_args.get("model_impl", "own")) for one in made] == classes
    assert pipeline is made[-1] and code == bool(said) and "".join(map(str, errors)).startswith(said)
    assert len(notes) == len(classes) - 1
    if len(classes) == 2:
        assert made[1].resume


@pytest.mark.parametrize(
    ("difference", "tried", "said"),
    [
        (1.7e-4, "engine and learner differ by 0.00017 nats", "or learner.max_mean_logprob_diff=0.002 lets it pass"),
        (None, "engine dies of a probe: trying", "the engine did not start; look; train another model"),
    ],
)
async def test_a_refusal_says_what_lets_the_difference_pass(difference: float | None, tried: str, said: str) -> None:
    def make(config: Any, *, resume: bool) -> Any:
        return Pipeline(config, resume=resume, disagrees=("own",), down=("transformers",), difference=difference)

    notes = list[str]()
    _, code, errors = await run_agreeing(make, config=load_config(), again=False, note=notes.append)
    assert code == 1 and str(errors[0]).endswith(said) and notes[0].startswith(tried)


@pytest.mark.engine
def test_a_real_engine_and_the_learner_agree_on_each_layer_and_the_one_that_got_other_weights_is_named(
    rollout: VLLMRollout, tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    trainer = make_trainer(tiny_model)
    request.addfinalizer(trainer.close)
    prompt = trainer.probe_prompt()
    assert len(prompt) > CHUNK, "longer than what is computed at once"
    params = free_sampling(tokens=12, temperature=1.0)
    ids, sampled, experts = rollout.wait(probe(rollout.engine, prompt, params=params))
    assert ids[: len(prompt)] == prompt and len(sampled) == 24 == len(ids) - len(prompt) and experts is None
    np.testing.assert_allclose(sampled, trainer.logprobs_of(ids, last=24), atol=1e-5)

    def apart(tokens: list[int]) -> list[float]:
        there, here = rollout.wait(rollout.engine.layer_states(tokens)), trainer.layer_states(tokens)
        pairs = [(np.frombuffer(one, np.float32), np.frombuffer(other, np.float32)) for one, other in zip(there, here)]
        return [float(np.linalg.norm(one - other) / np.linalg.norm(other)) for one, other in pairs]

    assert max(apart(prompt)) < 1e-5 and len(apart(prompt)) == 2
    other = shutil.copytree(tiny_model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= 1.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    try:
        rollout.update_weights(other, version=1)
        states = apart(prompt)
        assert states[0] < 1e-5 and states[1] > 0.01
    finally:
        rollout.update_weights(tiny_model, version=0)


def values(run: Run, name: str) -> list[float]:
    return [json.loads(line)[name] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.engine
def test_a_run_whose_engine_drops_a_logit_scale_ends_before_its_first_step_and_says_where(tmp_path: Path) -> None:
    make_family("granite", tmp_path / "granite", seed=0)
    settings = ("run.steps=2", "sft.demonstrations=", f"model.path={tmp_path / 'granite'}")
    run = start(tmp_path, *settings, "rollout.engine_args={hf_overrides: {logits_scaling: 1.0}}")
    code, output = run.wait()
    assert code == 1 and "the states behind all 2 layers agree" in output and "step 1" not in output, output


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize(("family", "dtype", "most"), [("cohere2", "float32", 1e-4), ("ernie4_5_moe", "bfloat16", 0.1)])
def test_a_run_goes_on_with_vllms_other_class_where_its_own_differs(
    family: str, dtype: str, most: float, tmp_path: Path
) -> None:
    """That of Ernie 4.5 chooses other experts, which the learner must not be forced to use."""
    make_family(family, tmp_path / family, seed=0)
    settings = ("run.steps=2", "sft.demonstrations=", f"model.dtype={dtype}")
    run = start(tmp_path, *settings, f"model.path={tmp_path / family}")
    code, output = run.wait()
    assert code == 0 and "trying rollout.engine_args={model_impl: transformers}" in output, output
    assert len(values(run, "policy/max_logprob_diff")) == 2 and max(values(run, "policy/max_logprob_diff")) < most


STALE = """
from mocked_server.vllm.process import worker_extension
def vllms_own(worker, folder):
    worker.reload_weights(weights_path=folder)
"""
NO_SELF_TEST = "worker_extension._tried_way = lambda worker: vllms_own"


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "change", "steps", "said"),
    [
        (
            "qwen3_moe",
            "worker_extension.load_layer_by_layer = worker_extension.load_whole = vllms_own",
            0,
            "cannot for Qwen3MoeForCausalLM: vllms_own: 4 are not what they were, such as model.layers.0.mlp.experts.",
        ),
        ("qwen3_moe", NO_SELF_TEST, 0, "layer 0 of 0 to 1 is the first that differs"),
        ("llama", NO_SELF_TEST, 1, "the states behind all 2 layers agree"),
    ],
)
def test_a_run_whose_engine_packs_no_new_weights_ends_at_its_start_and_says_which(
    family: str, change: str, steps: int, said: str, tmp_path: Path
) -> None:
    """vLLM's reload alone, on a CPU, leaves experts unpacked, which the worker's own test names, and without it the probe; and of
    an output matrix that is tied to the embeddings the packed copy as it was, which shows once an update has been published."""
    make_family(family, tmp_path / family, seed=0)
    settings = ("run.steps=3", "sft.demonstrations=", "learner.entropy_coef=0.1", "learner.lr_warmup_steps=0")
    model = (f"model.path={tmp_path / family}", "rollout.engine_args={model_impl: auto}")
    run = start(tmp_path, *settings, *model, after=STALE + change)
    code, output = run.wait()
    assert code == 1 and said in output and f"step {steps + 1}" not in output, output
