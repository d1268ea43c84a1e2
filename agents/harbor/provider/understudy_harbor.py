"""`understudy_harbor:ChildEnvironment`, a provider of Harbor's for machines without docker: a fenced child process.

The fence is `agents.fence`. Imported by `harbor`, in its interpreter (3.12 or newer), by its import path, with this
folder on PYTHONPATH; never by ours. Imports harbor, the standard library and its neighbour; the fence runs in processes of its own.
Invariants: everything that a trial started ends with its environment, or with the trial's own process, however that ends; files
go in and out by tar inside the room, so that no link that an agent made leads out of it.

The task's Dockerfile is obeyed as far as `understudy_dockerfile` says; FROM is not, and one user, root, is all there is.
Memory, processors and disk are not limited.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError, transfer_tar_filter
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.paths import EnvironmentPaths
from understudy_dockerfile import read_dockerfile  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parents[3]
FENCE = [sys.executable, "-S", "-m", "agents.fence"]
OURS = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.defpath}
PLAIN = {
    "PATH": "/root/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "xterm-256color",
}
"""Variables of a command in a room, before the task's and the agent's."""
OUTPUT_BYTES = 4 << 20
"""The end of what a command printed that is kept of each stream."""
VARIABLES = "ROOM_VARIABLES"
START_S = 60.0
LATE = 124


class ChildEnvironment(BaseEnvironment):  # type: ignore[misc]
    """A room on this machine, made of the kernel's namespaces."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._holder: asyncio.subprocess.Process | None = None
        self._pid = 0
        self._workdir = self.task_env_config.workdir or "/app"
        self._variables: dict[str, str] = {}

    @staticmethod
    def type() -> str:
        return "understudy-child"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True, mounted=True)

    def _validate_definition(self) -> None:
        if (self.environment_dir / "docker-compose.yaml").exists():
            raise SandboxBuildFailedError("docker-compose.yaml is not obeyed here; use a provider that has docker")

    async def start(self, force_build: bool) -> None:
        """Raises SandboxBuildFailedError when the kernel makes no room, or the Dockerfile cannot be obeyed."""
        folder = Path(tempfile.mkdtemp(prefix="understudy-harbor-"))
        mounts = [
            {"source": mount["source"], "target": mount["target"], "read_only": bool(mount.get("read_only"))}
            for mount in self._host_mounts
            if mount["type"] == "bind"
        ]
        for mount in mounts:
            Path(mount["source"]).mkdir(parents=True, exist_ok=True)
        spec = json.dumps({"network": not self._network_disabled, "mounts": mounts})
        self._holder = await asyncio.create_subprocess_exec(
            *FENCE, "hold", str(folder), spec, cwd=ROOT, env=OURS,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        assert self._holder.stdout is not None and self._holder.stderr is not None
        async with asyncio.timeout(START_S):
            word, _, pid = (await self._holder.stdout.readline()).decode().partition(" ")
            if word != "ready":
                raise SandboxBuildFailedError((await self._holder.stderr.read()).decode(errors="replace").strip())
        self._pid = int(pid)
        await self._build()
        paths = EnvironmentPaths.for_os(self.os)
        await self.ensure_dirs([paths.agent_dir, paths.verifier_dir, paths.artifacts_dir, self._workdir])
        await self._upload_environment_dir_after_start()

    async def _build(self) -> None:
        """Obey the task's Dockerfile, if it has one."""
        if not (path := self.environment_dir / "Dockerfile").exists():
            return
        try:
            steps = read_dockerfile(path.read_text(encoding="utf-8"), variables=PLAIN)
        except (OSError, ValueError) as error:
            raise SandboxBuildFailedError(f"{path}: {error}") from None
        for step in steps:
            words = step.words
            if step.kind == "workdir":
                self._workdir = os.path.normpath(os.path.join(self._workdir, words[0]))
                await self.exec(f'mkdir -p "{self._workdir}"', cwd="/")
            elif step.kind == "env":
                self._variables[words[0]] = words[1]
            elif step.kind == "copy":
                await self._copy(words[:-1], words[-1])
            else:
                result = await self._enter(words, cwd=self._workdir, env={})
                if result.return_code != 0:
                    output = (result.stderr or result.stdout or "no output").strip()
                    raise SandboxBuildFailedError(
                        f"RUN {words[-1]} ended with code {result.return_code}: {output[-500:]}"
                    )

    async def _copy(self, sources: Sequence[str], target: str) -> None:
        place = os.path.normpath(os.path.join(self._workdir, target))
        context = self.environment_dir.resolve()
        for name in sources:
            paths = [path for path in context.glob(name.lstrip("/")) if path.resolve().is_relative_to(context)]
            paths = [context] if os.path.normpath(name) == "." else paths
            if not paths:
                raise SandboxBuildFailedError(f"COPY {name}: there is no such file in {context}")
            for path in paths:
                if path.is_dir():
                    await self.upload_dir(path, place)
                else:
                    into = len(sources) > 1 or len(paths) > 1 or target.endswith(("/", "."))
                    await self.upload_file(path, f"{place}/{path.name}" if into else place)

    async def stop(self, delete: bool) -> None:
        if self._holder is not None:
            assert self._holder.stdin is not None
            if not delete:
                self._holder.stdin.write(b"keep\n")
            self._holder.stdin.close()
            await self._holder.wait()
            self._holder = None

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        wanted = self._resolve_user(user)
        if wanted not in (None, "root", 0, "0"):
            raise RuntimeError(f"{self.type()} has one user, root, got {wanted!r}; use a provider that has docker")
        shell = ["/bin/bash", "-c", command]
        return await self._enter(shell, cwd=cwd or self._workdir, env=self._merge_env(env) or {}, timeout_s=timeout_sec)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        with tempfile.TemporaryFile() as packed:
            with tarfile.open(fileobj=packed, mode="w") as tar:
                tar.add(source_path, arcname=os.path.basename(target_path))
            await self._unpack(packed, os.path.dirname(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        with tempfile.TemporaryFile() as packed:
            with tarfile.open(fileobj=packed, mode="w") as tar:
                tar.add(source_dir, arcname=".")
            await self._unpack(packed, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        name = os.path.basename(source_path)
        with tempfile.TemporaryDirectory() as folder:
            await self._pack(os.path.dirname(source_path), name, to=folder)
            Path(target_path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path(folder) / name, target_path, follow_symlinks=False)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        await self._pack(source_dir, ".", to=target_dir)

    async def _unpack(self, packed: Any, target: str) -> None:
        packed.seek(0)
        line = 'mkdir -p "$0" && exec tar xf - --no-same-owner -C "$0"'
        result = await self._enter(["/bin/sh", "-c", line, target or "/"], cwd="/", env={}, stdin=packed)
        if result.return_code != 0:
            raise RuntimeError(f"files could not be put into {target}: {result.stderr}")

    async def _pack(self, source: str, name: str, *, to: Path | str) -> None:
        with tempfile.TemporaryFile() as packed:
            command = ["tar", "cf", "-", "-C", source or "/", name]
            result = await self._enter(command, cwd="/", env={}, stdout=packed)
            if result.return_code != 0:
                raise RuntimeError(f"{source}/{name} could not be fetched: {result.stderr}")
            packed.seek(0)
            with tarfile.open(fileobj=packed) as tar:
                tar.extractall(to, filter=transfer_tar_filter)

    async def _enter(
        self,
        command: Sequence[str],
        *,
        cwd: str,
        env: dict[str, str],
        timeout_s: float | None = None,
        stdin: Any = asyncio.subprocess.DEVNULL,
        stdout: Any = None,
    ) -> ExecResult:
        """Run a command in the room. One that is late, or that nobody waits for any more, is ended."""
        if self._holder is None or self._holder.returncode is not None:
            raise RuntimeError("the room of this environment has ended")
        variables = {**PLAIN, **self._variables, **env}
        ours = {**OURS, VARIABLES: json.dumps(variables)}  # not in its arguments, which all users of a machine can read
        # Files, not pipes: what a command leaves running may hold them open.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = await asyncio.create_subprocess_exec(
                *FENCE, "enter", str(self._pid), cwd, *command,
                cwd=ROOT, env=ours, stdin=stdin, stdout=stdout or out, stderr=err, start_new_session=True,
            )  # fmt: skip
            late = False
            try:
                async with asyncio.timeout(timeout_s):
                    await process.wait()
            except TimeoutError:
                late = True
            finally:
                if process.returncode is None:
                    process.terminate()
                    await asyncio.shield(process.wait())
            code = LATE if late else process.returncode or 0
            return ExecResult(stdout=_end(out), stderr=_end(err), return_code=code)


def _end(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - OUTPUT_BYTES))
    return bytes(file.read()).decode(errors="replace")
