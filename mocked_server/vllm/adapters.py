"""The adapters (LoRA) of one engine: each version of the policy is one more, and a generation ends under the one it began with.
Where roles have adapters of their own, each role has versions of its own.

Owned by `mocked_server.vllm.engine.VLLMEngine`. Nothing pauses: a version is read in between two steps of the engine, and requests
that come afterwards carry it. Tokens are labelled by its name, as vLLM's own label is of the base weights, which never change.
Invariants: an adapter that a generation uses stays, with its files, which vLLM may read again; of the others the newest `kept`
ones of each role stay. A new engine process has none.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

DESCRIPTION = "adapter_config.json"
"""The file that makes a folder an adapter's, as peft has it."""
_NAME = re.compile(r"policy-v(\d+)-")


def is_adapter(folder: Path) -> bool:
    """True if it holds an adapter, and not whole weights."""
    return (folder / DESCRIPTION).is_file()


def lora_words(*, rank: int, kept: int) -> list[str]:
    """vLLM's server arguments for adapters of this rank (1 to 512), `kept` versions of them, of all roles together, and the one
    that is coming."""
    from vllm.config.lora import MaxLoRARanks

    largest = min(most for most in get_args(MaxLoRARanks) if most >= rank)
    slots = str(kept + 1)
    return ["--enable-lora", "--max-lora-rank", str(largest), "--max-loras", slots, "--max-cpu-loras", slots]


@dataclass(slots=True, eq=False)
class Adapter:
    """One version in the engine. `request`: vLLM's LoRARequest."""

    version: int
    request: Any
    folder: Path
    running: int = 0
    """Generations that use it."""


def label_of(name: str) -> str | None:
    """The version of the policy that an adapter of this name is; None: it is none of ours."""
    match = _NAME.match(name)
    return None if match is None else match[1]


class PolicyAdapters:
    """`kept`: how many of the newest versions stay when nothing uses them; roles share that number."""

    def __init__(self, *, kept: int) -> None:
        self._kept = kept
        self._llm: Any = None
        """The engine process that has them."""
        self._loaded: dict[str, list[Adapter]] = {}
        """Adapters of each role, oldest first; of the one policy under the empty name."""
        self._ids = 0

    async def load(self, llm: Any, folder: Path, *, version: int, role: str = "") -> float:
        """Make the adapter in `folder` the newest one, of this role. Returns the seconds that it took the engine, at most."""
        from vllm.lora.request import LoRARequest

        if llm is not self._llm:
            self.clear()
            await llm.collective_rpc("prepare_adapters")
            self._llm = llm
        self._ids += 1
        own = _own_files(folder)
        request = LoRARequest(lora_name=f"policy-v{version}-{own.name}", lora_int_id=self._ids, lora_path=str(own))
        began = time.monotonic()
        await llm.add_lora(request)
        took_s = time.monotonic() - began
        of_role = self._loaded.setdefault(role, [])
        of_role.append(Adapter(version, request, own))
        kept = max(1, self._kept // len(self._loaded))
        for old in [one for one in of_role[:-kept] if not one.running]:
            of_role.remove(old)
            await llm.remove_lora(old.request.lora_int_id)
            shutil.rmtree(old.folder, ignore_errors=True)
        return took_s

    @contextmanager
    def newest(self, role: str = "") -> Iterator[dict[str, Any]]:
        """A generation of this role runs inside: the arguments that it takes of vLLM."""
        of_role = self._loaded.get(role)
        if not of_role:
            yield {}
            return
        adapter = of_role[-1]
        adapter.running += 1
        try:
            yield {"lora_request": adapter.request}
        finally:
            adapter.running -= 1

    def clear(self) -> None:
        """Forget them all: the engine process is gone."""
        for one in [one for of_role in self._loaded.values() for one in of_role]:
            shutil.rmtree(one.folder, ignore_errors=True)
        self._loaded = {}


def _own_files(folder: Path) -> Path:
    """A folder beside it with the same files, which stays when that is removed."""
    own = folder.parent / f"loaded-{secrets.token_hex(4)}"
    own.mkdir()
    for path in folder.iterdir():
        there = path.resolve()
        try:
            os.link(there, own / path.name)
        except OSError:  # another file system
            shutil.copyfile(there, own / path.name)
    return own
