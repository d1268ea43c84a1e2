"""An environment as a user of `openenv-core` writes it, served on any free port; prints `ready HOST:PORT`."""

import random
import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class Guess(Action):
    number: int = Field(ge=0)


class Seen(Observation):
    text: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, high=100) -> Seen:
        self._number = random.Random(seed).randrange(high)
        self._state = State(episode_id=episode_id)
        return Seen(text=f"Guess, below {high}.")

    def step(self, action, timeout_s=None) -> Seen:
        self._state.step_count += 1
        if action.number == 666:
            raise LookupError("no such guess")
        if action.number == self._number:
            return Seen(text="That is it.", reward=1.0, done=True)
        return Seen(text="Higher." if action.number < self._number else "Lower.", reward=-0.1)

    @property
    def state(self) -> State:
        return self._state


listener = socket.create_server(("127.0.0.1", 0))
print("ready {}:{}".format(*listener.getsockname()), flush=True)
app = create_fastapi_app(GuessEnvironment, Guess, Seen, max_concurrent_envs=8)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])
