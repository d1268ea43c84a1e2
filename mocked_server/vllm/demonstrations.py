"""Demonstrations as play would record them: the rounds of an episode in which the policy gave a conversation's answers.

Used by the SFT stage (`learner.pipeline`), in a thread of its own. Each answer is a round: its prompt is what the server would ask
the engine with, by the server's own rendering and continuation (`mocked_server.vllm.exact_rendering`); its sampled ids are what the
chat template writes for the answer, up to the token at which the engine stops. So a template that writes earlier turns in another
way starts a new branch, here as in play, and no row has a history that play does not show. Invariant: a conversation is given
whole, or refused with a reason; nothing of an answer is left out silently. It samples and trains nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from buffers.errors import TaskError, UnderstudyError
from buffers.prompt_queue import Response
from buffers.records import Episode, EpisodeScores, Int32, Round, Row, Task
from buffers.tasks.parquet import Trace
from buffers.training_rows import episode_rows
from mocked_server.conversation.chat_history import THOUGHT_BEGINS, THOUGHT_ENDS, Message, joined_text, reply_of
from mocked_server.conversation.continuation import stand_in
from mocked_server.conversation.live_episodes import LiveEpisode, LiveRound, memo_of
from mocked_server.request_context import Call, current_call
from mocked_server.vllm.exact_rendering import SENTINEL, ExactRendering

USER: Message = {"role": "user", "content": "-"}
"""Stands for a history, or for what follows an answer."""


MOST_KEPT = 256
"""Texts of the template, and their tokens, that are kept."""


class Unlearnable(Exception):
    """A conversation cannot be shown as play would; says why."""


class _Renderer:
    """vLLM's renderer without its threads, as `ExactRendering` asks for it. Conversations share much: what it wrote and encoded
    lately is kept."""

    def __init__(self, inner: Any) -> None:
        self._render = inner.render_messages
        self._tokenizer = inner.get_tokenizer()
        self._texts: dict[str, str] = {}
        self.asked: list[Message] = []
        """Messages that a prompt was rendered of: all of its messages, or those that stand for them."""
        self.encode = lru_cache(MOST_KEPT)(partial(self._tokenizer.encode, add_special_tokens=False))

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        return self._render(messages, params)

    async def render_chat_async(self, conversations: Any, params: Any) -> Any:
        self.asked = list(conversations[0])
        return None, [{"prompt_token_ids": list(self.encode(self.text(conversations[0], params)))}]

    def text(self, messages: Sequence[Message], params: Any) -> str:
        """Text of the template."""
        key = json.dumps([messages, params.chat_template_kwargs])
        if key not in self._texts:
            _, prompt = self._render(list(messages), params)
            if "prompt" not in prompt:
                raise Unlearnable("the model's tokenizer gives no text of a chat, only its ids")
            if len(self._texts) >= MOST_KEPT:
                self._texts.clear()
            self._texts[key] = str(prompt["prompt"])
        return self._texts[key]


class DemonstrationRenderer:
    """`renderer`: vLLM's, of the policy's model. `strict`: `server.replay_match` is. `stops`: the tokens at which engines end an
    answer. `last_only`: of each conversation the last answer is trained. `longest`: tokens of a prompt and its answer, at most."""

    def __init__(
        self,
        renderer: Any,
        *,
        strict: bool,
        stops: Iterable[int],
        last_only: bool,
        longest: int,
        refusal: type[Exception],
        make_params: Callable[[Sequence[Mapping[str, Any]] | None], Any],
    ) -> None:
        self._renderer = _Renderer(renderer)
        self._tokenizer = renderer.get_tokenizer()
        self._rendering = ExactRendering(self._renderer, strict=strict, refusal=refusal)
        self._refusal = refusal
        self._stops = frozenset(stops)
        self._stop_texts = [text for text, token in self._tokenizer.get_added_vocab().items() if token in self._stops]
        self._last_only = last_only
        self._longest = longest
        self.causes: Counter[str] = Counter()
        """Answers that did not continue the one before, by cause."""
        self._known: dict[str, Any] = {}
        """The last tools' parameters."""
        self._make_params = make_params
        marks = [text for text in self._tokenizer.get_added_vocab() if text.strip()]
        self._mark = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")

    def rows(self, traces: Iterable[Trace]) -> Iterator[list[Row] | Unlearnable]:
        """The training rows of each conversation, or why it has none."""
        with asyncio.Runner() as runner:  # its own `run` would write all rows as text, for a handler of signals
            for trace in traces:
                yield runner.get_loop().run_until_complete(self._outcome(trace))

    async def _outcome(self, trace: Trace) -> list[Row] | Unlearnable:
        try:
            rounds = await self._rounds(trace)
            return episode_rows(rounds, group_id=0, scores=EpisodeScores(whole=0.0))
        except Unlearnable as error:
            return error
        except (self._refusal, UnderstudyError, ValueError, TypeError, LookupError, AttributeError) as error:
            return Unlearnable(f"it cannot be shown by the chat template: {' '.join(str(error).split())[:300]}")

    async def _rounds(self, trace: Trace) -> list[Round]:
        """Rounds of an episode in which the policy gave the conversation's answers."""
        messages = list(map(_as_asked, deepcopy(trace.messages)))  # vLLM's renderer changes the calls that it is given
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise Unlearnable("it has no message of the assistant")
        if answers[0] == 0:
            raise Unlearnable("it begins with an answer, to which there is no prompt")
        trained = {at for at in answers[-1 if self._last_only else 0 :] if trace.messages[at].get("weight") != 0}
        if not trained or trace.weight == 0.0:
            raise Unlearnable("each of its answers has a weight of 0")
        params = self._params(trace.tools)
        live = LiveEpisode(
            episode=Episode(episode_id="demonstration", task=Task(task_id="-", prompt=[]), group_id=0, sample_index=0)
        )
        self._check_tools(messages[: answers[0]], params)
        rounds = []
        for at in answers:
            rounds.append(await self._round(live, messages, at, params=params, is_trained=at in trained))
            if live.rounds[-1].total > self._longest:
                raise Unlearnable(
                    f"it has {live.rounds[-1].total} tokens up to answer {len(rounds)}, rollout.max_model_len is {self._longest}"
                )
        return rounds

    async def _round(
        self, live: LiveEpisode, messages: list[Message], at: int, *, params: Any, is_trained: bool
    ) -> Round:
        """The round in which message `at` is the answer to those before it."""
        call = Call(live)
        token = current_call.set(call)
        try:
            await self._rendering.render_chat_async([messages[:at]], params)
        finally:
            current_call.reset(token)
        plan = call.continuation
        assert plan is not None and plan.chat is not None, "text prompts of a call have a continuation"
        if plan.cause is not None:
            self.causes[plan.cause.value] += 1
        sampled = self._answer(messages, at, params=params)
        response = Response(
            request_id="", sampled_ids=sampled, logprobs=np.zeros(len(sampled), np.float32),
            versions=np.zeros(len(sampled), np.int32), finish_reason="stop",
        )  # fmt: skip
        round_ = live.tree.add(
            response, prompt_ids=plan.prompt_ids(), parent=plan.parent_index, memo=memo_of(plan.chat, plan.cause),
            trained=np.full(len(sampled), is_trained, np.uint8),
        )  # fmt: skip
        live_round = LiveRound(
            parent=plan.parent, ids=np.concatenate([plan.tail_ids, sampled]), num_sampled=len(sampled),
            finish_reason="stop", text="", asked=plan.chat.asked, cause=plan.cause, said=reply_of(messages[at]),
            round_index=round_.round_index,
        )  # fmt: skip
        live.add_round(live_round, chat=plan.chat)
        return round_

    def _answer(self, messages: list[Message], at: int, *, params: Any) -> Int32:
        """[S] the ids that the policy samples when it gives this answer: with the token that ends it."""
        self._check_words(messages[at])
        asks, body = self._turn(messages[at], at=at, params=params)
        if (reasoning := messages[at].get("reasoning")) and str(reasoning).strip() not in body:
            messages = [*messages[:at], _with_reasoning_within(messages[at])]  # a template may know it as text only
            asks, body = self._turn(messages[at], at=at, params=params)
        for part in _parts(messages[at]):
            if part not in body:
                raise Unlearnable(
                    f"the chat template does not show all of answer {at}: {part[:80]!r} is not in {body[:200]!r}"
                )
        marks = [*self._mark.finditer(asks)]
        ids = self._ids_after(asks[marks[-1].start() if marks else 0 :], body)
        ends = [place for place, token in enumerate(ids) if token in self._stops]
        if ends:
            return np.array(ids[: ends[0] + 1], np.int32)
        closing, following = self._closing(messages, at, params=params)
        body = body.removesuffix(closing)
        ids = self._ids_after(asks[marks[-1].start() if marks else 0 :], body)
        return np.array([*ids, following], np.int32)

    def _ids_after(self, context: str, body: str) -> list[int]:
        """The tokens of `body` where it stands behind `context`; by itself where a token would span the border."""
        before, whole = map(self._renderer.encode, (context, context + body))
        return list(whole[len(before) :] if whole[: len(before)] == before else self._renderer.encode(body))

    def _turn(self, message: Message, *, at: int, params: Any) -> tuple[str, str]:
        """What the template writes up to the answer, and the answer with what ends it, behind what the prompt was rendered of. A
        template may write the last message of the user in another way than earlier ones: then a short history is tried, which must
        end alike."""
        asked = self._renderer.asked
        asks, full = self._text(asked, params, asks=True), self._text([*asked, message], params)
        if full.startswith(asks):
            return asks, full[len(asks) :]
        why = "the chat template does not write it as a continuation of its own prompt"
        for history in (asked, [USER]):
            base, opening, turn = (
                self._text(history, params), self._text(history, params, asks=True),
                self._text([*history, message], params),
            )  # fmt: skip
            if not (opening.startswith(base) and turn.startswith(base) and full.endswith(turn[len(base) :])):
                continue
            opening, turn = opening[len(base) :], turn[len(base) :]
            if turn.startswith(opening):
                return asks, turn[len(opening) :]
            header, opens, thought = opening.partition(THOUGHT_BEGINS)
            if not opens or not turn.startswith(header):
                continue
            said = turn[len(header) :]
            if THOUGHT_ENDS in thought:  # the prompt rules a thought out
                if THOUGHT_BEGINS not in said:
                    return asks, said
                why = "the chat template's prompt leaves no room for its reasoning"
            elif reasoning := _reasoning(message):
                return asks, f"{reasoning}\n{THOUGHT_ENDS}\n\n{said.lstrip()}"
            else:
                why = "the chat template begins each answer with reasoning, and it has none (reasoning_content)"
        raise Unlearnable(f"answer {at}: {why}")

    def _closing(self, messages: list[Message], at: int, *, params: Any) -> tuple[str, int]:
        """What the template writes behind an answer that ends in no token at which engines stop, and the token that ends it all the
        same: the one that opens the next turn, or the tokenizer's own."""
        plain = self._text([USER, {"role": "assistant", "content": SENTINEL}], params).rpartition(SENTINEL)[2]
        opening, _ = stand_in(messages[: at + 1], at + 1, said=SENTINEL)
        calls = opening[-1].get("tool_calls") or ()
        follows = {"role": "tool", "tool_call_id": calls[0].get("id", "-"), "content": "-"} if calls else USER
        ended = self._text(opening, params).rpartition(SENTINEL)[2]
        after = self._text([*opening, follows], params).rpartition(SENTINEL)[2].removeprefix(ended)
        mark = self._mark.match(after.lstrip())
        token = self._tokenizer.get_added_vocab()[mark.group()] if mark else None
        return plain, token if token in self._stops and token is not None else int(self._tokenizer.eos_token_id)

    def _check_words(self, message: Message) -> None:
        text = json.dumps([message.get("content"), _reasoning(message), message.get("tool_calls")], ensure_ascii=False)
        for stop in self._stop_texts:
            if stop in text:
                raise Unlearnable(f"an answer holds {stop!r}, at which engines stop")

    def _check_tools(self, messages: list[Message], params: Any) -> None:
        if params.chat_template_kwargs.get("tools") and self._text(messages, params) == self._text(
            messages, self._params(None)
        ):
            raise Unlearnable("the chat template does not show its tools")

    def _params(self, tools: Sequence[Mapping[str, Any]] | None) -> Any:
        """What vLLM's layer renders a chat with that offers these tools."""
        name = json.dumps(tools)
        if name not in self._known:
            self._known = {name: self._make_params(tools)}
        return self._known[name]

    def _text(self, messages: Sequence[Message], params: Any, *, asks: bool = False) -> str:
        kwargs = {**params.chat_template_kwargs, "add_generation_prompt": asks}
        return self._renderer.text(messages, replace(params, chat_template_kwargs=kwargs))


