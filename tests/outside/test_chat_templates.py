"""Chat templates as their models ship them, about forty, which TRL keeps in its package: what is said in a continued chat is in the
prompt once, and an agent's rounds stay one row. The promises are those of `tests.mocked_server.vllm.test_chat_families`, whose
templates are our own."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template

from agents.chat_template_ids import opening_ids, tail_ids
from benchmarks.chat_families import Family, Refused, _with_object
from benchmarks.learner import TRL
from buffers.errors import AgentError, RequestRefused
from buffers.tasks.parquet import Trace
from configs.schema import RolloutConfig
from mocked_server.vllm.demonstrations import Unlearnable
from mocked_server.vllm.exact_rendering import ExactRendering
from mocked_server.vllm.tool_calls import parser_of
from tests.mocked_server.conversation.test_continuation import episode
from tests.mocked_server.vllm.test_chat_families import Renderer, Turn, conversations_of, play
from tests.mocked_server.vllm.test_demonstrations import CALLS as DEMONSTRATED_CALLS
from tests.mocked_server.vllm.test_demonstrations import SPEAKS, THINKS, TOOL, renderer_of, trained
from tests.mocked_server.vllm.test_exact_rendering import render
from tests.outside.agent_environments import python_with
from tests.outside.test_clients import CLIENTS, ROOT
from tests.support.server_parts import ServerThread

pytestmark = pytest.mark.slow

MARK = re.compile(
    r"<[|｜][^<>|｜\s'\"{}]*[|｜]>|<\|\w+>|<\w+\|>|<\|\"\|>|</?s>|</?(?:think|tool_call|tool_response)>|<(?:start|end)_of_\w+>"
)
"""How control tokens are written; which they are a template does not say."""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
USER, WORD, FACT = {"role": "user", "content": "Hello."}, "0word0", "0fact0"
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": f'{{"a": "{WORD}"}}'}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": FACT}
ENDS_ALONE = {"gptoss", "phi3", "phi3_5"}
"""They end the last answer of all in another way than one that is followed."""


@dataclass(frozen=True)
class Shipped(Family):
    """As vLLM renders it. `call_stop`: what ends a call of the model; `parts`: it shows lists of parts, as those that see do."""

    call_stop: str = ""
    parts: bool = False

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _compile_jinja_template(self.template)

    def render(self, messages: Sequence[Any], **kwargs: Any) -> str:
        shown = []
        for message in messages:
            content = [{"type": "text", "text": message["content"]}] if self.parts else message["content"]
            calls = [_with_object(call) for call in message.get("tool_calls", ())]
            without = {name: value for name, value in message.items() if name != "tool_calls"}
            if "reasoning" in message:
                without["reasoning_content"] = message["reasoning"]
            shown.append({**without, "content": content, **({"tool_calls": calls} if calls else {})})
        try:
            return self._compiled.render(messages=shown, **{"add_generation_prompt": True, **TOKENS, **kwargs})
        except (jinja2.TemplateError, TypeError) as error:
            raise Refused(str(error)) from error


def shipped(template: str) -> Shipped:
    answer = {"role": "assistant", "content": WORD}
    plain, text = Shipped(template, marks=(), stop=""), ""
    with suppress(Refused):
        text = plain.render([USER, answer, USER])
    if WORD not in text:
        plain = replace(plain, parts=True)
        text = plain.render([USER, answer, USER])
    marks, called, stop = MARK.findall(template + text), "", MARK.findall(text.partition(WORD)[2])[0]
    with suppress(Refused):
        alone, whole = plain.render([USER, CALLS], add_generation_prompt=False), plain.render([USER, CALLS, RESULT])
        marks += MARK.findall(whole)
        if WORD in whole and FACT in whole:
            *_, called = MARK.findall(alone.partition(WORD)[2])
            if not MARK.search(plain.render([USER, answer], add_generation_prompt=False).partition(WORD)[2]):
                called = MARK.findall(whole.removeprefix(alone))[0]  # nothing ends an answer but what follows it
    return replace(
        plain, marks=tuple(dict.fromkeys([*marks, *TOKENS.values()])), stop=stop, calls=bool(called), call_stop=called
    )


@pytest.fixture(scope="module")
def templates() -> Mapping[str, Shipped]:
    """Those that models ship, which sample one token after the other; TRL's own for training are left out."""
    (folder,) = (
        python_with("trl-alone", "--no-deps", TRL).parents[1].glob("lib/python*/site-packages/trl/chat_templates")
    )
    files = [path for path in sorted(folder.glob("*.jinja")) if not re.search("_training$|diffusion", path.stem)]
    assert len(files) > 35
    return {path.stem: shipped(path.read_text(encoding="utf-8")) for path in files}


