"""`Terminal`: rich's console, in which only rich itself controls the terminal.

Used by a run's and an evaluation's session and by `learner.reporting.compare`. Texts and cells are taken as they are (no markup in
brackets, no `:names:` of emoji), and pass `buffers.terminal.shown`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from buffers.terminal import GuardedStream, shown


class Terminal(Console):
    """`file`: None: the standard output. `options`: of rich's console."""

    def __init__(self, file: TextIO | None = None, **options: Any) -> None:
        stream = sys.stdout if file is None else file
        unguarded = stream.stream if isinstance(stream, GuardedStream) else stream
        super().__init__(file=cast(TextIO, unguarded), markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """All that is printed passes here, the parts of tables and panels too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))
