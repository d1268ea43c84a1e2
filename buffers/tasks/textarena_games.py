"""TextArena (PyPI's textarena) by name: `data.tasks: textarena://TicTacToe-v0?size=400` as tasks, and the games themselves.

Called by `learner.startup.hub` for tasks and by `env_adapters.textarena_env`, which plays them; the only owner of textarena.
Invariants: the same game, players, options and seed are the same game; whatever a player says is a move, valid or not; nothing is
downloaded. Nothing of ours is imported, and the package only when it is used.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from difflib import get_close_matches
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import parse_qsl

T = TypeVar("T")
SCHEME = "textarena://"
PACKAGE = "textarena"
OWN = ("size", "seed", "players", "agent")
"""Settings of an address that are not the game's: number of tasks, seed of the first one, number of players, their `agent_name`."""
SIZE = 500
START_S = 30
NUMBERS: tuple[int, ...] = (2, 1, *range(3, 16))
"""Numbers of players, in the order in which they are tried."""
INVALID = -1.0
FAULTS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, SyntaxError, TypeError,
    ValueError,
)  # fmt: skip
"""What games raise where they cannot begin: of arguments that they do not take, of what is missing."""


def is_installed() -> bool:
    """Whether this environment has the package."""
    return find_spec(PACKAGE) is not None


