"""A server that starts a real engine once it is told to, for tests/mocked_server/vllm/process/test_fork_server.py: which is
killed meanwhile, or gives it up."""

import asyncio
import os
import sys
from pathlib import Path


def main(model: str, method: str) -> None:
    from configs.schema import RolloutConfig, ServerConfig
    from mocked_server.vllm.engine import VLLMEngine, import_engine, start_fork_server
    from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config

    if method == "fork server":
        start_fork_server()
    else:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
        import_engine()
    settings = EngineSettings(
        model_path=Path(model),
        served_name="policy",
        dtype="float32",
        rollout=RolloutConfig(max_tokens=256, max_model_len=1024, kv_cache_gb=0.0625),
        server=ServerConfig(),
    )
    engine = VLLMEngine(make_vllm_config(make_args(settings)))
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(start(engine))


async def start(engine) -> None:
    starting = asyncio.create_task(engine.start())
    told = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()
        print("up", flush=True)
        return
    starting.cancel()
    await asyncio.wait({starting})
    await engine.close()
    print("given up", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
