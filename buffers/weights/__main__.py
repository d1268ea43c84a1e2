"""The process of a node's puller: `python -m buffers.weights SOURCE FOLDER FILE`.

Started by `buffers.weights.puller_process`. Each line that it reads is a call, {"pull": name} or {"keep": [name, ...]}; for each it
writes a line, {"folder": path}, {} or {"error": text}. It ends with its input: no puller outlives who started it.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from buffers.errors import WeightsError
from buffers.weights.puller import FolderSource, Puller


def main(source: str, folder: str, file: str) -> int:
    """Answers calls until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which closes the input
    puller = Puller(FolderSource(Path(source)), Path(folder), file=file)
    for line in sys.stdin:
        print(json.dumps(_answer(puller, json.loads(line))), flush=True)
    return 0


def _answer(puller: Puller, call: dict[str, object]) -> dict[str, str]:
    try:
        if "pull" in call:
            return {"folder": str(puller.pull(str(call["pull"])))}
        names = call["keep"]
        puller.keep([str(name) for name in names] if isinstance(names, list) else [])
        return {}
    except WeightsError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