def _as_asked(message: Message) -> Message:
    """The message of a request: vLLM reads reasoning under one of its two names; a weight is none of its fields."""
    rest = {key: value for key, value in message.items() if key not in ("weight", "reasoning_content", "reasoning")}
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    return rest | ({"reasoning": reasoning} if reasoning else {})


def _with_reasoning_within(message: Message) -> Message:
    text = f"{THOUGHT_BEGINS}\n{_reasoning(message)}\n{THOUGHT_ENDS}\n\n{joined_text(message.get('content'))}"
    return {key: value for key, value in message.items() if key != "reasoning"} | {"content": text}


def _reasoning(message: Message) -> str:
    """Its thought, split off or within its text."""
    before, begins, rest = joined_text(message.get("content")).partition(THOUGHT_BEGINS)
    within = rest.partition(THOUGHT_ENDS)[0] if begins and not before.strip() and THOUGHT_ENDS in rest else ""
    return reply_of(message).reasoning or within.strip()


def _parts(message: Message) -> list[str]:
    """Texts that must stand in the answer as the template writes it."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [joined_text([part]) for part in content or ()]
    pieces = [piece for text in texts for piece in re.split(f"{THOUGHT_BEGINS}|{THOUGHT_ENDS}", text)]
    names = [str((call.get("function") or {}).get("name")) for call in message.get("tool_calls") or ()]
    return [part for part in (*map(str.strip, pieces), reply_of(message).reasoning, *names) if part]


def _chat_params(tools: Sequence[Mapping[str, Any]] | None) -> Any:
    """What vLLM's layer renders a chat with that offers these tools."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(messages=[USER], tools=list(tools) if tools else None)
    offered = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    return request.build_chat_params(None, "auto").with_defaults({"tools": offered, "tokenize": False})