def task_rows(address: str) -> Iterator[dict[str, Any]]:
    """What `Task` has of each task: {task_id, prompt, data_source, agent_name, extra_info}. Raises ValueError for an address that
    names no game that can be played here."""
    name, _, query = address.removeprefix(SCHEME).partition("?")
    given = {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    size, seed, players, agent = (given.pop(key, default) for key, default in zip(OWN, (SIZE, 0, 0, "env_agent")))
    for key, value, least in (("size", size, 1), ("seed", seed, 0), ("players", players, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{key} of {address} must be a whole number from {least} on, got {value!r}")
    try:
        with redirect_stdout(sys.stderr):
            players = in_time(partial(players_of, name, players=players, options=given))
            for index in range(size):
                words = in_time(partial(_first_words, name, players=players, options=given, seed=seed + index))
                yield {
                    "task_id": f"{name}:{index}",
                    "prompt": [{"role": "user", "content": words}],
                    "data_source": f"{SCHEME}{name}",
                    "agent_name": str(agent),
                    "extra_info": {"game": name, "players": players, "options": given, "seed": seed + index},
                }
    except ValueError as error:
        raise ValueError(f"{address}: {error}") from error


def _value(text: str) -> Any:
    """A number, truth value or list where the text is one in JSON; else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def players_of(name: str, *, players: int, options: Mapping[str, Any]) -> int:
    """The number of players; of 0, two, if it is a game for two, else the fewest that it takes. Raises ValueError as `Game`
    does."""
    _made(name, options)
    refusals = []
    numbers: tuple[int, ...] = (players,) if players else NUMBERS
    for number in numbers:
        try:
            game = Game(name, players=number, options=options, seed=0)
        except ValueError as error:
            refusals.append(error)
        else:
            game.try_out()
            return number
    raise refusals[0]


def in_time(begin: Callable[[], T]) -> T:
    """What `begin` gives, in a thread of its own. Raises ValueError, as it does, or where it takes too long: some games look for a
    puzzle until they have one."""
    outcome: list[T | ValueError] = []

    def work() -> None:
        try:
            outcome.append(begin())
        except ValueError as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(START_S)
    if not outcome:
        raise ValueError(f"a game must begin within {START_S} s, it did not; name another one, or other settings")
    if isinstance(outcome[0], ValueError):
        raise outcome[0]
    return outcome[0]


def _first_words(name: str, **settings: Any) -> str:
    return Game(name, **settings).told()


class Game:
    """One game. It is made and played in one thread, which plays no other until it has ended: its random numbers are the
    thread's. Raises ValueError, in one line, where there is no such game, or it cannot be played here."""

    def __init__(self, name: str, *, players: int, options: Mapping[str, Any], seed: int) -> None:
        self.num_players = players
        self._name = name
        _DRAWN.seed(seed)
        self._env, self._spellings = _made(name, options)
        try:
            self._env.reset(num_players=players, seed=seed)
            self._turn = self._env.get_observation()
        except FAULTS as error:
            raise ValueError(f"{name} with {players} players {_why(error)}") from error

    @property
    def player(self) -> int:
        """Whose turn it is."""
        return int(self._turn[0])

    def told(self) -> str:
        """What that player gets to read before its move: all that was said since its last one, but that move itself."""
        from textarena import GAME_ID, ObservationType

        player, said = self._turn
        names = {**self._env.state.role_mapping, GAME_ID: "GAME"}
        own = (player, ObservationType.PLAYER_ACTION)
        return "\n".join(
            f"[{names.get(sender, f'Player {sender}')}] {message}"
            for sender, message, kind in said
            if (sender, kind) != own
        )

    def move(self, text: str) -> bool:
        """The player's move; whether the game is over. An invalid one is answered by the game. Raises what the game raises at a
        move that its author did not think of."""
        for spell in self._spellings:
            text = spell(text)
        done, _ = self._env.step(text)
        if not done:
            self._turn = self._env.get_observation()
        return bool(done)

    def try_out(self) -> None:
        """Makes a move that is none. Raises ValueError for a game that fails at that: some fail at each move."""
        try:
            self.move("")
        except FAULTS as error:
            raise ValueError(f"{self._name} {_why(error)}") from error

    def scores(self) -> list[float]:
        """Each player's reward; 0 before the end, and for those whom the game gives none."""
        rewards = self._env.state.rewards or {}
        return [_number(rewards.get(player, 0.0)) for player in range(self.num_players)]


def _number(reward: Any) -> float:
    """A reward. Some games have the reason of an invalid move in its place: that counts as TextArena's own reward for one."""
    return INVALID if isinstance(reward, str) else float(reward)


@cache
def _registry() -> Mapping[str, Any]:
    """Name -> TextArena's entry. Raises ValueError where the package is missing."""
    if not is_installed():
        raise ValueError("TextArena needs the package textarena, got none; pip install textarena")
    import nltk
    from textarena.envs.registration import ENV_REGISTRY

    nltk.download = lambda *_, **__: (
        False
    )  # games ask for their word lists at each start: what is missing is the user's to fetch
    registry: Mapping[str, Any] = ENV_REGISTRY
    return registry


def names() -> list[str]:
    """All games that are registered, whether they can be played here or not. Raises ValueError where the package is missing."""
    return list(_registry())


def _made(name: str, options: Mapping[str, Any]) -> tuple[Any, list[Callable[[str], str]]]:
    """(game, what its wrappers make of a move). Its observations are left as they come, turn by turn: wrappers would repeat all
    that was said before. Raises ValueError."""
    registry = _registry()
    from textarena import ActionWrapper

    if name not in registry:
        near = get_close_matches(name, registry, n=3) or ["TicTacToe-v0", "GuessTheNumber-v0", "KuhnPoker-v0"]
        raise ValueError(f"{name!r:.80} must be one of TextArena's {len(registry)} games; {', '.join(near)} are some")
    entry = registry[name]
    try:
        env = _own_class(entry.entry_point)(**{**entry.kwargs, **options})
    except FAULTS as error:
        raise ValueError(f"{name}{f' with {dict(options)}' if options else ''} {_why(error)}") from error
    wrappers = [wrapper for wrapper in entry.default_wrappers or () if issubclass(wrapper, ActionWrapper)]
    return env, [wrapper(env).action for wrapper in reversed(wrappers)]


def _own_class(entry_point: str) -> type:
    """A game's class, of modules that no other game has: games keep things there (a shuffled deck, the state of a search)."""
    module, _, kind = entry_point.partition(":")
    package = module.rpartition(".")[0]
    with _IMPORTING:
        kept = {name: sys.modules.pop(name) for name in _loaded(package)}
        try:
            found: type = getattr(importlib.import_module(module), kind)
            for name in _loaded(PACKAGE):
                _seal(sys.modules[name])
        finally:
            for name in _loaded(package):
                del sys.modules[name]
            sys.modules.update(kept)
    return found


def _loaded(package: str) -> list[str]:
    return [name for name in list(sys.modules) if f"{name}.".startswith(f"{package}.")]


def _why(error: BaseException) -> str:
    """Why a game cannot be played, and what would help."""
    text = " ".join(str(error).split())
    if found := re.search(r"nltk\.download\('([\w.]+)'\)", text):
        return f"needs NLTK's {found[1]}, got none; python -m nltk.downloader {found[1]}"
    if isinstance(error, SyntaxError):
        return f"needs a newer Python, got {sys.version.split()[0]} ({text}); use 3.12"
    return f"cannot be played here ({type(error).__name__}: {text:.200}); name another game, or other settings"


# Games draw from the generators of the whole process, `random` and `numpy.random`, which other episodes of a worker draw from too.
# In their modules these names stand for generators of the thread that plays.


class _Drawn(threading.local):
    """The random numbers of one thread."""

    def __init__(self) -> None:
        self.seed(0)

    def seed(self, seed: int) -> None:
        from numpy.random import RandomState

        self.random, self.numpy = random.Random(seed), RandomState(seed)


_DRAWN = _Drawn()
_IMPORTING = threading.Lock()


class _InPlaceOf:
    """A module's attributes, after those of `first()`."""

    def __init__(self, module: ModuleType, *, first: Callable[[], Any]) -> None:
        self._module = module
        self._first = first

    def __getattr__(self, name: str) -> Any:
        own = self._first()
        return getattr(own, name) if hasattr(own, name) else getattr(self._module, name)


def _seal(module: ModuleType) -> None:
    import numpy

    drawn = _InPlaceOf(numpy.random, first=lambda: _DRAWN.numpy)
    stand_ins = {
        random: _InPlaceOf(random, first=lambda: _DRAWN.random),
        numpy: _InPlaceOf(numpy, first=lambda: SimpleNamespace(random=drawn)),
    }
    for name in ("random", "np", "numpy"):
        if isinstance(given := getattr(module, name, None), ModuleType) and given in stand_ins:
            setattr(module, name, stand_ins[given])


if __name__ == "__main__":
    for row in task_rows(sys.argv[1]):
        print(json.dumps(row))
