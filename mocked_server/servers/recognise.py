"""Finds out which software answers at a URL.

Called by `mocked_server.servers.server_engine` and `choose`. Nothing but two GET requests is asked here.
"""

from __future__ import annotations

from buffers.errors import EngineError
from mocked_server.servers.facts import KEY
from mocked_server.servers.http_client import ServerClient
from mocked_server.servers.sglang_server import SGLangServer
from mocked_server.servers.vllm_server import VLLMServer


async def recognised(client: ServerClient) -> VLLMServer | SGLangServer:
    """The server behind `client`. Raises ServerLost where nobody answers, EngineError for another software."""
    for software in (VLLMServer, SGLangServer):
        if await software.recognise(client) is not None:
            return software(client)
    raise EngineError(
        f"{KEY} must be the URL of a vLLM or SGLang server, got {client.url}, where another program answers: it has neither "
        f"/version nor /model_info; name the server's root, without a path"
    )
