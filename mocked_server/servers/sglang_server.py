"""SGLang's HTTP server as an engine: its native routes, requests and replies.

Called by `mocked_server.servers.server_engine`. Tokens come from `/generate` with `input_ids` and `return_logprob`; weights from
`/update_weights_from_disk`, between `/pause_generation` in the mode `retract` (what runs goes back into the queue, and is computed
again under the new weights) and `/continue_generation`. The names are those of sglang 0.5.23; tests/mocked_server/servers holds
them to its published classes. Log-probabilities are those after the temperature, unless the server has
SGLANG_RETURN_ORIGINAL_LOGPROB in its environment, which it does not tell.

Invariant: a message of the server's is read once, whether its streams repeat what came before (the default) or not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from buffers.disk import end_of
from buffers.errors import EngineDied, EngineError, RequestRefused
from configs.schema import Config
from mocked_server.servers.http_client import KEY, ServerClient, ServerFacts, ServerLost, ServerRefused
from mocked_server.vllm.engine_requests import Completion, Tokens

NOT_HERE = ("structured_outputs", "bad_words", "allowed_token_ids", "logprob_token_ids", "thinking_token_budget")
"""Fields of vLLM's SamplingParams that SGLang has in another form, or not at all."""
DTYPES = {"auto": ["float16", "bfloat16"], "half": ["float16"], "float": ["float32"]}
"""Its names for number formats that are not torch's; `auto` is the model's own, unless that is float32."""


class SGLangServer:
    """One server, with the methods of `VLLMServer`."""

    alive = "/model_info"
    answers = "/health"  # it samples one token for it

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    @classmethod
    async def recognise(cls, client: ServerClient) -> str | None:
        """The path of its model; None: another server answers."""
        try:
            info = await client.get("/model_info", timeout_s=30.0)
        except ServerRefused:
            return None
        return str(info["model_path"]) if isinstance(info, dict) and "model_path" in info else None

    async def identify(self) -> ServerFacts:
        """What it says of itself."""
        info = await self._client.get("/server_info")
        dtype = info.get("dtype")
        return ServerFacts(
            software=f"SGLang {info.get('version', '')}".strip(),
            max_model_len=info.get("context_length"),
            kv_capacity=int(info.get("max_total_num_tokens") or 0),
            dtypes=DTYPES.get(dtype, [dtype]) if dtype else (),
        )

    def check(self, params: Any) -> None:
        """Raises RequestRefused for what SGLang cannot do, or does otherwise than vLLM."""
        for name in NOT_HERE:
            if getattr(params, name):
                raise RequestRefused(f"{name} cannot be had from SGLang, which {KEY} names; leave it out", field=name)
        if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
            raise RequestRefused(
                f"prompt_logprobs cannot be had from the server that {KEY} names; leave them out",
                field="prompt_logprobs",
            )
        if params.ignore_eos and params.stop_token_ids:
            raise RequestRefused(
                "stop_token_ids have no effect beside ignore_eos with SGLang; leave one of them out",
                field="stop_token_ids",
            )
        if params.logprobs == -1:
            raise RequestRefused(
                "logprobs must be at most 20 with SGLang, got -1, the whole vocabulary; ask for fewer", field="logprobs"
            )

    async def sample(self, completion: Completion) -> AsyncGenerator[Tokens, None]:
        """Sample one completion. Raises ServerLost, ServerRefused."""
        params = completion.params
        body = {
            "rid": completion.id,
            "input_ids": completion.prompt_token_ids,
            "sampling_params": wire_params(params),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": params.logprobs or 0,
            "stream": True,
        }
        num_read = 0
        async with aclosing(self._client.events("/generate", body)) as events:
            async for event in events:
                tokens = tokens_of(event, params, num_read=num_read)
                num_read += len(tokens.token_ids)
                if tokens.token_ids or tokens.finish_reason is not None:
                    yield tokens

    async def pause(self) -> None:
        """Put what it samples back into its queue."""
        await self._client.post("/pause_generation", {"mode": "retract"})

    async def load(self, folder: Path, *, version: int) -> None:
        """Load the weights of a folder, drop its cached keys and values, and label tokens with `version` from now on."""
        reply = await self._client.post(
            "/update_weights_from_disk",
            {
                "model_path": str(folder),
                "weight_version": str(version),
                "flush_cache": True,
                "abort_all_requests": False,
            },
        )
        if not reply.get("success"):
            raise ServerRefused(400, str(reply.get("message")))

    async def resume(self) -> None:
        """Undo `pause`."""
        await self._client.post("/continue_generation", {})


