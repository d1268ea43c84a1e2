"""SGLang's names as of 0.5.23, of all that is sent to it, read from it, or answered by the scripted server.

tests/mocked_server/servers/test_sglang_wheel.py holds them to the classes of the published wheel.
"""

from __future__ import annotations

GENERATE = {
    "rid": str,
    "input_ids": list,
    "sampling_params": dict,
    "return_logprob": bool,
    "logprob_start_len": int,
    "top_logprobs_num": int,
    "stream": bool,
}
"""Fields of `GenerateReqInput` with their types."""
SAMPLING = {
    "max_new_tokens": int,
    "min_new_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "ignore_eos": bool,
    "skip_special_tokens": bool,
    "no_stop_trim": bool,
    "n": int,
    "stop": list,
    "stop_token_ids": list,
    "sampling_seed": int,
    "logit_bias": dict,
}
"""Fields of `SamplingParams`."""
PAUSE = {"mode": str}
"""Fields of `PauseGenerationReqInput`."""
UPDATE = {"model_path": str, "weight_version": str, "flush_cache": bool, "abort_all_requests": bool}
"""Fields of `UpdateWeightFromDiskReqInput`."""
CLASSES = {
    "GenerateReqInput": GENERATE,
    "PauseGenerationReqInput": PAUSE,
    "ContinueGenerationReqInput": {},
    "UpdateWeightFromDiskReqInput": UPDATE,
}
"""Classes of sglang/srt/managers/io_struct.py."""
ROUTES = (
    "/model_info",
    "/server_info",
    "/health",
    "/generate",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
)
META = (
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_version",
    "weight_versions",
    "output_token_logprobs",
    "output_top_logprobs",
)
"""Keys of `meta_info` in a message of /generate."""
UPDATED = ("success", "message", "num_paused_requests")
"""Keys of the answer of /update_weights_from_disk."""
ARGUMENTS = {
    "--model-path",
    "--host",
    "--port",
    "--dtype",
    "--context-length",
    "--tp-size",
    "--enable-fp32-lm-head",
    "--random-seed",
    "--weight-version",
    "--log-level",
    "--mem-fraction-static",
}
"""Arguments of `python -m sglang.launch_server`."""


def check_body(body: dict[str, object], fields: dict[str, type]) -> None:
    """Raises ValueError for a field that SGLang does not have, or has of another type."""
    for name, value in body.items():
        kind = fields.get(name)
        right = isinstance(value, int | float) if kind is float else isinstance(value, kind or ())
        if not right or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{name} must be a field of type {kind}, got {value!r}")
