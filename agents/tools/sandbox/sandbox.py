"""Runs code that a model wrote: what a sandbox is (`Sandbox`), and the one that is shipped (`ChildSandbox`).

Used by `agents.tools.shipped.python`; users of a real sandbox (a container, a virtual machine, a service) write a
class with `run` and names it in the tool's config. Invariants of ChildSandbox: code never outlives its deadline; its
output is kept up to a limit, and it ends when it prints more; nothing of it stays on disk; where the kernel cannot keep
it from the network, other files or other processes, it is not run at all, unless `weak` allows that.

It is a child process with the limits of `agents.fence`: enough for programs that go wrong, not for an
attacker.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agents import fence
from buffers.errors import ToolError
from env_adapters.child_process import open_pipe, signal_group

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
"""Paths that code may read, beside its Python."""
CHUNK_BYTES = 1 << 16
PROBE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """Outcome of the code. `exit_code` is negative for a signal, None when it was ended from outside."""

    output: str
    """stdout and stderr, in the order in which they were written."""
    exit_code: int | None
    late: bool = False
    """Ended at its deadline."""
    cut: bool = False
    """Ended because it printed more than is kept."""


class Sandbox(Protocol):
    """Runs a Python program from its beginning; nothing is kept from one run to the next."""

    async def run(self, code: str, *, deadline_s: float) -> SandboxResult:
        """Raises ToolError when the code cannot be run safely, OSError when it cannot be run at all."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    """Bounds of one run; processor time is the deadline's."""

    memory_mb: int = 1024
    """Address space: an import of numpy takes about 300."""
    disk_mb: int = 16
    threads: int = 64
    output_bytes: int = 1 << 18
    code_bytes: int = 1 << 20


class ChildSandbox:
    """Child processes on this machine, at most `concurrency` at once (as many as processors). The next one waits."""

    def __init__(
        self,
        limits: ChildLimits | None = None,
        *,
        weak: bool = False,
        python: str = sys.executable,
        concurrency: int | None = None,
    ) -> None:
        self._limits = limits or ChildLimits()
        self._weak = weak
        self._python = python
        self._slots = asyncio.Semaphore(concurrency or os.cpu_count() or 1)
        self._granted: dict[str, bool] | None = None
        self._probing = asyncio.Lock()

    async def capabilities(self) -> dict[str, bool]:
        """Limits that the kernel grants: `network`, `files`, `processes`, `signals` (code is kept from them), `disk` (its size)."""
        async with self._probing:
            if self._granted is None:
                self._granted = await self._probe()
            return dict(self._granted)

    async def _probe(self) -> dict[str, bool]:
        with tempfile.TemporaryDirectory(prefix="understudy-") as folder:
            async with self._child(Path(folder), code="", deadline_s=PROBE_S, probe=True) as (child, stdout):
                async with asyncio.timeout(PROBE_S):
                    printed = await stdout.read()
                    await child.wait()
        if child.returncode != 0:
            said = " ".join(printed.decode(errors="replace").split())[-500:]
            raise ToolError(f"the sandbox must start with {self._python}, got exit code {child.returncode}: {said}")
        granted: dict[str, bool] = json.loads(printed)
        return granted

    async def run(self, code: str, *, deadline_s: float) -> SandboxResult:
        """Run `code` in an empty folder for at most `deadline_s` of wall time, and as much processor time."""
        missing = [name for name, held in (await self.capabilities()).items() if not held and name != "disk"]
        if missing and not self._weak:
            raise ToolError(
                f"this machine's kernel must keep code from {', '.join(missing)}, and does not (no Landlock, seccomp or user "
                f"namespaces here); plug another sandbox, or set weak: true in the tool's config"
            )
        if len(code.encode(errors="replace")) > self._limits.code_bytes:
            raise ToolError(
                f"code must have at most {self._limits.code_bytes} bytes, got {len(code)} characters; shorten it"
            )
        async with self._slots:
            with tempfile.TemporaryDirectory(prefix="understudy-", ignore_cleanup_errors=True) as folder:
                return await self._run(code, Path(folder), deadline_s=deadline_s)

    async def _run(self, code: str, folder: Path, *, deadline_s: float) -> SandboxResult:
        output, late = bytearray(), False
        async with self._child(folder, code=code, deadline_s=deadline_s, probe=False) as (child, stdout):
            try:
                async with asyncio.timeout(deadline_s):
                    while len(output) <= self._limits.output_bytes and (chunk := await stdout.read(CHUNK_BYTES)):
                        output += chunk
                    if len(output) <= self._limits.output_bytes:
                        await child.wait()
            except TimeoutError:
                late = True
            exit_code = child.returncode
        text = output[: self._limits.output_bytes].decode(errors="replace")
        return SandboxResult(
            output=text.replace(f"{folder}/work/../", ""),
            exit_code=exit_code,
            late=late or exit_code == -signal.SIGXCPU,
            cut=len(output) > self._limits.output_bytes,
        )

    @asynccontextmanager
    async def _child(
        self, folder: Path, *, code: str, deadline_s: float, probe: bool
    ) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
        """The started program, and what it prints; all that it started ends with the block."""
        (folder / "work").mkdir()
        (folder / "program.py").write_text(code, encoding="utf-8", errors="replace")
        spec = self._spec(folder, cpu_s=max(1, round(deadline_s + 0.5)), probe=probe)
        with ExitStack() as ours:
            with ExitStack() as opened:
                pipe = await open_pipe(opened)
                ours.callback(pipe.transport.close)
                child = await asyncio.create_subprocess_exec(
                    *(self._python, "-I", "-S", fence.__file__, "run", json.dumps(spec)),
                    cwd=folder,
                    env={},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=pipe.writing,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                yield child, pipe.reader
            finally:
                signal_group(child.pid, signal.SIGKILL)
                await child.wait()

    def _spec(self, folder: Path, *, cpu_s: int, probe: bool) -> dict[str, Any]:
        work = str(folder / "work")
        # Threads of numeric libraries would each take stacks and arenas from the memory's limit.
        environment = {"HOME": work, "TMPDIR": work, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return {
            "folder": str(folder),
            "probe": probe,
            "python": self._python,
            "environment": environment,
            "readable": [sys.prefix, sys.base_prefix, str(Path(self._python).resolve().parent.parent), *SYSTEM],
            "cpu_s": cpu_s,
            "memory_mb": self._limits.memory_mb,
            "disk_mb": self._limits.disk_mb,
            "threads": self._limits.threads,
        }
