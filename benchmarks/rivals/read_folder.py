"""What a Hugging Face folder computes of a row, by the transformers of the interpreter that runs this: version 4 or 5.

`benchmarks.models` runs it as a script, with the row's `ids` and the `folders` in a JSON file. Writes for each folder the
log-probabilities of the row's tokens behind the first, or the sentence with which it is refused. Imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def logprobs(folder: str, ids: list[int]) -> list[float]:
    """Of the class that the folder names, in float32, with the attention that leaves nothing out."""
    config = transformers.AutoConfig.from_pretrained(folder)
    own: Any = getattr(transformers, config.architectures[0])
    lm = own.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    row = torch.tensor(ids)
    with torch.no_grad():
        logits = lm(input_ids=row[None], use_cache=False).logits[0, :-1]
    found: list[float] = logits.log_softmax(-1).gather(1, row[1:, None])[:, 0].tolist()
    return found


def read(folder: str, ids: list[int]) -> list[float] | str:
    """`logprobs`, or why there are none: an older transformers fails in many ways, of which none is a fault of ours."""
    try:
        return logprobs(folder, ids)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


if __name__ == "__main__":
    given, out = (Path(word) for word in sys.argv[1:3])
    asked = json.loads(given.read_text())
    out.write_text(json.dumps([read(each, asked["ids"]) for each in asked["folders"]]))
