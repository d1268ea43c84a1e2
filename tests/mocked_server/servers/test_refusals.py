"""What cannot be a run's engine is refused at the door, in one line with key, rule, value and remedy."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from buffers.errors import EngineError
from configs.load import ConfigError, load_config
from configs.schema import Config
from mocked_server.servers.choose import check_engine
from tests.support.run_parts import ROOT

pytestmark = pytest.mark.seconds

VOCABULARY = 512


class Fake:
    """A vLLM server's routes, as `answers` has them: path -> (status, JSON), or what makes events of a request."""

    def __init__(self) -> None:
        self.served = VOCABULARY
        config = {
            "parallel_config": {"worker_extension_cls": ""}, "device_config": {"device": "cuda"},
            "cache_config": {"kv_cache_size_tokens": 4096},
            "model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"},
        }  # fmt: skip
        self.config: dict[str, dict[str, Any]] = config
        self.answers: dict[str, Any] = {
            "/version": (200, {"version": "0.32.0"}),
            "/v1/models": (200, {"data": [{"id": "policy", "max_model_len": 4096}]}),
            "/server_info": (200, {"vllm_config": config}),
            "/inference/v1/generate": self.token,
        }

    def token(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        if max(body["token_ids"]) >= self.served:
            return [{"error": {"message": "Token id is out of vocabulary", "code": 400}}]
        content = [{"token_id": 3, "logprob": -0.5, "rank": 1, "top_logprobs": []}]
        choice = {"index": 0, "token_ids": [3], "finish_reason": "length", "logprobs": {"content": content}}
        return [{"choices": [choice]}]


@pytest.fixture
def fake() -> Iterator[tuple[Fake, str]]:
    fake = Fake()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, body: Any) -> None:
            found = fake.answers.get(self.path.partition("?")[0], (404, {"detail": "Not Found"}))
            if callable(found):
                events = [f"data: {json.dumps(event)}\n\n" for event in found(body)]
                status, text = 200, "".join([*events, "data: [DONE]\n\n"])
            else:
                status, text = found[0], json.dumps(found[1])
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield fake, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def refusal(url: str, *, learns: bool = True, **rollout: Any) -> str:
    """The refusal's line; empty: it is taken."""
    config = Config.model_validate({"rollout": {"engine": url, **rollout}})
    told = ""
    try:
        check_engine(config, vocabulary=VOCABULARY, learns=learns)
    except EngineError as error:
        told = str(error)
    assert "\n" not in told and told.startswith("rollout.engine" if told else "")
    return told


def test_a_server_that_can_be_the_engine_is_taken(fake: tuple[Fake, str]) -> None:
    assert refusal(fake[1]) == refusal(fake[1], learns=False) == ""


def without(*paths: str) -> Callable[[Fake], None]:
    return lambda fake: [fake.answers.pop(path) for path in paths] and None


def with_config(section: str, **values: Any) -> Callable[[Fake], None]:
    return lambda fake: fake.config[section].update(values)


def with_vocabulary(number: int) -> Callable[[Fake], None]:
    return lambda fake: setattr(fake, "served", number)


def answering(path: str, answer: Any) -> Callable[[Fake], None]:
    return lambda fake: fake.answers.update({path: answer})


NO_LOGPROBS = [{"choices": [{"index": 0, "token_ids": [3], "finish_reason": "length"}]}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("/version"), ("must be the URL of a vLLM or SGLang server", "neither /version nor /model_info")),
        (without("/server_info"), ("must be a server that takes new weights", "VLLM_SERVER_DEV_MODE=1", "understudy eval")),
        (with_config("device_config", device="cpu"), ("takes new weights", "--worker-extension-cls mocked_server.")),
        (answering("/inference/v1/generate", (403, {"error": {"message": "use --enable-scale-out"}})), ("--enable-scale-out",)),
        (answering("/inference/v1/generate", lambda _: NO_LOGPROBS), ("must give a log-probability for each token",)),
        (answering("/inference/v1/generate", lambda _: []), ("must give each token's id",)),
        (with_vocabulary(400), ("vocabulary of 512", "token id 511", "serve the same model")),
        (with_vocabulary(600), ("vocabulary of 512 tokens", "which has more")),
        (answering("/v1/models", (500, {"error": {"message": "broken"}})), ("cannot be used", "500: broken")),
        (answering("/v1/models", (200, {"models": []})), ("which answers what cannot be",)),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_the_engine_is_refused(
    fake: tuple[Fake, str], change: Callable[[Fake], None], words: tuple[str, ...]
) -> None:
    change(fake[0])
    told = refusal(fake[1])
    assert all(word in told for word in words), told


