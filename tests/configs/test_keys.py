"""Rules of configs/keys.py: what is printed of the keys is what the schema says, and a prefix that names none is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from configs.keys import all_keys, describe, keys_below, main
from configs.load import load_config
from configs.schema import Config
from learner.algorithms.objectives import LOSSES


def test_every_key_says_what_it_means() -> None:
    assert [name for name, key in all_keys().items() if len(key.meaning) < 15] == []


def test_every_key_holds_one_thing() -> None:
    """Unlike things under one key are a section; only lists and mappings of like things are left."""
    assert [name for name, key in all_keys().items() if isinstance(key.default, tuple)] == []


def test_every_key_can_be_set_on_the_command_line_to_its_default() -> None:
    given = [f"{name}={key.default_text}" for name, key in all_keys().items()]
    assert load_config(overrides=given) == Config()


@pytest.mark.parametrize(
    ("name", "default", "kind"),
    [
        ("run.checkpoints.every", "20", "integer >= 0"),
        ("run.trackers", '["tensorboard"]', "list of tensorboard, wandb, mlflow or swanlab"),
        ("data.tasks", '""', "text or mapping of text to number > 0"),
        ("agents.silence_s", "null", "number > 0 or null"),
        ("server.port", "0", "integer >= 0 <= 65535"),
        ("learner.kl.kind", '"k3"', "k1, abs, k2 or k3"),
        ("learner.kl.in_reward", "false", "true or false"),
    ],
)
def test_kinds_are_words(name: str, default: str, kind: str) -> None:
    key = all_keys()[name]
    assert (key.default_text, key.kind) == (default, kind)


def test_a_prefix_is_a_section_a_key_or_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lora = ["learner.lora.rank", "learner.lora.alpha", "learner.lora.per_role"]
    assert [key.name for key in keys_below("learner.lora")] == lora
    assert [key.name for key in keys_below("learner.lr")] == ["learner.lr"], "and not learner.lr_warmup_steps"
    assert len(keys_below("")) == len(all_keys()) > 60
    assert main(["learner.clip.low"]) == 0
    assert capsys.readouterr().out.startswith("learner.clip.low = null    (number > 0 or null)\n    Ratios stay above")
    assert main(["learner.klip"]) == 2
    assert "learner.klip is not a configuration key or section; did you mean" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not a configuration key"):
        describe("lr")


def test_the_clip_ranges_that_are_named_are_those_of_the_losses() -> None:
    for loss, policy_loss in LOSSES.items():
        for name, bound in zip(("low", "high"), policy_loss.clip or ()):
            text = {3e-4: "3e-4", 4e-4: "4e-4", 1.0: "1.0", 4.0: "4.0"}.get(bound, f"{bound:g}")
            assert f"{text} for {loss}" in all_keys()[f"learner.clip.{name}"].meaning
        if policy_loss.clip is None:
            assert f"for {loss}" not in all_keys()["learner.clip.low"].meaning


@pytest.mark.seconds
def test_the_command_imports_the_schema_and_nothing_heavy() -> None:
    code = (
        "import sys, configs.keys; print(sorted({'torch', 'ray', 'vllm', 'yaml', 'transformers'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
