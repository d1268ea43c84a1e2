"""What the server relies on inside vLLM, one test for each: a new version of vLLM that moves something says here what it was."""

from __future__ import annotations

import inspect

import pytest

from configs.schema import RolloutConfig, ServerConfig
from mocked_server.vllm import engine_arguments
from mocked_server.vllm.engine_arguments import EngineSettings, make_args


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_http_layer_is_built_by_two_functions():
    from vllm.entrypoints.openai.api_server import build_app, init_app_state

    assert parameters(build_app)[:3] == ["args", "supported_tasks", "model_config"]
    assert parameters(init_app_state)[:4] == ["engine_client", "state", "args", "supported_tasks"]


def test_the_serving_layer_renders_with_the_clients_renderer(served):
    client = served.server._client
    state = served.serving_state()
    for part in (state.openai_serving_chat, state.openai_serving_responses, state.anthropic_serving_messages):
        assert part.renderer is client.renderer, type(part).__name__
        assert part.online_renderer.renderer is client.renderer, type(part).__name__


def test_every_chat_is_rendered_by_render_chat_async(served):
    from vllm.renderers.base import BaseRenderer

    assert parameters(BaseRenderer.render_chat_async)[1:4] == ["conversations", "chat_params", "tok_params"]
    assert parameters(BaseRenderer.render_messages_async)[1:3] == ["messages", "params"]
    assert served.server._client.renderer.render_chat_async == served.server._client.rendering.render_chat_async


def test_a_chat_is_rendered_with_its_tools_and_its_choice():
    from vllm.renderers import ChatParams

    params = ChatParams(chat_template_kwargs={"tools": []}, tool_choice="auto")
    assert (params.chat_template_kwargs, params.tool_choice) == ({"tools": []}, "auto")


def test_answers_are_parsed_by_one_class(tools_server):
    state = tools_server.serving_state()
    parser = state.online_renderer.parser
    assert parameters(parser.parse)[1:4] == ["model_output", "request", "enable_auto_tools"]
    assert state.openai_serving_chat.parser_cls.tool_parser_cls is parser.tool_parser_cls
    assert state.openai_serving_chat.parser_cls.reasoning_parser_cls is parser.reasoning_parser_cls


def test_outputs_carry_the_versions_of_their_tokens():
    from vllm.outputs import CompletionOutput, WeightVersionSpan

    assert "weight_versions" in parameters(CompletionOutput)
    assert parameters(WeightVersionSpan) == ["version", "start", "end"]


def test_generators_are_settled_after_each_sample():
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "self.discard_request_mask.np" in inspect.getsource(GPUModelRunner._bookkeeping_sync)
    assert "self.input_batch.generators.get" in inspect.getsource(GPUModelRunner._bookkeeping_sync)
    assert "self.generators" in inspect.getsource(InputBatch)
    assert parameters(GPUModelRunner._sample) == ["self", "logits", "spec_decode_metadata"]


def test_all_routes_ask_one_function_how_many_tokens_are_left():
    from vllm.entrypoints.openai.chat_completion import serving as chat
    from vllm.entrypoints.openai.completion import serving as completion
    from vllm.entrypoints.openai.responses import serving as responses
    from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

    assert parameters(get_max_tokens)[:3] == ["max_model_len", "max_tokens", "input_length"]
    for route in (chat, completion, responses):
        assert "get_max_tokens(\n" in inspect.getsource(route)
    assert parameters(responses.OpenAIServingResponses._validate_generator_input) in (["self", "engine_input"], ["_"])


def test_sampling_parameters_have_the_names_that_are_pinned():
    from vllm.sampling_params import SamplingParams

    params = SamplingParams()
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "logprobs",
        "n",
        "extra_args",
        "structured_outputs",
    ):
        assert hasattr(params, name), name


def test_lengths_and_several_greedy_answers_are_judged_by_two_methods():
    from vllm.renderers.params import TokenizeParams
    from vllm.sampling_params import SamplingParams

    assert "max_output_tokens > max_total_tokens" in inspect.getsource(inspect.getmodule(TokenizeParams))
    assert "self._verify_greedy_sampling()" in inspect.getsource(SamplingParams.__post_init__)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_every_dialect_generates_through_the_client(served, path):
    _, client = served.lease()
    asks = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    body = {"model": "policy", "max_tokens": 8, **({"input": "Hi"} if path == "/v1/responses" else asks)}
    with served.http(client.api_key) as http:
        assert http.post(path, json=body).status_code == 200
    assert len(served.engine.prompts) == 1


def test_the_routes_of_the_model_api_exist(served):
    from mocked_server.http.dialects import SERVED

    assert {route.path for route in served.serving_app().router.routes} == set(SERVED)


def test_statistics_of_requests_are_kept_for_any_logger():
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import RequestStateStats

    assert {"disable_log_stats", "stat_loggers"} <= set(parameters(AsyncLLM.from_vllm_config))
    assert RequestStateStats().num_preemptions == 0


