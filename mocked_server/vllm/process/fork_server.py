"""How vLLM's engines are started: by `configs.fork_server`, in place of what vLLM does by itself.

Called by `mocked_server.vllm.engine`. Invariant: only engines that are started inside `engines_of_ours` are; vLLM's other processes
are its own matter.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import process
from multiprocessing.context import ForkServerContext
from typing import Any
from uuid import uuid4

from configs.fork_server import ending_with_us, is_there
from mocked_server.vllm.engine_arguments import has_gpu
from mocked_server.vllm.process.engine_health import ending_of

_patching = threading.Lock()
_booting = threading.local()
"""What each thread starts now, if it starts an engine."""


@contextmanager
def engines_of_ours(folder: str = "", *, devices: Sequence[str] = ()) -> Iterator[list[process.BaseProcess]]:
    """vLLM's engines that this thread starts inside end with this process. They are forked, if there is a fork server. Yields a
    list to which each one is added before it starts. `folder`: where its processes meet, by sockets and a file that stay when it is
    killed; by itself vLLM takes the folder for temporary files. `devices`: the cards that they see, as CUDA calls them; none: all
    that this process sees."""
    from vllm.v1 import utils as addresses
    from vllm.v1.engine import utils

    with _patching:
        if getattr(utils.get_mp_context, "__name__", "") != "context_of_ours":
            _replace_context(utils)
            utils.get_open_zmq_ipc_path = addresses.get_open_zmq_ipc_path = _socket_of_ours(utils.get_open_zmq_ipc_path)
    _booting.started = started = list[process.BaseProcess]()
    _booting.folder, _booting.devices = folder, devices
    try:
        yield started
    finally:
        _booting.started, _booting.folder = None, ""


def _replace_context(utils: Any) -> None:
    before = utils.get_mp_context

    def context_of_ours() -> Any:
        started = getattr(_booting, "started", None)
        if started is None:
            return before()
        cards = {"CUDA_VISIBLE_DEVICES": ",".join(_booting.devices)} if _booting.devices else {}
        return ending_with_us(
            ForkServerContext() if is_there() else before(),
            started,
            environment=cards,
            prepare=partial(_meet_in, _booting.folder) if _booting.folder else None,
        )

    utils.get_mp_context = context_of_ours


def _socket_of_ours(before: Callable[[], str]) -> Callable[[], str]:
    def socket_of_ours() -> str:
        folder = getattr(_booting, "folder", "")
        return f"ipc://{folder}/{uuid4()}" if folder else before()

    return socket_of_ours


def _meet_in(folder: str) -> None:
    """This process becomes an engine, whose workers meet there."""
    from vllm import envs
    from vllm.v1.executor import uniproc_executor

    envs.VLLM_RPC_BASE_PATH = folder
    uniproc_executor.get_file_store_init_method = lambda: f"file://{folder}/vllm_dist_{uuid4().hex}"
    if has_gpu():
        end_as_workers_do()


def end_as_workers_do() -> None:
    """This process is an engine whose workers are processes of their own: where something outside ends one of them, it ends in that
    way too. By itself it would call that an error of its own."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    shutdown = MultiprocExecutor.shutdown

    def shutdown_of_ours(self: Any) -> None:
        if getattr(self, "is_failed", False) and not getattr(
            self, "shutting_down", False
        ):  # later it has ended them itself
            codes = [worker.proc.exitcode for worker in self.workers]
            if any(code is not None and not ending_of([code]).by_itself for code in codes):
                os.kill(os.getpid(), signal.SIGKILL)
        shutdown(self)

    MultiprocExecutor.shutdown = shutdown_of_ours