def test_lengths_and_log_probabilities_must_be_those_of_the_run(fake: tuple[Fake, str]) -> None:
    assert "set rollout.max_model_len=4096" in refusal(fake[1], max_model_len=8192)
    fake[0].config["model_config"]["logprobs_mode"] = "raw_logprobs"
    assert refusal(fake[1]) == "", "at temperature 1 they are the same"
    assert "--logprobs-mode processed_logprobs" in refusal(fake[1], temperature=0.5)
    assert refusal(fake[1], temperature=0.5, learns=False) == ""


def dtype_refusal(url: str, dtype: str, *, learns: bool = True) -> str:
    config = Config.model_validate({"rollout": {"engine": url}, "model": {"dtype": dtype}})
    try:
        check_engine(config, vocabulary=VOCABULARY, learns=learns)
    except EngineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("software", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("served", "dtype", "words"),
    [
        ("bfloat16", "float32", "must compute in model.dtype=float32, as the learner does"),
        ("float32", "bfloat16", "which computes in float32; start it with --dtype bfloat16"),
        ("float16", "bfloat16", "which computes in float16"),
        ("bfloat16", "bfloat16", ""),
    ],
)
def test_a_server_computes_in_the_number_format_of_the_run(
    fake: tuple[Fake, str], software: str, served: str, dtype: str, words: str
) -> None:
    if software == "sglang":
        become_sglang(fake[0], dtype=served)
    else:
        fake[0].config["model_config"]["dtype"] = f"torch.{served}"
    told = dtype_refusal(fake[1], dtype)
    assert words in told and bool(told) == bool(words)
    assert dtype_refusal(fake[1], dtype, learns=False) == "", "what it serves is what is evaluated"


def test_a_format_that_is_left_to_sglang_is_never_float32(fake: tuple[Fake, str]) -> None:
    become_sglang(fake[0], dtype="auto")
    assert "computes in float16 or bfloat16; start it with --dtype float32" in dtype_refusal(fake[1], "float32")
    assert dtype_refusal(fake[1], "bfloat16") == ""
    del fake[0].answers["/server_info"][1]["dtype"]
    assert dtype_refusal(fake[1], "float32") == "", "it does not say"


def become_sglang(fake: Fake, *, dtype: str) -> None:
    def token(body: dict[str, Any]) -> list[dict[str, Any]]:
        if max(body["input_ids"]) >= VOCABULARY:
            return [{"error": {"message": "Token id is out of vocabulary", "code": 400}}]
        reason = {"type": "length", "length": 1}
        told = {"id": "a", "finish_reason": reason, "completion_tokens": 1, "cached_tokens": 0, "weight_version": "0"}
        told |= {"output_token_logprobs": [[-0.5, 3, None]], "output_top_logprobs": [[[-0.5, 3, None]]]}
        return [{"text": "", "output_ids": [3], "meta_info": told}]

    fake.answers = {
        "/model_info": (200, {"model_path": "policy"}),
        "/server_info": (
            200,
            {"version": "0.5.23", "context_length": 4096, "max_total_num_tokens": 4096, "dtype": dtype},
        ),
        "/generate": token,
    }


def test_what_takes_no_weights_plays_evaluations(fake: tuple[Fake, str]) -> None:
    del fake[0].answers["/server_info"]
    assert refusal(fake[1], learns=False) == ""


def test_nobody_and_nothing_installed() -> None:
    assert "got http://127.0.0.1:1, where nobody answers" in refusal("http://127.0.0.1:1")
    assert "rollout.engine=sglang needs the package sglang" in refusal("sglang")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.engine=vlm"], "rollout.engine must be vllm, sglang or the URL of a running server"),
        (["rollout.engine=http://x:1/v1"], "rollout.engine must be the root of a server"),
        (["rollout.engine=http://x:1", "rollout.engines=2"], "rollout.engines=2 with rollout.engine=http://x:1"),
        (["rollout.engine=http://x:1", "rollout.tensor_parallel=2"], "rollout.tensor_parallel=2"),
        (["rollout.engine=sglang", "rollout.engine_args={max_num_seqs: 3}"], "rollout.engine_args"),
        (["rollout.engine=sglang", "rollout.sleep=true", "buffer.max_policy_lag=0"], "set rollout.sleep=false"),
        (["rollout.engine=sglang", "learner.lora.rank=8"], "set learner.lora.rank=0, or rollout.engine=vllm"),
    ],
)
def test_keys_that_a_server_has_no_use_for_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(ROOT / "configs/demo.yaml", overrides)
    assert words in str(refused.value) and "\n" not in str(refused.value)
