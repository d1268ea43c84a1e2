"""RFC #1172's `rollout`: a synchronous engine for programs that drive the loop themselves.

    batch = next(prompt_dataloader_iter)              # prompts that wait in the MockedServer
    responses = rollout.generate_sequences(batch)
    train_dataset.put_batch(batch.union(responses))   # stored, and answered on the waiting connections

The pipeline does not use it: there, `mocked_server.generation` streams each answer as it is sampled.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from buffers.buffer_dataset import PromptBatch
from buffers.prompt_queue import Prompt, Response
from mocked_server.request_context import AnswerRecorder
from mocked_server.vllm.engine import VLLMEngine
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config, set_process_environment

T = TypeVar("T")


class VLLMRollout:
    """A vLLM engine with blocking calls, on an event loop in a thread of its own. Use as a context manager."""

    def __init__(self, settings: EngineSettings) -> None:
        set_process_environment()
        self.engine = VLLMEngine(make_vllm_config(make_args(settings)))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)

    def __enter__(self) -> VLLMRollout:
        self._thread.start()
        with _program_not_run_again():
            self.wait(self.engine.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate_sequences(self, batch: PromptBatch) -> list[Response]:
        """One response per prompt, generated together; blocks until the last is done.

        Raises ValueError for prompts that ask for several completions (n > 1): a `Response` holds one.
        """
        return self.wait(self._generate(batch))

    def update_weights(self, folder: Path, *, version: int) -> None:
        """Load the Hugging Face folder as policy `version`."""
        self.wait(self.engine.load_weights(folder, version=version))

    async def _generate(self, batch: PromptBatch) -> list[Response]:
        return list(await asyncio.gather(*(self._one(prompt) for prompt in batch.prompts)))

    async def _one(self, prompt: Prompt) -> Response:
        sampling = prompt.sampling
        if sampling.params.n != 1:
            raise ValueError(f"generate_sequences takes prompts with n=1, got n={sampling.params.n}")
        recorder = AnswerRecorder(prompt.request_id)
        ids = prompt.prompt_token_ids.tolist()
        async for output in self.engine.generate(ids, sampling.params, request_id=prompt.request_id, **sampling.extra):
            recorder.add(output)
        return recorder.responses(version=self.engine.version)[0]

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the engine's on its event loop; blocks."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()


@contextmanager
def _program_not_run_again() -> Iterator[None]:
    """Processes that are spawned inside do not import the program's file, of which an engine needs nothing: the program may be
    written from top to bottom, as the RFC's is, without `if __name__ == "__main__":`."""
    program = sys.modules["__main__"].__dict__
    before: dict[str, Any] = {name: program[name] for name in ("__file__", "__spec__") if name in program}
    program.pop("__file__", None)
    program["__spec__"] = None
    try:
        yield
    finally:
        program.update(before)