async def test_an_answer_is_continued_token_for_token(templates: Mapping[str, Shipped]) -> None:
    said = (("One.", "First."), ("Two.", "Second."), ("Three.", "Third."))
    for name, family in templates.items():
        _, plans = await play(family, None, [Turn(words, answer, False, family.stop) for words, answer in said])
        continued = [plan.parent is not None for plan in plans]
        assert continued == [False, name not in ENDS_ALONE, name not in ENDS_ALONE], name


async def test_calls_are_continued_with_their_results(templates: Mapping[str, Shipped]) -> None:
    called = 0
    for name, family in templates.items():
        if family.calls:
            turns = [Turn("One.", "x", True, family.call_stop), Turn("Result.", "y", True, family.call_stop)]
            _, plans = await play(family, "Be kind.", [*turns, Turn("Other.", "Done.", False, family.stop)])
            assert [plan.parent is not None for plan in plans] == [False, True, True], name
            called += 1
    assert called > 20


async def test_what_anybody_says_is_in_the_prompt_or_refused_or_told(
    templates: Mapping[str, Shipped], caplog: pytest.LogCaptureFixture
) -> None:
    for name, family in templates.items():
        for role in ("system", "tool"):
            renderer = Renderer(family)
            rendering = ExactRendering(renderer, strict=False, refusal=Refused)
            messages = [USER, CALLS, RESULT] if role == "tool" else [{"role": role, "content": FACT}, USER]
            caplog.clear()
            try:
                call, _ = await render(rendering, episode(), *messages)
            except (Refused, RequestRefused):
                continue
            assert call.continuation is not None
            assert FACT in renderer.decode(call.continuation.prompt_ids()) and not caplog.records, name


def test_no_message_is_lost_and_nothing_is_repeated(templates: Mapping[str, Shipped]) -> None:
    judged = Counter[bool]()

    @settings(max_examples=400, deadline=None)
    @given(conversations_of(templates))
    def holds(drawn: tuple[str, str | None, list[Turn]]) -> None:
        name, system, turns = drawn
        try:
            asyncio.run(play(templates[name], system, turns))
        except ValueError as error:
            if not str(error).startswith("the template "):
                raise
            judged[False] += 1  # it writes the history in another way than before: there is nothing to compare with
        else:
            judged[True] += 1

    holds()
    assert judged[True] > 3 * judged[False], judged


class Tokenizer(Renderer):
    """As an agent loop has one."""

    @property
    def chat_template(self) -> str:
        return self._family.template

    def apply_chat_template(self, messages: Any, *, tools: Any, tokenize: bool, **kwargs: Any) -> str:
        try:
            return self._family.render(messages, **kwargs)
        except Refused as error:
            raise ValueError(str(error)) from error


def test_an_agent_loop_goes_on_after_the_token_with_which_the_model_stopped(templates: Mapping[str, Shipped]) -> None:
    """As the template does after a call, or after words; or it is refused."""
    refused = set[str]()
    for name, family in templates.items():
        tokenizer = Tokenizer(family)
        answer = {"role": "assistant", "content": WORD}
        for stop, said, then in ((family.stop, answer, USER), (family.call_stop, CALLS, RESULT)):
            if not stop:
                continue
            told = family.render([USER, said, then]).partition(WORD)[2]
            try:
                tail = tail_ids(tokenizer, [then], tools=None, after=tokenizer.id_of(stop))
            except AgentError:
                refused.add(name)
            else:
                assert tokenizer.decode(tail) == told.partition(stop)[2], (name, stop)
        if not family.calls:
            with suppress(AgentError):
                assert FACT in tokenizer.decode(tail_ids(tokenizer, [RESULT], tools=None, after=None)), name
    assert refused == set()