def test_tool_parsers_are_made_by_name_and_say_how_a_call_begins():
    from vllm.tool_parsers import ToolParserManager

    from agents.loops.vllm_tool_parsers import MARKS

    assert {"hermes", "llama3_json", "qwen3_xml", "mistral", "deepseek_v3"} <= set(ToolParserManager.list_registered())
    parser = ToolParserManager.get_tool_parser("hermes")
    assert parameters(parser.extract_tool_calls)[1:] == ["model_output", "request"]
    assert "<tool_call>" in [getattr(parser, name, None) for name in MARKS]


def test_what_reaches_the_engines_sockets_is_not_unpickled(tmp_path):
    """vLLM's messages may carry pickles, unless VLLM_ALLOW_INSECURE_SERIALIZATION is off."""
    import pickle

    from msgspec import msgpack
    from vllm import envs
    from vllm.v1 import serial_utils
    from vllm.v1.engine import EngineCoreOutputs

    class Touch:
        def __reduce__(self):
            return type(tmp_path).touch, (tmp_path / "touched",)

    assert not envs.VLLM_ALLOW_INSECURE_SERIALIZATION
    for kind in (serial_utils.CUSTOM_TYPE_PICKLE, serial_utils.CUSTOM_TYPE_CLOUDPICKLE):
        message = msgpack.encode([0, [], None, 0.0, msgpack.Ext(kind, pickle.dumps(Touch()))])
        for expected in (None, EngineCoreOutputs):
            with pytest.raises((NotImplementedError, ValueError)):
                serial_utils.MsgpackDecoder(expected).decode([message])
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(("gpu", "sleep", "enabled"), [(True, True, True), (True, False, False), (False, True, False)])
def test_the_engine_can_sleep_where_it_is_told_to_and_there_is_a_gpu(tmp_path, monkeypatch, gpu, sleep, enabled):
    monkeypatch.setattr(engine_arguments, "has_gpu", lambda: gpu)
    rollout, server = RolloutConfig(sleep=sleep), ServerConfig()
    settings = EngineSettings(
        model_path=tmp_path, served_name="policy", dtype="float32", rollout=rollout, server=server
    )
    assert make_args(settings).enable_sleep_mode is enabled


def test_a_sleeping_engine_keeps_its_requests():
    from vllm.v1.engine.async_llm import AsyncLLM

    assert list(inspect.signature(AsyncLLM.sleep).parameters) == ["self", "level", "mode"]


def test_generation_freezes_by_a_call_of_the_engines_core():
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.engine.core_client import AsyncMPClient

    assert parameters(AsyncMPClient.pause_scheduler_async)[1:] == ["mode", "clear_cache"]
    assert hasattr(BaseRenderer, "clear_mm_cache_async")


def test_what_an_engine_says_is_received_by_one_call_of_its_socket():
    from vllm.v1.engine.core_client import AsyncMPClient

    source = inspect.getsource(AsyncMPClient._ensure_output_queue_task)
    assert "output_socket = resources.output_socket" in source
    assert source.count("output_socket.") == 1 and "await output_socket.recv_multipart(copy=False)" in source


def test_what_a_cpu_packs_of_a_layer_is_held_by_one_attribute():
    from vllm.model_executor.layers import utils

    assert "return layer.cpu_linear(x, weight, bias)" in inspect.getsource(utils.cpu_unquantized_gemm)


def test_the_last_message_of_a_start_has_a_timeout_of_its_own():
    from vllm.v1.engine import core_client

    assert "VLLM_ENGINE_READY_TIMEOUT_S * 1000" in inspect.getsource(core_client.MPClient.__init__)
    assert isinstance(core_client.VLLM_ENGINE_READY_TIMEOUT_S, int)


def test_an_engines_processes_meet_where_these_functions_say():
    from vllm.v1 import utils as addresses
    from vllm.v1.engine import utils
    from vllm.v1.executor import uniproc_executor

    assert "get_open_zmq_ipc_path()" in inspect.getsource(utils) and "get_mp_context()" in inspect.getsource(utils)
    assert "get_open_zmq_ipc_path()" in inspect.getsource(addresses)
    assert "get_file_store_init_method()" in inspect.getsource(uniproc_executor)


def test_how_an_engine_ended_is_known_of_its_processes():
    from vllm.v1.engine import core_client, utils
    from vllm.v1.request import RequestStatus

    assert "self.processes" in inspect.getsource(utils.CoreEngineProcManager.__init__)
    assert core_client.BackgroundResources.engine_dead is False
    assert str(RequestStatus.get_finished_reason(RequestStatus.FINISHED_ABORTED)) == "abort"


def test_an_adapter_is_named_numbered_and_lies_in_a_folder():
    from vllm.lora.request import LoRARequest

    request = LoRARequest(lora_name="policy-v1", lora_int_id=1, lora_path="folder")
    assert (request.lora_name, request.lora_int_id, request.lora_path) == ("policy-v1", 1, "folder")
