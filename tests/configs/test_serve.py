"""What a run that serves users may not be, said before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import ConfigError, load_config


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serve.enabled=false", "serve.silence_s=3"], "serve.silence_s has an effect with serve.enabled only"),
        (["server.processes=2"], "server.processes must be 1, got 2"),
        (["buffer.group_size=4", "learner.advantage=grpo"], "buffer.group_size must be 1, got 4"),
        (["data.tasks=tasks.parquet"], "data.tasks must be '', got 'tasks.parquet'"),
        (
            ["serve.gate.tasks=g.parquet", "data.scorer=contains", "learner.lora={rank: 0, alpha: 16}"],
            "learner.lora.rank must be > 0",
        ),
        (["serve.gate.tasks=g.parquet"], "scored by data.scorer"),
        (["serve.judge.max_tokens=9"], "serve.judge.max_tokens has an effect with serve.judge.model only"),
        (["serve.judge.model=gpt"], "serve.judge.model must be policy, or the URL"),
        (["roles={ann: {}}"], "roles of a live run are its users"),
        (
            ["roles={ann: {}}", "learner.lora.per_role=true", "serve.gate.tasks=g.parquet", "data.scorer=contains"],
            "serve.gate compares versions of one policy",
        ),
        (["serve.gate.session_share=0.1", "learner.lora={rank: 0, alpha: 16}"], "serve.gate.session_share needs adapters"),
        (["serve.sessions_keep_version=true", "learner.lora={rank: 0, alpha: 16}"], "serve.sessions_keep_version needs adapters"),
        (
            ["roles={ann: {}}", "learner.lora.per_role=true", "serve.gate.session_share=0.1"],
            "serve.gate.session_share is of versions of one policy",
        ),
        (["serve.gate.sessions=9"], "serve.gate.sessions has an effect with serve.gate.session_share only"),
        (["serve.gate.margin=-1"], "serve.gate.margin"),
        (["serve.gate.every=0"], "serve.gate.every"),
        (["serve.upstream.url=http://h/v1"], "terms_allow_learning must be true, got false"),
        (["serve.upstream.url=h", "serve.upstream.terms_allow_learning=true"], "url must begin with http:// or https://, got h"),
        (["serve.upstream.share=0.5"], "share is of a url, got none"),
        (["serve.silence_s=0"], "serve.silence_s"),
        (["serve.batch_age_s=0"], "serve.batch_age_s"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(words, says):
    with pytest.raises(ConfigError, match=says.replace("(", r"\(").replace("'", ".")):
        load_config(Path("live"), words)


def test_the_shipped_configuration_is_one():
    config = load_config(Path("live"), [])
    assert config.serve.enabled and config.learner.lora.rank > 0 and not config.data.task_files


def test_words_alone_teach_a_live_run_by_the_recipe() -> None:
    config = load_config(Path("live"), ["learner.recipe=sdpo"])
    assert (config.learner.advantage, config.learner.hints.coef, config.buffer.group_size) == ("none", 1.0, 1)
    with pytest.raises(ConfigError, match=r"learner\.hints\.sources=sibling compares episodes of one task"):
        load_config(Path("live"), ["learner.recipe=sdpo", "serve.enabled=false"])