def test_an_agent_loop_opens_with_what_a_developer_says(templates: Mapping[str, Shipped]) -> None:
    refused = set[str]()
    for name, family in templates.items():
        tokenizer = Tokenizer(family)
        opening = [{"role": "developer", "content": FACT}, USER]
        try:
            assert FACT in tokenizer.decode(opening_ids(tokenizer, opening, tools=None)), name
        except AgentError:
            refused.add(name)
    assert refused <= {"gemma", "gemma2"}


def test_sft_trains_answers_in_full_up_to_the_token_that_ends_them(templates: Mapping[str, Shipped]) -> None:
    refused = set[str]()
    for name, family in templates.items():
        for messages in (SPEAKS, THINKS, *([DEMONSTRATED_CALLS] if family.calls else [])):
            renderer = renderer_of(family)
            (found,) = renderer.rows([Trace(messages=messages)])
            if isinstance(found, Unlearnable):
                refused.add(f"{name}: {str(found).split(': ')[-1]}")
                continue
            answers = [text for row in found for text in trained(renderer, row)]
            said = [message for message in messages if message["role"] == "assistant"]
            for answer, message in zip(answers, said, strict=True):
                stop = family.call_stop if "tool_calls" in message else family.stop
                parts = [
                    message["content"],
                    message.get("reasoning_content", ""),
                    "look" if "tool_calls" in message else "",
                ]
                assert answer.endswith(stop) and answer.count(stop) == 1, (name, answer)
                assert all(part in answer for part in parts), (name, answer)
    assert {text.split(": ")[1] for text in refused} <= {
        "the chat template begins each answer with reasoning, and it has none (reasoning_content)",
        "the chat template's prompt leaves no room for its reasoning",
        "System role not supported",
    }  # fmt: skip
    assert len({text.split(": ")[0] for text in refused}) < 9, refused


async def test_a_template_that_shows_no_tools_is_told_of_once(
    templates: Mapping[str, Shipped], caplog: pytest.LogCaptureFixture
) -> None:
    told, shown = set[str](), set[str]()
    for name, family in templates.items():
        rendering = ExactRendering(Renderer(family), strict=False, refusal=Refused)
        caplog.clear()
        for _ in range(2):
            await render(rendering, episode(), USER, tools=[TOOL])
        assert len(caplog.records) < 2
        (told if caplog.records else shown).add(name)
        assert (TOOL["function"]["description"] in family.render([USER], tools=[TOOL])) == (name in shown), name
    assert {"gemma3", "llama3", "phi3"} <= told and {"qwen3", "gemma4", "llama3_1", "glm4moe"} <= shown


def tokenizer_of(family: Shipped, tiny_model: Path) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*family.marks, "<|python_tag|>"]}
    )  # Llama's parser asks
    tokenizer.chat_template = family.template
    return tokenizer


