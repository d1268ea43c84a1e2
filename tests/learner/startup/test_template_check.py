"""Rules of learner/startup/template_check.py: templates of models that somebody else made, on the way through the door."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from buffers.errors import TaskError
from configs.load import load_config
from configs.tiny_model import chat_template, make_tiny_model
from learner.run import check_other_models, check_scorers
from learner.startup import template_check
from learner.startup.template_check import check_template

HOSTILE = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "s of processor time"),
    "recurses": (
        "{% macro a(n) %}{% if n %}{{ a(n - 1) ~ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
        "s of processor time",
    ),
    "grows": ("{{ 'x' * 9000000000 }}", "GiB of memory"),
    "doubles": (
        "{% set n = namespace(x='x') %}{% for m in messages %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "GiB of memory",
    ),
    "is long": ("{{ 'x ' * 2000000 }}", "more than 1048576 characters"),
    "is long for tools": ("{% if tools %}{{ 'x ' * 2000000 }}{% endif %}", "more than 1048576 characters"),
    "is long later": ("{% if messages | length > 10 %}{{ 'x ' * 2000000 }}{% endif %}", "more than 1048576 characters"),
}


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, "chat_template.jinja") for name in HOSTILE),
        ("is long", "tokenizer_config.json"),
        ("is long", "one of several"),
    ],
)
def test_a_template_that_does_not_end_or_grows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    template, reason = HOSTILE[name]
    if "processor time" in reason:
        monkeypatch.setattr(template_check, "MAX_CPU_S", 8)
    if place.endswith("jinja"):
        (tmp_path / place).write_text(template)
    else:
        several = [{"name": "default", "template": chat_template()}, {"name": "tool_use", "template": template}]
        named = template if place.endswith("json") else several
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(TaskError, match=reason) as refusal:
        check_template(tmp_path, key="model.path")
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "template",
    [
        chat_template(),
        chat_template(strip_thinking=True),
        "{{ raise_exception('only one message') }}",
        "{% for",  # no template: the tokenizer's own loader says so
        "{{ range(10 ** 9) }}",
        "{% generation %}x{% endgeneration %}",
    ],
)
def test_another_template_goes_through(tmp_path: Path, template: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    check_template(tmp_path, key="model.path")


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("roles.judge.frozen", ["roles={policy: {}, judge: {frozen: FOLDER}}"]),
        ("data.scorer", ["data.scorer=model:FOLDER"]),
    ],
)
def test_other_models_that_are_shown_conversations_are_asked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, overrides: list[str]
) -> None:
    make_tiny_model(tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text(HOSTILE["is long"][0])
    config = load_config(overrides=[each.replace("FOLDER", str(tmp_path / "other")) for each in overrides])
    check = check_scorers if key == "data.scorer" else check_other_models
    with pytest.raises(TaskError, match=rf"the chat template of {key} must render 42 short messages"):
        check(config)


def test_a_folder_without_one_needs_no_process(tmp_path: Path) -> None:
    assert list(template_check.templates_of(tmp_path)) == []
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [5, {"template": 6}, {}]}')
    (tmp_path / "chat_template.json").write_text("no JSON")
    assert list(template_check.templates_of(tmp_path)) == []
