"""The process of a node's puller: `python -m buffers.weights`.

Started by `buffers.weights.puller_process`. The first line that it reads are its settings (`Settings`: a secret is in no command
line); each other one is a call: {"pull": name, "home": address, "shards": {file: address}}, {"copy": name, "home": address} or
{"keep": [name, ...]}. For each it writes a line: {"folder": path}, {} or {"error": text}. It ends with its input: no puller
outlives who started it.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import msgspec

from buffers.errors import WeightsError
from buffers.weights.puller import Puller
from buffers.weights.puller_process import Settings
from buffers.weights.version_server import WireSource


def main() -> int:
    """Answers calls until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which closes the input
    settings = msgspec.json.decode(sys.stdin.readline(), type=Settings)
    source = WireSource(Path(settings.source), secret=settings.secret)
    puller = Puller(source, Path(settings.folder), file=settings.file)
    for line in sys.stdin:
        call = json.loads(line)
        source.turn_to(call.get("home", ""), call.get("shards", {}))
        print(json.dumps(_answer(puller, call)), flush=True)
    source.close()
    if settings.removes:
        shutil.rmtree(settings.removes, ignore_errors=True)
    return 0


def _answer(puller: Puller, call: dict[str, object]) -> dict[str, str]:
    try:
        if "pull" in call:
            return {"folder": str(puller.pull(str(call["pull"])))}
        if "copy" in call:
            return {"folder": str(puller.copy(str(call["copy"])))}
        names = call["keep"]
        puller.keep([str(name) for name in names] if isinstance(names, list) else [])
        return {}
    except WeightsError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    sys.exit(main())
