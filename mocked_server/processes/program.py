"""The program of a server process: serves on a socket that it inherits, until its parent closes the pipe.

    python -m mocked_server.processes.program < settings    prints `ready` when requests are answered

Its settings come as JSON on one line of stdin: the run's secret is in no command line and no environment. When stdin ends, which is
when its parent does, or when the run cannot be reached any more, so does the process.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import sys

from configs.process_fork import leave
from mocked_server.processes.server_process import ProcessSettings, ServerProcess
from mocked_server.vllm.engine_arguments import set_process_environment
from mocked_server.vllm.hosted.program import HostSettings

READY = b"ready\n"


def to_json(settings: ProcessSettings, *, descriptor: int) -> str:
    """The line on stdin. `descriptor`: of the socket, in the process."""
    return json.dumps({
        "engine": HostSettings(engine=settings.engine, secret=b"").to_json(),
        "secret": base64.b64encode(settings.secret).decode(),
        "run": settings.run,
        "process": settings.process,
        "urls": settings.urls,
        "descriptor": descriptor,
    })  # fmt: skip


def of_json(text: str) -> tuple[ProcessSettings, int]:
    """The settings, and the socket's descriptor."""
    fields = json.loads(text)
    descriptor: int = fields.pop("descriptor")
    fields["engine"] = HostSettings.of_json(fields["engine"]).engine
    fields["secret"] = base64.b64decode(fields["secret"])
    return ProcessSettings(**fields), descriptor


async def serve(settings: ProcessSettings, sock: socket.socket) -> str:
    """Serve until stdin ends, or the run is lost; why."""
    ended, serves = asyncio.Event(), False

    def end() -> None:
        if not serves:
            leave(0)  # nothing was begun that would have to be ended
        ended.set()

    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 4096) else end())
    loop.add_signal_handler(signal.SIGTERM, end)
    process = ServerProcess(settings, sock=sock)
    await process.start()
    serves = True
    os.write(sys.stdout.fileno(), READY)
    waiting = {asyncio.create_task(ended.wait()), asyncio.create_task(process.until_lost())}
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await process.close()
    return "" if ended.is_set() else str(done.pop().result())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of the terminal is its parent's
    set_process_environment()
    settings, descriptor = of_json(_line_of(sys.stdin.fileno()))
    if lost := asyncio.run(serve(settings, socket.socket(fileno=descriptor))):
        print(f"server process {settings.process} lost the run: {lost}", file=sys.stderr)
    leave(1 if lost else 0)


def _line_of(descriptor: int) -> str:
    """The first line, read without a buffer: the end of the pipe is the event loop's."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := os.read(descriptor, 65536)):
            raise SystemExit("the settings of a server process must come on stdin, got none; it is started by the run")
        line += more
    return line.decode()


if __name__ == "__main__":
    main()