def wire_params(params: Any) -> dict[str, Any]:
    """vLLM's SamplingParams in SGLang's names. Everything is said: a server may prefer values of its own for what is left out."""
    wire = {
        "max_new_tokens": params.max_tokens,
        "min_new_tokens": params.min_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "n": 1,
    }
    if params.stop:
        wire["stop"] = params.stop
    if params.stop_token_ids:
        wire["stop_token_ids"] = params.stop_token_ids
    if params.seed is not None:
        wire["sampling_seed"] = params.seed
    if params.logit_bias:
        wire["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return wire


def tokens_of(event: Mapping[str, Any], params: Any, *, num_read: int) -> Tokens:
    """What an event has beyond the first `num_read` tokens. Raises EngineError for tokens without log-probabilities, ServerRefused
    for a request that SGLang gave up."""
    meta = event["meta_info"]
    ids, done = event["output_ids"], meta["completion_tokens"]
    entries = meta.get("output_token_logprobs") or []
    tops = meta.get("output_top_logprobs") or []
    repeats = len(ids) == done  # else it has the new ones only
    start = num_read if repeats else 0
    new, entries, tops = ids[start:], entries[start:], tops[start:]
    if num_read + len(new) != done or [entry[1] for entry in entries[: len(new)]] != new:
        raise EngineError(
            f"{KEY} must give a log-probability for each token, got {len(new)} tokens after {num_read} of {done}, with "
            f"{len(entries)} log-probabilities"
        )
    rows = [[(int(entry[1]), float(entry[0]))] for entry in entries[: len(new)]]
    num_top = params.logprobs or 0
    for row, top in zip(rows, tops):
        row += [(int(entry[1]), float(entry[0])) for entry in (top or [])[:num_top]]
    rows = [row + row[-1:] * (1 + num_top - len(row)) for row in rows]
    finish = meta.get("finish_reason")
    if finish and finish["type"] == "abort" and finish.get("status_code"):
        raise ServerRefused(int(finish["status_code"]), str(finish.get("message")))
    spans = meta.get("weight_versions")
    return Tokens(
        token_ids=new,
        logprobs=rows,
        ranks=[1 + sum(value > row[0][1] for _, value in row[1:]) if num_top else 0 for row in rows],
        finish_reason=None if finish is None else finish["type"],
        stop_reason=None if finish is None else _stop_reason(finish, params),
        versions=None if spans is None else [(span["version"], span["start"]) for span in spans],
        num_cached_tokens=meta.get("cached_tokens"),
    )


def _stop_reason(finish: Mapping[str, Any], params: Any) -> int | str | None:
    """The stop string or token that was asked for; the end of the text is no reason, as with vLLM."""
    matched = finish.get("matched")
    if isinstance(matched, int) and matched not in (params.stop_token_ids or ()):
        return None
    return matched if isinstance(matched, int | str) else None


# An SGLang server as a child process: its command line, its start and its end. The server listens on loopback, on a port that
# was free; its output goes to a file in the run's folder. Invariant: the process ends with the run, however that ends.

START_S = 1200.0
"""Most seconds of a start: a large model is read, and graphs are captured."""
LOOK_S = 0.5
END_S = 10.0
LOG_TAIL_CHARS = 600
MODULE = ("-m", "sglang.launch_server")
WITH_PARENT = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Becomes another program that the kernel ends with its parent (PR_SET_PDEATHSIG): no killed run leaves its cards taken."""


@dataclass(eq=False)
class SGLangProcess:
    """One server. `program`: what is started, with SGLang's arguments after it."""

    begins_with_model = True

    config: Config
    _: KW_ONLY
    model: Path
    devices: Sequence[str]
    log: Path
    program: Sequence[str] = (sys.executable, *MODULE)

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> str:
        """Its URL, once it answers. Raises EngineDied when a signal ended it meanwhile, EngineError with the end of its log when it
        ended by itself."""
        with (
            socket.socket() as held
        ):  # nobody else is given the port; SGLang says SO_REUSEADDR as well, and may have it
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            port = int(held.getsockname()[1])
            self._process = self._start_process(port)
            return await self._answering(f"http://127.0.0.1:{port}")

    async def _answering(self, url: str) -> str:
        """The URL, once the process answers there."""
        client = ServerClient(url)
        try:
            async with asyncio.timeout(START_S):
                while not await _answers(client):
                    self._check_alive()
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise EngineError(f"SGLang must answer within {START_S:.0f} s, got nothing; see {self.log}") from error
        finally:
            await client.close()
        return url

    def _start_process(self, port: int) -> subprocess.Popen[bytes]:
        """Runs in the main thread, which the process is bound to."""
        command = [*self.program, *arguments(self.config, model=self.model, port=port)]
        if sys.platform == "linux":
            command = [sys.executable, "-c", WITH_PARENT, *command]
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {})}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _check_alive(self) -> None:
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            kind = EngineDied if code < 0 else EngineError
            tail = " ".join(end_of(self.log, chars=LOG_TAIL_CHARS).split())
            raise kind(f"SGLang ended with code {code} while it started; the end of {self.log}: {tail}")

    @property
    def has_ended(self) -> bool:
        """Its process is gone."""
        return self._process is not None and self._process.poll() is not None

    async def end(self) -> None:
        """End it and its processes."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, END_S)


def arguments(config: Config, *, model: Path, port: int) -> list[str]:
    """SGLang's arguments for an engine of this run."""
    rollout = config.rollout
    words = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", config.model.dtype]
    words += ["--context-length", str(rollout.max_model_len), "--tp-size", str(rollout.tensor_parallel)]
    words += ["--random-seed", str(config.run.seed), "--weight-version", "0", "--log-level", "warning"]
    words += ["--trust-remote-code"] if config.model.trust_remote_code else []
    if rollout.gpu_memory_utilization is not None:
        words += ["--mem-fraction-static", str(rollout.gpu_memory_utilization)]
    if config.model.dtype != "float32":
        words += ["--enable-fp32-lm-head"]  # logits as the learner's, see docs/numerics.md
    return words


async def _answers(client: ServerClient) -> bool:
    """True if it takes requests."""
    try:
        await client.get("/health", timeout_s=60.0)
    except (ServerLost, ServerRefused):
        return False
    return True
