"""A server with SGLang's native routes, whose tokens a real model samples (transformers, on a CPU); a program with
SGLang's own arguments.

It takes no field that SGLang does not have (`sglang_names`), pauses in the mode `retract`, loads folders, and labels tokens as
SGLang does: `weight_versions` in the last message of an answer alone. A message repeats what came before, unless the program is
started with `--incremental-streaming-output`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM

from tests.mocked_server.servers.sglang_names import ARGUMENTS, GENERATE, PAUSE, SAMPLING, UPDATE, check_body

WHOLE = 1 << 30


class Scripted:
    """The server's state: a model, its version, and whether it is paused."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.model = AutoModelForCausalLM.from_pretrained(arguments.model_path, dtype=torch.float32).eval()
        self.version = arguments.weight_version
        self.path = arguments.model_path
        self.running = asyncio.Event()
        self.running.set()
        self.num_under_way = 0

    # Routes

    async def model_info(self, _: Request) -> Response:
        return JSONResponse({"model_path": self.path, "is_generation": True, "weight_version": self.version})

    async def server_info(self, _: Request) -> Response:
        return JSONResponse(
            {"version": "0.5.23", "context_length": self.arguments.context_length, "max_total_num_tokens": 4096,
             "dtype": "float32", "internal_states": [{"running": self.num_under_way}]}
        )  # fmt: skip

    async def health(self, _: Request) -> Response:
        return Response(status_code=200)

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        try:
            check_body(body, GENERATE)
            check_body(body["sampling_params"], SAMPLING)
            ids, vocabulary = body["input_ids"], self.model.config.vocab_size
            for token in ids:
                if not 0 <= token < vocabulary:
                    raise ValueError(f"input_ids contains {token}; valid range is [0, {vocabulary}).")
        except ValueError as error:
            told = {"error": {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}}
            return StreamingResponse(_events([told]), media_type="text/event-stream")
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def pause(self, request: Request) -> Response:
        body = await request.json()
        check_body(body, PAUSE)
        assert body["mode"] == "retract"
        self.running.clear()
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        check_body(await request.json(), {})
        self.running.set()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update(self, request: Request) -> Response:
        body = await request.json()
        check_body(body, UPDATE)
        assert not self.running.is_set(), "weights change while nothing is sampled"
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            told = {"success": False, "message": "Failed to get weights iterator: no files", "num_paused_requests": 0}
            return JSONResponse(told, status_code=400)
        for file in files:
            self.model.load_state_dict(load_file(file), strict=False)
        self.model.tie_weights()
        self.version, self.path = body["weight_version"], body["model_path"]
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    # Sampling

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        params, prompt = body["sampling_params"], body["input_ids"]
        generator = torch.Generator().manual_seed(params.get("sampling_seed", hash(body["rid"]) % 2**31))
        sampled: list[int] = []
        logprobs: list[list[Any]] = []
        tops: list[list[list[Any]]] = []
        starts: list[tuple[str, int]] = []
        finish: dict[str, Any] | None = None
        self.num_under_way += 1
        try:
            while finish is None:
                await self.running.wait()
                if not starts or starts[-1][0] != self.version:
                    starts.append((self.version, len(sampled)))
                table = self._table([*prompt, *sampled], params)
                token = int(
                    table.argmax()
                    if params["temperature"] == 0
                    else torch.multinomial(table.exp(), 1, generator=generator)
                )
                sampled.append(token)
                logprobs.append([float(table[token]), token, None])
                best = table.topk(max(1, body["top_logprobs_num"]))
                tops.append([[value, at, None] for value, at in zip(best.values.tolist(), best.indices.tolist())])
                finish = self._finish(token, len(sampled), params)
                start = len(sampled) - 1 if self.arguments.incremental_streaming_output else 0
                meta: dict[str, Any] = {
                    "id": body["rid"], "finish_reason": finish, "prompt_tokens": len(prompt), "cached_tokens": 0,
                    "completion_tokens": len(sampled), "weight_version": self.version, "output_token_logprobs": logprobs[start:],
                }  # fmt: skip
                if body["top_logprobs_num"]:
                    meta["output_top_logprobs"] = tops[start:]
                if finish is not None:
                    ends = [at for _, at in starts[1:]] + [len(sampled)]
                    meta["weight_versions"] = [
                        {"version": version, "start": at, "end": end} for (version, at), end in zip(starts, ends)
                    ]
                event = {"text": "", "output_ids": sampled[start:], "meta_info": meta}
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
                await asyncio.sleep(0)
            yield b"data: [DONE]\n\n"
        finally:
            self.num_under_way -= 1

    def _table(self, ids: list[int], params: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, -1]
        return torch.log_softmax(logits / (params["temperature"] or 1.0), dim=-1)

    def _finish(self, token: int, number: int, params: dict[str, Any]) -> dict[str, Any] | None:
        ends = self.model.generation_config.eos_token_id
        known = {ends} if isinstance(ends, int) else set(ends or ())
        if not params["ignore_eos"] and token in known | set(params.get("stop_token_ids", ())):
            return {"type": "stop", "matched": token}
        return {"type": "length", "length": number} if number >= params["max_new_tokens"] else None


async def _events(told: list[dict[str, Any]]) -> AsyncIterator[bytes]:
    for event in told:
        yield b"data: " + json.dumps(event).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in sorted(ARGUMENTS):
        if name.startswith("--enable-"):
            parser.add_argument(name, action="store_true")
            continue
        kind = int if name in ("--port", "--context-length", "--tp-size") else str
        parser.add_argument(name, type=kind, default="0" if name == "--weight-version" else None)
    parser.add_argument("--incremental-streaming-output", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    server = Scripted(arguments)
    routes = [
        Route("/model_info", server.model_info),
        Route("/server_info", server.server_info),
        Route("/health", server.health),
        Route("/generate", server.generate, methods=["POST"]),
        Route("/pause_generation", server.pause, methods=["POST"]),
        Route("/continue_generation", server.resume, methods=["POST"]),
        Route("/update_weights_from_disk", server.update, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
