"""ECHO: what tools and environments said between a row's answers is found by role, and learned by a cross-entropy of its own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffers.records import Row, TrainBatch
from learner.training.said import Sayings
from learner.training.trainer import Trainer
from tests.support.learner_parts import make_model, make_row, make_trainer

CHAT = [{"role": "system", "content": "Count."}, {"role": "user", "content": "Go."}]
TOLD = [
    {"role": "tool", "content": "12\n\u20ac 3"},
    {"role": "tool", "content": "13"},
    {"role": "user", "content": "Mind the <b>."},
]
LLAMA = """\
{%- for m in messages -%}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n\
{{ m.content | trim }}<|eot_id|>{%- endfor -%}{%- if add_generation_prompt -%}<|start_header_id|>assistant\
<|end_header_id|>\n\n{%- endif -%}"""
MISTRAL = """\
{%- for m in messages -%}{%- if m.role == 'user' -%}[INST] {{ m.content }} [/INST]\
{%- elif m.role == 'tool' -%}{%- if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' -%}\
{{ raise_exception('a result needs a call') }}{%- endif -%}[TOOL_RESULTS] {"content": {{ m.content | tojson }}}[/TOOL_RESULTS]\
{%- elif m.role == 'assistant' -%} {{ m.content }}{%- if m.tool_calls -%}[TOOL_CALLS] {{ m.tool_calls | tojson }}{%- endif -%}</s>\
{%- endif -%}{%- endfor -%}"""
GEMMA = """\
{%- for m in messages -%}{%- if m.role == 'tool' -%}{{ raise_exception('no tools') }}{%- endif -%}\
{%- if loop.index0 and m.role == messages[loop.index0 - 1].role -%}{{ raise_exception('roles must alternate') }}{%- endif -%}\
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n{%- endfor -%}\
{%- if add_generation_prompt -%}<start_of_turn>model\n{%- endif -%}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def _row(tokenizer: Any, *, told: list[dict[str, Any]], end: str = "<|im_end|>", **others: Any) -> Row:
    """An answer, what was told then, and another answer, as in play."""
    call = [{"id": "call00000", "type": "function", "function": {"name": "count", "arguments": {}}}]
    calls = {"tool_calls": call} if told[0]["role"] == "tool" and "INST" in tokenizer.chat_template else {}
    said = {"role": "assistant", "content": "w", **calls}
    chat = [*(CHAT if "Count" in _text(tokenizer, CHAT) else CHAT[1:])]
    before, after = _text(tokenizer, [*chat, said]), _text(tokenizer, [*chat, said, *told], prompt=True)
    cut = before.rindex("w") + 1
    pieces = [before[: cut - 1], before[cut - 1 : before.index(end, cut) + len(end)]]
    pieces += [after[len("".join(pieces)) :], f"d{end}"]
    ids = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
    mask = [number % 2 for number, part in enumerate(ids) for _ in part]
    return make_row([token for part in ids for token in part], mask=mask, **others)


def _text(tokenizer: Any, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))


def _found(tokenizer: Any, row: Row) -> list[tuple[str, str]]:
    sayings = Sayings(tokenizer).of(row.ids, mask=row.mask)
    return [(role, tokenizer.decode(row.ids[start:stop])) for role, start, stop in sayings]


def test_the_content_of_each_message_after_the_first_answer_is_found_by_its_role(tokenizer: Any) -> None:
    row = _row(tokenizer, told=TOLD)
    assert _found(tokenizer, row) == [(each["role"], each["content"]) for each in TOLD]
    assert Sayings(tokenizer).text(row.ids, mask=row.mask) == "12\n\u20ac 3\n13\nMind the <b>."
    assert not row.mask[
        [place for _, start, stop in Sayings(tokenizer).of(row.ids, mask=row.mask) for place in range(start, stop)]
    ].any()


def test_an_answer_that_was_cut_is_followed_by_what_was_said_all_the_same(tokenizer: Any) -> None:
    row = _row(tokenizer, told=TOLD)
    mask = row.mask.copy()
    mask[np.flatnonzero(mask)[1]] = 0  # the token that ends the first answer: the template's
    assert [role for role, _ in _found(tokenizer, replace(row, mask=mask))] == ["tool", "tool", "user"]


@pytest.mark.parametrize(
    ("template", "end", "told"),
    [
        (LLAMA, "<|eot_id|>", TOLD),
        (MISTRAL, "</s>", [{"role": "tool", "content": "12"}]),
        (MISTRAL, "</s>", [{"role": "user", "content": "Go on."}]),
        (GEMMA, "<end_of_turn>", [{"role": "user", "content": "Go on."}]),
    ],
    ids=["llama", "mistral tool", "mistral user", "gemma"],
)
def test_templates_of_other_families_are_read(
    tokenizer: Any, template: str, end: str, told: list[dict[str, Any]]
) -> None:
    tokenizer.chat_template = template
    found = _found(tokenizer, _row(tokenizer, told=told, end=end))
    assert [role for role, _ in found] == [each["role"] for each in told]
    assert all(each["content"] in text for each, (_, text) in zip(told, found, strict=True))


def test_a_role_that_the_template_cannot_show_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = GEMMA
    with pytest.raises(ValueError, match=r"learner\.echo\.tool needs a chat template .* leave learner\.echo\.tool out"):
        Sayings(tokenizer, roles=("tool",))
    tokenizer.chat_template = GEMMA.replace("{{ raise_exception('no tools') }}", "").replace("m.role }}", "'user' }}")
    with pytest.raises(ValueError, match=r"set learner\.echo\.user, which then means both"):
        Sayings(tokenizer, roles=("tool",))


CONTENTS = st.lists(
    st.tuples(st.sampled_from(["tool", "user"]), st.text(max_size=12).filter(lambda text: "<" not in text)),
    min_size=1,
    max_size=4,
)


@pytest.mark.seconds
@given(said=CONTENTS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_found_but_for_the_spaces_around_it(tokenizer: Any, said: list[tuple[str, str]]) -> None:
    told = [{"role": role, "content": text} for role, text in said]
    found = _found(tokenizer, _row(tokenizer, told=told))
    whole = [(role, text.strip()) for role, text in said if text.strip()]
    assert [(role, text.strip()) for role, text in found if text.strip()] == whole


def test_nothing_is_found_where_the_template_has_no_roles(tokenizer: Any) -> None:
    row = _row(tokenizer, told=TOLD)
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert Sayings(tokenizer).of(row.ids, mask=row.mask) == []


@pytest.fixture
def trainer(model: Path) -> Iterator[Any]:
    made: list[Trainer] = []

    def make(**options: Any) -> Trainer:
        if made:
            made.pop().close()
        made.append(make_trainer(model, **{"advantage": "grpo", "critic": "none", "grad_clip": 1e9, **options}))
        return made[-1]

    yield make
    made.pop().close()


def _batch(tokenizer: Any, *, score: float = 1.0, version: int = 0) -> TrainBatch:
    longer = [{"role": "user", "content": "A much longer word to foresee."}]
    rows = [
        _row(tokenizer, told=TOLD, score=score, episode="0-0-0", version=version),
        _row(tokenizer, told=longer, score=0.0, episode="0-1-0", version=version),
        _row(tokenizer, told=longer, score=0.0, episode="0-1-0", version=version, loss_weight=0.5),
    ]
    return TrainBatch(rows=rows)


@pytest.mark.seconds
@pytest.mark.parametrize("prefix_tree", [True, False])
def test_equal_scores_leave_the_gradient_of_the_weighted_cross_entropy(
    trainer: Any, tokenizer: Any, model: Path, prefix_tree: bool
) -> None:
    batch = _batch(tokenizer, score=0.0)
    options = {"minibatches": 1, "token_budget": 150, "prefix_tree": prefix_tree}
    metrics = trainer(echo={"tool": 0.2, "user": 0.05}, **options).train_step(batch, version=0)
    lm = AutoModelForCausalLM.from_pretrained(model)
    total, mean, count = torch.zeros(()), torch.zeros(()), 0.0
    sayings = Sayings(tokenizer)
    for row in batch.rows:
        ids = torch.from_numpy(row.ids).long()
        negative = -lm(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        for role, start, stop in sayings.of(row.ids, mask=row.mask):
            own = row.loss_weight * negative[start - 1 : stop - 1].sum()
            total, mean = total + {"tool": 0.2, "user": 0.05}[role] * own, mean + own
            count += row.loss_weight * (stop - start)
    (total / count).backward()
    norm = torch.stack([each.grad.norm() for each in lm.parameters() if each.grad is not None]).norm()
    assert metrics["policy/echo_loss"] == pytest.approx(mean.item() / count, rel=1e-5)
    assert metrics["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    told = sum(stop - start for row in batch.rows for _, start, stop in sayings.of(row.ids, mask=row.mask))
    assert metrics["learner/echo_tokens"] == told
    assert trainer(**options).train_step(batch, version=0)["policy/grad_norm"] == 0.0


@pytest.mark.seconds
@pytest.mark.parametrize(
    "options",
    [{}, {"advantage": "gae", "critic": "separate"}, {"advantage": "gae", "critic": "shared"}, {"entropy_coef": 0.1}],
)
def test_the_other_figures_of_a_step_are_those_without_it(
    trainer: Any, tokenizer: Any, options: dict[str, Any]
) -> None:
    """All but the gradient, whose other parts are not measured by themselves."""
    batch = _batch(tokenizer)
    one = {"minibatches": 1, "token_budget": 150, **options}
    plain, echoed = (trainer(echo={"tool": coef}, **one).train_step(batch, version=0) for coef in (0.0, 0.3))
    own = {"policy/echo_loss", "learner/echo_tokens"}
    assert echoed.keys() - plain.keys() == own
    same = [name for name in plain if not name.startswith("time/") and name not in ("policy/grad_norm", "learner/mfu")]
    assert {name: echoed[name] for name in same} == pytest.approx(
        {name: plain[name] for name in same}, rel=1e-5, abs=1e-6
    )
    assert echoed["learner/echo_tokens"] > 0


@pytest.mark.seconds
def test_what_is_said_becomes_likelier_and_rows_without_it_are_no_error(trainer: Any, tokenizer: Any) -> None:
    learner = trainer(echo={"user": 0.1}, lr=3e-3, lr_warmup_steps=0)
    batches = [_batch(tokenizer, score=0.0, version=step) for step in range(4)]
    losses = [learner.train_step(batch, version=step)["policy/echo_loss"] for step, batch in enumerate(batches)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.5
    single = {"mask": [0, 1, 1], "version": 4}
    rows = [make_row([1, 5, token], episode=f"0-{token}-0", score=token, **single) for token in (7, 8)]
    metrics = learner.train_step(TrainBatch(rows=rows), version=4)
    assert (metrics["policy/echo_loss"], metrics["learner/echo_tokens"]) == (0.0, 0.0)
    assert np.isfinite(metrics["policy/grad_norm"])
