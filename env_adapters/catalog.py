"""Adapters by name: `make_adapter("guessing_game", {"high": 10})`.

Called by `agents.loops.env_agent`. What may be made is what a configuration names, here or as `module.Class`, and
nothing else: a task's row never names code. An adapter's module is imported when it is made, so that an environment
is not played needs no package.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from buffers.did_you_mean import one_of
from buffers.errors import EnvError
from env_adapters.adapter import EnvAdapter

ADAPTERS = {
    "gsm8k": "env_adapters.gsm8k.GSM8KEnv",
    "guessing_game": "env_adapters.guessing_game.GuessingGame",
    "gymnasium": "env_adapters.gymnasium_env.GymnasiumEnv",
    "openenv": "env_adapters.openenv.OpenEnv",
    "verifiers": "env_adapters.verifiers_env.VerifiersEnv",
    "walk": "env_adapters.walk.game.WalkEnv",
}


def adapter_class(name: str) -> type[EnvAdapter]:
    """The class of that name. Raises EnvError for one that is not there, with the nearest name."""
    module, _, kind = ADAPTERS.get(name, name).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), kind) if module else None
    except (ImportError, AttributeError) as error:
        raise EnvError(f"environment must name a class that can be imported, got {name!r} ({error})") from error
    if isinstance(found, type) and issubclass(found, EnvAdapter):
        return found
    raise EnvError(f"environment must be module.Class, or {one_of(name, ADAPTERS)}")


def make_adapter(name: str, options: Mapping[str, Any]) -> EnvAdapter:
    """An adapter for one episode. Raises EnvError for options that it does not have."""
    kind = adapter_class(name)
    try:
        return kind(**options)
    except TypeError as error:
        raise EnvError(
            f"options of environment {name!r} must be its constructor's, got {dict(options)} ({error})"
        ) from error
