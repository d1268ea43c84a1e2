"""Rules of configs/: what is shipped loads, and what cannot be used is refused in one line for each key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from configs.load import FOLDER, ConfigError, load_config
from configs.schema import KLConfig


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
        ("run.checkpoints.keep=0", ["run.checkpoints.keep must be greater than or equal to 1, got 0", "set run.chec"]),
        ("run.trackers=[wanb]", ["run.trackers", "'wandb'", "(entry 1)", "got 'wanb'", "set run.trackers="]),
        ("run.seed=-1", ["run.seed must be greater than or equal to 0, got -1"]),
        ("run.seed=4294967296", ["run.seed must be less than or equal to 4294967295, got 4294967296"]),
        ("learner.lr: yes", ["an override must look like section.key=value"]),
        ("learner.lr=yes", ["learner.lr must be number >= 0, got True (yes and on are true in YAML"]),
        ("run.steps=true", ["run.steps must be integer >= 1, got True"]),
        ("learner.check_logprobs=on", ["learner.check_logprobs must be number >= 0 <= 1 or False, got True"]),
        ("data.tasks={a/x.parquet: yes}", ["data.tasks", "got {'a/x.parquet': True}"]),
        ("agents.concurrency=off", ["agents.concurrency must be integer >= 1 or auto, got False"]),
        ("run.name=", ["run.name must have at least 1 character, got ''"]),
        ("data.scorer=3", ["data.scorer", "string or ", "dictionary", "got 3"]),
        ("data.reward_manager=batch", ["data.reward_manager=batch", "data.scorer", "set data.scorer=module.function"]),
        ("data.validation.tasks=data/walk/tasks.parquet", ["data.validation.tasks", "another file than data.tasks"]),
        ("data.validation.tasks=./data/walk/tasks.parquet", ["data.validation.tasks", "another file than data.tasks"]),
        ("data.tasks={a/x.parquet: 1, b/x.parquet: 2}", ["data.tasks", "different names", "got 'x' twice", "rename"]),
        ("data.tasks={a/x.parquet: 0}", ["data.tasks", "greater than 0", "got 0"]),
        ("data.tasks={a/x.parquet: heavy}", ["data.tasks", "valid number", "got 'heavy'"]),
        ("data.tasks=3", ["data.tasks", "valid string", "got 3"]),
        (
            "learner.kl.target=0.1",
            [
                "learner.kl.target has an effect with a learner.kl.coef only",
                "learner.kl.coef=0;",
                "set learner.kl.coef=",
            ],
        ),
        ("learner.kl.target=0", ["learner.kl.target must be greater than 0, got 0"]),
        ("learner.kl.coef=-1", ["learner.kl.coef must be greater than or equal to 0, got -1"]),
        ("learner.kl.kind=k9", ["learner.kl.kind must be 'k1', 'abs', 'k2' or 'k3', got 'k9'"]),
        ("learner.kl.horizon=0", ["learner.kl.horizon must be greater than 0, got 0"]),
        ("learner.lora.rank=-1", ["learner.lora.rank must be greater than or equal to 0, got -1"]),
        ("learner.clip.low=0", ["learner.clip.low must be greater than 0, got 0"]),
        ("agents.silence_s=0", ["agents.silence_s must be greater than 0, got 0"]),
        ("buffer.node=disk one", ["buffer.node", "must match pattern", "got 'disk one'"]),
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
        load_config(overrides=["data.tasks={x.parquet: 3, y.parquet: 1}", "data.validation.tasks=y.parquet"])


def test_dapo_needs_groups_to_compare() -> None:
    with pytest.raises(ConfigError, match=r"data\.reward_manager=dapo .* buffer\.group_size must be >= 2, got 1"):
        load_config(overrides=["data.reward_manager=dapo", "buffer.group_size=1"])


def test_two_wrong_keys_are_two_lines() -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(overrides=["learner.lr=fast", "run.steps=0"])
    assert [line.split()[0] for line in str(refusal.value).splitlines()] == ["run.steps", "learner.lr"]


@pytest.mark.parametrize("fewest", [2, 8])
def test_a_group_may_go_on_with_fewer_members(fewest: int) -> None:
    agents = load_config(overrides=[f"agents.fewest_members={fewest}"]).agents
    assert (agents.max_attempts, agents.fewest_members) == (3, fewest)
    assert load_config().agents.fewest_members is None


@pytest.mark.parametrize("fewest", [9, 0, 1])
def test_a_group_cannot_go_on_with_more_members_than_it_has_or_with_none_to_compare(fewest: int) -> None:
    grpo = ["learner.advantage=grpo", "learner.critic=none", f"agents.fewest_members={fewest}"]
    with pytest.raises(ConfigError, match=rf"agents\.fewest_members must .* got {fewest}; set agents\.fewest_members="):
        load_config(overrides=grpo)


def test_one_key_of_a_section_leaves_the_others_as_they_are() -> None:
    kl = load_config(overrides=["learner.kl.coef=0.1"]).learner.kl
    assert kl == KLConfig(coef=0.1)
    steered = load_config(FOLDER / "ppo_critic.yaml", ["learner.kl.coef=0.1"]).learner.kl
    assert (steered.coef, steered.target) == (0.1, 0.05), "the target is the file's"
    whole = load_config(FOLDER / "ppo_critic.yaml", ["learner.kl={coef: 0.2, horizon: 500}"]).learner.kl
    assert (whole.coef, whole.target, whole.horizon) == (0.2, 0.05, 500.0), "a section is merged with the file's"


def test_a_file_may_set_a_part_of_a_section(tmp_path: Path) -> None:
    base, top = tmp_path / "base.yaml", tmp_path / "top.yaml"
    base.write_text("learner: {lora: {rank: 8}, clip: {high: 0.3}}\n")
    top.write_text("extends: base.yaml\nlearner: {lora: {alpha: 4}}\n")
    learner = load_config(top).learner
    assert (learner.lora.rank, learner.lora.alpha) == (8, 4.0)
    assert (learner.clip.low, learner.clip.high) == (None, 0.3)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("learner.kl.coeff", "did you mean learner.kl.coef?"),
        ("learner.lrs", "did you mean learner.lr?"),
        ("lerner.lr", "did you mean learner.lr?"),
        ("learner.group_size", "did you mean buffer.group_size?"),
        ("run.kl.coef", "did you mean learner.kl.coef?"),
        ("learner.validation", "did you mean data.validation?"),
        ("learner.lora.zzzz", "there are: learner.lora.rank, learner.lora.alpha, learner.lora.per_role"),
        ("data.scorer.default", "data.scorer is one value, text or mapping of text to text: set data.scorer="),
    ],
)
def test_a_wrong_key_is_answered_with_the_nearest(tmp_path: Path, wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(overrides=[f"{wrong}=1"])
    assert str(refusal.value) == f"{wrong} is not a configuration key (an override); {meant}" + (
        "<value>" if meant.endswith("=") else ""
    )


def test_a_wrong_key_in_a_file_is_refused_with_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("learner: {kl: {coeff: 1}}\n")
    with pytest.raises(
        ConfigError, match=r"learner\.kl\.coeff is not .*\(mine\.yaml.*; did you mean learner\.kl\.coef\?"
    ):
        load_config(path)
    path.write_text("learner.lr: 1\n")
    with pytest.raises(ConfigError, match=r"learner\.lr must be written in sections in a file, .* mine\.yaml"):
        load_config(path)


def test_nothing_after_the_equals_sign_empties_a_value(tmp_path: Path) -> None:
    given = [
        "sft.demonstrations=",
        "agents.loops=",
        "agents.command= ",
        "run.reward_optimum=",
        "agents.silence_s=",
    ]
    config = load_config(overrides=[*given, "data.tasks="])
    assert (config.sft.demonstrations, config.agents.loops, config.agents.command) == ("", "", [])
    assert (config.run.reward_optimum, config.agents.silence_s, config.data.task_files) == (None, None, {})
    path = tmp_path / "mine.yaml"
    path.write_text("sft:\n  demonstrations:\n")
    assert load_config(path).sft.demonstrations == ""


def test_a_value_that_cannot_be_empty_is_asked_for() -> None:
    with pytest.raises(
        ConfigError, match=r"run\.steps must have a value \(integer >= 1\), got nothing; set run\.steps=60"
    ):
        load_config(overrides=["run.steps="])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("roles={judge: {url: 'http://a/v1'}}", "roles must name one that the policy plays, got judge"),
        ("roles={a: {frozen: 3}}", "roles"),
        ("roles={a: {}, b: {frozen: -1, url: 'http://a/v1'}}", "frozen and url are two models"),
        ("roles={a: {}, b: {url: 'ftp://a'}}", "url must begin with http:// or https://"),
        ("roles={a: {model: m}}", "model and key_variable are of a url"),
        ("roles={'a b': {}}", "roles"),
        ("learner.advantage=none", "learner.teacher.path='' and learner.hints.coef=0"),
        ("learner.hints.sources=[said]", "learner.hints.sources has an effect with a learner.hints.coef only"),
        ("learner.hints={coef: 1, sources: []}", "learner.hints.sources"),
        ("learner.hints.coef=-1", "learner.hints.coef"),
        ("learner.echo.tool=-0.1", "learner.echo.tool"),
        ("learner.teacher.coef=2.0", "learner.teacher.coef has an effect with a learner.teacher.path only"),
    ],
)
def test_roles_and_teachers_that_cannot_be_are_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(FOLDER / "demo.yaml", overrides=[override])
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


JUDGE = ["data.scorer=judge", "roles={player: {}, judge: {frozen: 0}}"]
RANKING = [*JUDGE, "data.judge.mode=ranking", "agents.silence_s=null"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.sampler=thompson", "data.tasks="], "data.sampler=thompson draws from data.tasks, which must be set"),
        (["data.scorer=judge"], "must be one that is not trained, got no such role"),
        (["data.scorer={a: judge}", "roles={judge: {}}"], "must be one that is not trained, got one that is"),
        (["data.judge.timeout_s=3"], "data.judge.timeout_s has an effect with data.scorer=judge only"),
        ([*RANKING, "agents.concurrency=7"], "agents.concurrency must be a number >= 8, got 7"),
        ([*RANKING, "agents.concurrency=auto"], "agents.concurrency must be a number >= 8, got auto"),
        ([*RANKING, "agents.silence_s=3"], "got agents.silence_s=3"),
        ([*RANKING, "agents.fewest_members=4"], "got agents.fewest_members=4"),
        ([*RANKING, "data.validation.tasks=v.parquet"], "got data.judge.truth=''; set it to what scores them"),
    ],
)
def test_samplers_and_judges_that_cannot_be_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(FOLDER / "demo.yaml", overrides=overrides)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_roles_are_set_as_a_whole_and_served_by_one_process() -> None:
    config = load_config(FOLDER / "demo.yaml", overrides=["roles={a: {}, b: {frozen: -10}}"])
    assert [(name, role.frozen, role.is_trained) for name, role in config.roles.items()] == [
        ("a", None, True),
        ("b", -10, False),
    ]
    with pytest.raises(ConfigError, match=r"got server.processes=2; set server.processes=1"):
        load_config(FOLDER / "demo.yaml", overrides=["roles={a: {}}", "server.processes=2"])


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "..", ".tasks", "--help", " x", "x ", "a\nb", "\x1b[2J", "\u202ex", "x" * 201]
)
def test_a_run_has_a_name_that_a_folder_and_a_command_line_can_have(tmp_path: Path, name: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"run": {"name": name}}))
    with pytest.raises(ConfigError, match=r"run\.name must be the name of a folder in run\.dir") as refused:
        load_config(file)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["demo", "Größe 3", "a.b-c_d", "日本"])
def test_names_of_people_are_names_of_runs(name: str) -> None:
    assert load_config(overrides=[f"run.name={name}"]).run.name == name
