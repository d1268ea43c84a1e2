"""What a server process runs: it serves on a socket of the run's until the run closes the channel between them.

Started by `server_processes`, as engines are: a fork of the run's fork server, or a new interpreter where there is none. What it is
made of comes through a pipe: the run's secret is in no command line and no environment. When the channel ends, which is when its
parent does, or when the run cannot be reached any more, so does the process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

import setproctitle

from configs.child_processes import leave
from mocked_server.processes.server_process import ProcessSettings, ServerProcess
from mocked_server.vllm.engine_arguments import set_process_environment

READY = b"ready\n"
TITLE = "understudy::server_process"


def main(settings: ProcessSettings, sock: socket.socket, channel: socket.socket) -> None:
    """Serve on `sock`, which listens; says READY on `channel` when requests are answered, and ends when it does."""
    setproctitle.setproctitle(f"{TITLE}_{settings.process}")
    os.setsid()
    set_process_environment()
    if lost := asyncio.run(_serve(settings, sock, channel)):
        print(f"server process {settings.process} lost the run: {lost}", file=sys.stderr)
    leave(1 if lost else 0)


async def _serve(settings: ProcessSettings, sock: socket.socket, channel: socket.socket) -> str:
    """Serve until the channel ends, or the run is lost; why."""
    ended, serves = asyncio.Event(), False

    def end() -> None:
        if not serves:
            leave(0)  # nothing was begun that would have to be ended
        ended.set()

    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    loop.add_reader(channel, lambda: None if channel.recv(4096) else end())
    loop.add_signal_handler(signal.SIGTERM, end)
    process = ServerProcess(settings, sock=sock)
    await process.start()
    serves = True
    await loop.sock_sendall(channel, READY)
    waiting = {asyncio.create_task(ended.wait()), asyncio.create_task(process.until_lost())}
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await process.close()
    return "" if ended.is_set() else str(done.pop().result())
