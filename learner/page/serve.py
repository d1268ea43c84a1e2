"""Serves the page of runs on this machine, until Ctrl-C; and the page of a live run, as its child.

Called by `learner.page.command_line`. The only place of the page that meets the server's parts: its HTTP protocol with deadlines,
its keys, the words for causes. Invariants: it listens on loopback only; it is a process of its own, at low priority beside a run,
and reads files, so that no run waits for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from buffers.wire.address import is_loopback
from learner.page.access import OPEN, Access
from learner.page.metric_columns import meanings
from learner.page.routes import build_app
from learner.page.run_set import RunSet, find_runs
from learner.page.run_view import read_config
from mocked_server.conversation.branch_causes import REMEDY
from mocked_server.http.uvicorn_server import HttpService, bind
from mocked_server.keys import SECRET_FILE, KeyRing, SecretError, read_secret, secret_of_run

HOST = "127.0.0.1"
NICE = 10
LINGER_S = 60.0
"""A page whose run was killed stays so long after its last reader."""
FAREWELL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the run tells its page's process, on its standard input: the listening socket, the folders, the first link."""

    descriptor: int
    folders: list[str]
    link: str


def serve(named: Sequence[Path], *, port: int) -> int:
    """The page of these runs until Ctrl-C. Raises NoRun, ServerError."""
    return asyncio.run(_serve_until_stopped(named, port=port))


def serve_for_run() -> int:
    """The page of a live run, started by `learner.startup.page_process` when it is asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends this process
    os.nice(NICE)
    return asyncio.run(_serve_for_run())


def break_meanings() -> dict[str, str]:
    """What each cause of a break means."""
    return {cause.value: sentence for cause, sentence in REMEDY.items()}


async def _serve_until_stopped(named: Sequence[Path], *, port: int) -> int:
    found = find_runs(named)
    with bind(HOST, port) as listening:
        at = listening.getsockname()[1]

        def say(link: str) -> None:
            print(f"understudy page: {url(at, link)}", flush=True)

        link = secrets.token_urlsafe(32)
        print(f"{len(found)} run(s): {', '.join(list(found)[:8])}{' ...' if len(found) > 8 else ''}")
        say(link)
        print("the link opens once; a new one follows here. Ctrl-C ends the page", flush=True)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with serving(listening, named, link=link, new_link=say):
            await stop.wait()
    return 0


@asynccontextmanager
async def serving(
    listening: socket.socket, named: Sequence[Path], *, link: str, new_link: Callable[[str], object]
) -> AsyncIterator[Access]:
    """The page on a listening socket, for a block. `link`: the first one's secret; `new_link`: takes that of the next."""
    runs = RunSet(named, meanings=break_meanings())
    access = Access(
        build_app(runs, default=runs.ids()[0], about=meanings()),
        port=listening.getsockname()[1],
        links=[link],
        admin_keys=lambda: admin_keys([runs.view(name).folder for name in runs.ids()]),
        new_link=new_link,
    )
    service = HttpService(access, sockets=[listening])
    await service.start()
    try:
        yield access
    finally:
        await service.close()
        await asyncio.to_thread(runs.close)


def url(port: int, link: str) -> str:
    """The address of a one-time link."""
    return f"http://{HOST}:{port}{OPEN}{link}"


def admin_keys(folders: Sequence[Path]) -> list[str]:
    """The admin keys of these runs, as far as there are some: none is made here."""
    found = []
    for folder in folders:
        host = str(read_config(folder).get("server", {}).get("host", HOST))
        try:
            if not is_loopback(host):
                found.append(KeyRing(secret_of_run(folder, host=host)).admin)
            elif (folder / SECRET_FILE).is_file():
                found.append(KeyRing(read_secret(folder / SECRET_FILE)).admin)
        except (SecretError, OSError):
            continue
    return found


async def _serve_for_run() -> int:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    orders = Orders(**json.loads(await reader.readline()))

    def say(link: str) -> None:
        with suppress(BrokenPipeError):  # the run is gone
            print(link, flush=True)

    with socket.socket(fileno=orders.descriptor) as listening:
        async with serving(listening, list(map(Path, orders.folders)), link=orders.link, new_link=say) as access:
            if await reader.read(1):
                await asyncio.sleep(FAREWELL_S)  # open pages receive how the run ended
            else:
                await _linger(access)
    return 0


async def _linger(access: Access) -> None:
    """The run was killed: wait until no reader was there for a while."""
    while True:
        left_s = access.last_used + LINGER_S - time.monotonic()
        if left_s <= 0.0:
            return
        await asyncio.sleep(left_s)
