"""What an error of a Ray actor says: that its process died, and of what; or that its constructor refused what it was given.

Used by whatever starts actors and calls them. It reads Ray's words: what a constructor raised comes as text only, and so does what
held the memory of a machine.
"""

from __future__ import annotations

import re
from itertools import dropwhile

from ray.exceptions import ActorUnschedulableError, OutOfMemoryError, RayActorError

ENDINGS = (RayActorError, ActorUnschedulableError, OutOfMemoryError)
"""Errors of an actor that is no more: of its process, of its place, and of Ray's memory monitor."""
REFUSALS = ("TypeError", "ValueError", "KeyError", "AttributeError", "ImportError", "NotImplementedError")
"""What libraries raise of a configuration, beside the errors of this project, which have the name of their module before them."""
OURS = ("agents.", "buffers.", "configs.", "env_adapters.", "learner.", "mocked_server.")
SHOWN_USERS = 3
MOST_CHARS = 60
_MEMORY = re.compile(r"was ([\d.]+)GB used / ([\d.]+)GB limit")
_OWN_MEMORY = re.compile(r"Selected to kill: .*actual memory used=([\d.]+)GB")
_USER = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)


def died(error: BaseException | None) -> bool:
    """Whether the actor's process died, which another start may mend; not where its constructor refused."""
    return isinstance(error, ENDINGS) and refusal(error) is None


def refusal(error: BaseException | None) -> str | None:
    """The sentence with which the actor's constructor refused what it was given, as another start would too. None: it did not."""
    if not (isinstance(error, RayActorError) and error.actor_init_failed):
        return None
    raised = _raised(error)
    name, _, sentence = raised.partition(": ")
    if name.startswith(OURS):
        return sentence
    return raised if name in REFUSALS else None


def _raised(error: RayActorError) -> str:
    """What the constructor raised, as `Class: text`, out of Ray's words and the calls that led there."""
    lines = str(error).splitlines()
    last_call = max((number for number, line in enumerate(lines) if line.startswith('  File "')), default=0)
    return "\n".join(dropwhile(lambda line: line.startswith(" "), lines[last_call + 1 :]))


def in_short(error: BaseException) -> str:
    """Why the actor ended, in one line."""
    text = _raised(error) if isinstance(error, RayActorError) and error.actor_init_failed else str(error)
    if (memory := _MEMORY.search(text)) is None:
        return " ".join(text.split())
    own = _OWN_MEMORY.search(text)
    users = [f"{size} GB {command.strip()[:MOST_CHARS]} ({pid})" for pid, size, command in _USER.findall(text)]
    return (
        f"Ray's memory monitor ended it, as {memory[1]} of the machine's {memory[2]} GB were taken: "
        + (f"{own[1]} GB by itself; " if own else "")
        + f"most by {', '.join(users[:SHOWN_USERS])}"
    )
