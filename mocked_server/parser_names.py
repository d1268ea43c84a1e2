"""The names of vLLM's tool and reasoning parsers, for `server.tool_parser` and `server.reasoning_parser`.

Read from vLLM's own tables without importing vLLM, which takes seconds: called before a run starts, by `mocked_server.check`, and
where a request is refused because no parser is set. Empty where vLLM has no such table any more: then nothing is known, and
nothing is refused for it.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from buffers.did_you_mean import nearest
from buffers.errors import UnderstudyError

TABLES = {
    "server.tool_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "server.reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
"""Configuration key -> package of vLLM, and the name of its table there."""


@cache
def parser_names(key: str) -> tuple[str, ...]:
    """What this configuration key may be, sorted."""
    package, table = TABLES[key]
    spec = find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [file for place in places if (file := Path(place) / package / "__init__.py").is_file()]
    for node in ast.walk(ast.parse(files[0].read_text(encoding="utf-8"))) if files else ():
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [table]:
            return tuple(sorted(ast.literal_eval(node.value)))
    return ()


def check_parser(key: str, name: str | None) -> None:
    """Raises UnderstudyError for a parser that vLLM does not have."""
    known = parser_names(key)
    if name and known and name not in known:
        raise UnderstudyError(f"{key} must be the name of one of vLLM's parsers, got {name!r}; {nearest(name, known)}")


def tools_need_a_parser() -> str:
    """Why a request with tools cannot be served, and the remedy."""
    return (
        "the request offers tools, which needs server.tool_parser (how the model writes a call), and it is not set; set it to "
        f"the one of the model (hermes for Qwen) of {', '.join(parser_names('server.tool_parser'))}"
    )
