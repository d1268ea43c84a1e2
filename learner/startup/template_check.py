"""A chat template that does not end, or that grows without bound, is refused before anything starts.

Called by `learner.startup.model_and_tasks` for the policy, by `learner.run` for frozen roles and reward models. It is rendered by a
process of its own with limits, whose program is this file too: in the run's own process nothing could end it. What a template
raises is its answer to these messages, and no fault.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_CPU_S = 30
"""Seconds of processor time, those for importing transformers included."""
MAX_BYTES = 4 << 30
"""Bytes of address space."""
MAX_CHARS = 1 << 20
"""Characters that the longest of these conversations may become."""
NUM_MESSAGES = 42
TOO_LARGE, TOO_LONG = 4, 5


def check_template(folder: Path, *, key: str) -> None:
    """Raises TaskError for a template that short conversations keep busy, or that makes too much of them. `key` names the
    folder."""
    from buffers.errors import TaskError  # not where this file is a program, which sees no packages of ours

    rendered = subprocess.run(
        [sys.executable, "-P", __file__, str(folder), str(MAX_CPU_S)], capture_output=True, check=False
    )
    reasons = {
        -signal.SIGXCPU: f"it took more than {MAX_CPU_S} s of processor time",
        -signal.SIGKILL: "it was killed",
        TOO_LARGE: f"it took more than {MAX_BYTES >> 30} GiB of memory",
        TOO_LONG: f"they became more than {MAX_CHARS} characters",
    }
    if reason := reasons.get(rendered.returncode):
        raise TaskError(
            f"the chat template of {key} must render {NUM_MESSAGES} short messages, got {folder} where {reason}; take the "
            f"template from another folder of this model"
        )


def templates_of(folder: Path) -> Iterator[str]:
    """The texts of all templates in the folder; Mistral's own tokenizers have theirs in code."""
    for file in (folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))):
        if file.is_file():
            yield file.read_text(encoding="utf-8", errors="replace")
    for name in ("tokenizer_config.json", "chat_template.json"):
        try:
            named = json.loads((folder / name).read_text(encoding="utf-8"))["chat_template"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        for template in named if isinstance(named, list) else [named]:
            text = template.get("template") if isinstance(template, dict) else template
            if isinstance(text, str):
                yield text


def main(folder: Path, *, cpu_s: int) -> int:
    """What the process does as this program: its exit code is one of the reasons, or anything else."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    raised = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}]
    turns = [{"role": role, "content": "hello"} for role in ("user", "assistant")] * (NUM_MESSAGES // 2 - 1)
    long = [{"role": "system", "content": "hello"}, *turns, {"role": "user", "content": "hello"}]
    for template in templates_of(folder):
        for conversation, offered in ((long[1:2], None), (long, None), (long[1:], tools)):
            try:
                texts, _ = render_jinja_template(
                    [conversation],
                    tools=offered,
                    chat_template=template,
                    add_generation_prompt=True,
                    bos_token="",
                    eos_token="",
                )
            except MemoryError:
                return TOO_LARGE
            except raised:
                continue
            if len(texts[0]) > MAX_CHARS:
                return TOO_LONG
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), cpu_s=int(sys.argv[2])))
