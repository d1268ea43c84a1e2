"""`file_search`: finds lines of text in the files of a local folder.

Named in a tools' YAML as `class_name: agents.tools.shipped.file_search.FileSearchTool`, with `config: {root: folder}`
(absolute, or below the working directory). Invariants: nothing outside the root is opened: folders are walked by their
descriptors and no link is followed, even if the tree changes meanwhile; an answer has at most `max_hits` lines, and a
search ends at `deadline_s`. It reads text files of UTF-8, and searches text, not patterns.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from agents.tools.base_tool import BaseTool
from agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from buffers.errors import ToolError
from env_adapters.guarded_calls import Threads

DEADLINE_S = 10.0
MARGIN_S = 5.0
MAX_HITS = 20
MAX_FILE_BYTES = 4 << 20
LINE_CHARS = 200


class FileSearchTool(BaseTool):
    """The same folder for all episodes."""

    own_schema = OpenAIFunctionToolSchema.of(
        "file_search",
        "Searches the files of a folder for lines with a text, ignoring case. Returns path:line: text.",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string", "minLength": 1, "description": "The text to find in a line."},
                "pattern": {"type": "string", "description": "Only files with such a path, for example *.md"},
            },
            "required": ["query"],
        },
    )

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        root = Path(str(config.get("root", "")))
        if not config.get("root") or not root.is_dir():
            raise ToolError(
                f"config.root of file_search must be a folder, got {config.get('root')!r}; name the one to search"
            )
        self._root = root.resolve()
        if not root.is_absolute() and not self._root.is_relative_to(Path.cwd()):
            raise ToolError(
                f"config.root of file_search must not leave {Path.cwd()}, got {root}; give an absolute path"
            )
        self._max_hits = int(config.get("max_hits", MAX_HITS))
        self._search_s = float(config.get("deadline_s", DEADLINE_S))
        self._threads = Threads()
        super().__init__({**config, "deadline_s": self._search_s + MARGIN_S}, tool_schema)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Search, in a thread. Its reward is 0."""
        search = partial(self._search, str(parameters["query"]), pattern=str(parameters.get("pattern", "*")))
        hits, late = await self._threads.run(search)
        shown = hits[: self._max_hits]
        if len(hits) > self._max_hits:
            shown.append(f"(more than {self._max_hits} lines; ask for something rarer, or for some files)")
        if late:
            shown.append(f"(ended after {self._search_s:g} s)")
        return ToolResponse(text="\n".join(shown) or "(nothing found)"), 0.0, {}

    def _search(self, query: str, *, pattern: str) -> tuple[list[str], bool]:
        """The first lines, one more than are shown, and whether time ran out."""
        ends, needle = time.monotonic() + self._search_s, query.casefold()
        hits: list[str] = []
        for path, text in self._files(pattern):
            for number, line in enumerate(text.splitlines(), start=1):
                if needle in line.casefold():
                    hits.append(f"{path}:{number}: {line.strip()[:LINE_CHARS]}")
                    if len(hits) > self._max_hits:
                        return hits, False
            if time.monotonic() > ends:
                return hits, True
        return hits, False

    def _files(self, pattern: str) -> Iterator[tuple[str, str]]:
        """All files, for the clock's sake; those that are not looked into come without their text."""
        for folder, folders, names, descriptor in os.fwalk(self._root, follow_symlinks=False):
            folders.sort()
            for name in sorted(names):
                path = os.path.relpath(os.path.join(folder, name), self._root)
                chosen = fnmatch(path, pattern) or fnmatch(name, pattern)
                yield path, _text_of(name, folder=descriptor) if chosen else ""


def _text_of(name: str, *, folder: int) -> str:
    """A regular file's text; none for links, pipes, devices, what cannot be read, is too large, or is no text."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return ""
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            return ""
        data = file.read(MAX_FILE_BYTES)
    return "" if b"\0" in data[:1024] else data.decode("utf-8", errors="replace")
