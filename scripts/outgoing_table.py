"""Writes where a run goes out over HTTP, and within which bounds, into SECURITY.md: a table made from the code.

`python scripts/outgoing_table.py`: prints it. `--write`: puts it where it belongs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from buffers import outgoing  # noqa: E402

PAGE = ROOT / "SECURITY.md"
OURS = ("agents", "buffers", "configs", "env_adapters", "learner", "mocked_server")
CLIENTS_OF_OTHERS: dict[str, tuple[str, ...]] = {
    "httpx": (
        "mocked_server/http/attribution.py",
        "agents/examples/lm_eval_harness.py",
        "agents/examples/inspect_harness.py",
    ),
    "websockets": ("env_adapters/openenv.py",),
    "huggingface_hub": ("learner/startup/hub.py",),
    "wandb": ("learner/reporting/tracker.py",),
    "mlflow": ("learner/reporting/tracker.py",),
    "swanlab": ("learner/reporting/tracker.py",),
    "aiohttp": (),
    "requests": (),
    "urllib.request": (),
    "urllib3": (),
    "http.client": (),
}
"""Package that goes out over HTTP by itself -> files that use it for that: another process of the run (`attribution.Forward`),
programs as a user writes them, and what SECURITY.md says of each beside the table."""


def table() -> str:
    """A row for each of the bounds."""
    files = [path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    names = {id(value): name for name, value in vars(outgoing).items() if isinstance(value, outgoing.Bounds)}
    lines = ["| asked | most bytes of an answer | seconds in all | by |", "|---|---|---|---|"]
    for bounds in outgoing.BOUNDS:
        asks = re.compile(rf"Outgoing\(\s*{names[id(bounds)]}\b")
        by = ", ".join(f"`{name}`" for name, text in texts.items() if asks.search(text))
        size = f"{bounds.max_bytes >> 20} MiB" + (", each line of a stream" if bounds.is_of_events else "")
        seconds = f"{bounds.total_s:,.0f}" if bounds.total_s is not None else "the asker's own"
        lines.append(f"| {bounds.server} | {size} | {seconds} | {by} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """SECURITY.md with the table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- outgoing -->\n")
    return f"{before}<!-- outgoing -->\n{table()}<!-- /outgoing -->{rest.partition('<!-- /outgoing -->')[2]}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(table(), end="")