def make_renderer(
    vllm_config: Any, *, strict: bool, last_only: bool, longest: int | None = None, only_loops: bool = False
) -> DemonstrationRenderer:
    """That of a run's model. `longest`: tokens of a prompt and its answer; None: as many as the engine takes. `only_loops`: agent
    loops play alone, which write every chat by the template. Raises TaskError for a model whose chats vLLM renders without one."""
    from vllm.exceptions import VLLMClientError
    from vllm.renderers import renderer_from_config

    config = vllm_config.model_config
    if config.hf_config.model_type == "gpt_oss" and not only_loops:
        raise TaskError(
            "sft.demonstrations needs a model whose chats a template writes, got gpt_oss, whose chats vLLM's own code writes; let "
            "agents.loops play without agents.command, or name another model.path"
        )
    renderer = renderer_from_config(vllm_config)
    ends = (config.try_get_generation_config() or {}).get("eos_token_id")
    stops = [renderer.get_tokenizer().eos_token_id, *(ends if isinstance(ends, list) else [ends])]
    return DemonstrationRenderer(
        renderer, strict=strict, stops=[stop for stop in stops if stop is not None], last_only=last_only,
        longest=longest or config.max_model_len, refusal=VLLMClientError, make_params=_chat_params,
    )  # fmt: skip