@pytest.fixture
def model_of(templates: Mapping[str, Shipped], tiny_model: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A model with this template, its control tokens, and those that end what it says."""

    def make(name: str) -> Path:
        tokenizer, model = tokenizer_of(templates[name], tiny_model), tmp_path / "model"
        shutil.copytree(tiny_model, model)
        tokenizer.save_pretrained(model)
        weights: Any = AutoModelForCausalLM.from_pretrained(model)
        weights.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        weights.generation_config.eos_token_id = [
            tokenizer.convert_tokens_to_ids(stop) for stop in (templates[name].stop, templates[name].call_stop)
        ]
        weights.save_pretrained(model)
        return model

    return make


@pytest.fixture
def served(model_of: Callable[[str], Path]) -> Iterator[Callable[..., ServerThread]]:
    """`served(name, **server)`: a server whose model has this template and its control tokens."""
    with ExitStack() as beside:

        def serve(name: str, **server: Any) -> ServerThread:
            model = model_of(name)
            thread = ServerThread(model, rollout=RolloutConfig(max_tokens=96, max_model_len=2048), **server)
            thread.start()
            beside.callback(thread.stop)
            return thread

        yield serve


def test_the_parser_that_reads_a_template_s_calls_is_found(templates: Mapping[str, Shipped], tiny_model: Path) -> None:
    found = {name: parser_of(tokenizer_of(family, tiny_model)) for name, family in templates.items()}
    assert {name for name in found if found[name]} == {name for name in found if templates[name].calls} - {"gptoss"}
    families = {
        "qwen3": "hermes",
        "qwen3_6": "qwen3_coder",
        "gemma4": "gemma4",
        "llama3_1": "llama3_json",
        "glm4moe": "glm45",
    }
    assert {name: found[name] for name in families} == families


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma4", "glm4moe", "llama3_1"])
def test_an_agent_s_calls_are_said_read_and_trained_in_the_model_s_own_form(
    model_of: Callable[[str], Path], name: str
) -> None:
    """By vLLM's engine, with the parser that is found. Llama's template refuses two calls at once."""
    words = ["check", "--model", str(model_of(name)), "--json", "--", sys.executable, str(CLIENTS / "chat_tools.py")]
    done = subprocess.run([sys.executable, "-m", "learner.cli", *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [report[key] for key in ("rounds", "rows", "branch_causes", "errors", "needs", "advice")] == [
        4,
        1,
        [],
        [],
        [],
        [],
    ]
    assert report["tokens_trained"] > 0 and 0 < report["max_logprob_diff"] < 1e-4


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "gemma3"])
def test_codex_instructions_are_in_the_engine_s_prompt(served: Callable[..., ServerThread], name: str) -> None:
    """They come as a developer's, which these templates leave out or refuse. vLLM's renderer tells them as a system's."""
    thread = served(name)
    _, client = thread.lease()
    said: Any = [{"role": "developer", "content": FACT}, USER]
    client.responses.create(model="policy", input=said)
    client.chat.completions.create(model="policy", messages=said)
    assert len(thread.engine.prompts) == 2
    assert all(FACT in thread.tokenizer.decode(prompt) for prompt in thread.engine.prompts)


def test_gemma_4_s_calls_are_continued_through_vllm_s_own_parser_and_renderer(
    served: Callable[..., ServerThread],
) -> None:
    """The template would write the arguments in another order than the model, which ends a call where its result begins."""
    thread = served("gemma4")
    encode, said = (
        thread.tokenizer.encode,
        ["<|tool_call>call:times{b:7,a:6}<tool_call|><|tool_response>", "It is 42.<turn|>"],
    )
    stops = ("<|tool_response>", "<turn|>")
    thread.engine._decode = lambda ids: re.sub(
        f"({'|'.join(map(re.escape, stops))})$", "", thread.tokenizer.decode(ids)
    )
    thread.engine.answer = lambda _: encode(said.pop(0), add_special_tokens=False)
    episode_id, client = thread.lease()
    number = {"type": "integer"}
    parameters = {"type": "object", "properties": {"a": number, "b": number}}
    tools: Any = [{"type": "function", "function": {"name": "times", "description": "", "parameters": parameters}}]
    messages: Any = [USER]
    called = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
    assert called.tool_calls is not None and json.loads(called.tool_calls[0].function.arguments) == {"a": 6, "b": 7}
    messages += [called.model_dump(exclude_none=True), {**RESULT, "tool_call_id": called.tool_calls[0].id}]
    client.chat.completions.create(model="policy", messages=messages, tools=tools)
    first, second = thread.server.episodes.get(episode_id).rounds
    assert second.parent is first
    assert thread.tokenizer.decode(thread.engine.prompts[1]).endswith(
        f'<|tool_call>call:times{{b:7,a:6}}<tool_call|><|tool_response>response:times{{value:<|"|>{FACT}<|"|>}}<tool_response|>'
    )
