"""Rules of configs/: what is shipped loads, and what cannot be used is refused in one line for each key."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import FOLDER, ConfigError, load_config


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_configuration_loads_and_says_what_it_is(path: Path) -> None:
    config = load_config(path)
    assert path.read_text().startswith("# ")
    assert config.run.name.replace("-", "_") == path.stem


def test_shipped_configurations_are_what_they_are_named_for() -> None:
    critic, ranks = load_config(FOLDER / "ppo_critic.yaml"), load_config(FOLDER / "two_ranks.yaml")
    assert (critic.learner.advantage, critic.learner.critic) == ("gae", "separate")
    assert ranks.learner.ranks == 2 and ranks.buffer.max_policy_lag == 0
    assert critic.data.tasks == ranks.data.tasks == load_config().data.tasks


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.checkpoints=[5,0]", ["run.checkpoints", "greater than or equal to 1 (entry 2)", "got 0"]),
        ("run.trackers=[wanb]", ["run.trackers", "'wandb'", "got 'wanb'", "set run.trackers="]),
        ("data.scorer=3", ["data.scorer", "string or ", "dictionary", "got 3"]),
        ("data.reward_manager=batch", ["data.reward_manager=batch", "data.scorer", "set data.scorer=module.function"]),
        ("data.validation=[data/walk/tasks.parquet,1,1]", ["data.validation", "another file than data.tasks"]),
        ("data.validation=[./data/walk/tasks.parquet,1,1]", ["data.validation", "another file than data.tasks"]),
        ("data.tasks={a/x.parquet: 1, b/x.parquet: 2}", ["data.tasks", "different names", "got 'x' twice", "rename"]),
        ("data.tasks={a/x.parquet: 0}", ["data.tasks", "greater than 0", "got 0"]),
        ("data.tasks={a/x.parquet: heavy}", ["data.tasks", "valid number", "got 'heavy'"]),
        ("data.tasks=3", ["data.tasks", "valid string", "got 3"]),
        ("learner.kl_coef=[0, 0.1]", ["learner.kl_coef", "greater than 0", "got 0"]),
        ("buffer.node=disk one", ["buffer.node", "should match pattern", "got 'disk one'"]),
        ("buffer.node=3", ["buffer.node", "valid string", "got 3"]),
    ],
)
def test_an_override_that_cannot_be_used_is_one_line(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(overrides=[override])
    line = str(refusal.value)
    assert "\n" not in line
    for word in words:
        assert word in line


def test_tasks_are_one_file_several_or_none() -> None:
    def files(value: str) -> dict[str, float]:
        return load_config(overrides=[f"data.tasks={value}"]).data.task_files

    assert files("x.parquet") == {"x.parquet": 1.0}
    assert files("{x.parquet: 3, y.parquet: 0.5}") == {"x.parquet": 3.0, "y.parquet": 0.5}
    assert files("''") == files("{}") == {}
    with pytest.raises(ConfigError, match=r"another file than data\.tasks, got y\.parquet for both"):
        load_config(overrides=["data.tasks={x.parquet: 3, y.parquet: 1}", "data.validation=[y.parquet, 1, 1]"])


def test_dapo_needs_groups_to_compare() -> None:
    with pytest.raises(ConfigError, match=r"data\.reward_manager=dapo .* buffer\.group_size must be >= 2, got 1"):
        load_config(overrides=["data.reward_manager=dapo", "buffer.group_size=1"])


def test_two_wrong_keys_are_two_lines() -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(overrides=["learner.lr=fast", "run.steps=0"])
    assert [line.split()[0] for line in str(refusal.value).splitlines()] == ["run.steps", "learner.lr"]


@pytest.mark.parametrize(("given", "attempts"), [("3", (3, None)), ("[2, 6]", (2, 6)), ("[1, 8]", (1, 8))])
def test_attempts_may_say_how_few_members_a_group_goes_on_with(given: str, attempts: tuple[int, int | None]) -> None:
    config = load_config(overrides=[f"agents.max_attempts={given}"])
    assert config.agents.attempts == attempts


@pytest.mark.parametrize("given", ["[3, 9]", "[3, 0]", "[0, 2]", "[3, 1]"])
def test_a_group_cannot_go_on_with_more_members_than_it_has_or_with_none_to_compare(given: str) -> None:
    grpo = ["learner.advantage=grpo", "learner.critic=none", f"agents.max_attempts={given}"]
    with pytest.raises(ConfigError, match="max_attempts"):
        load_config(overrides=grpo)
