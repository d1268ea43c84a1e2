"""Rules of learner/keepers.py and learner/setbacks.py, with an engine that only dies."""

from __future__ import annotations

import pytest

from buffers.errors import EngineDied, EngineError
from learner.keepers import revive_engine, start_engine
from learner.setbacks import MAX_IN_A_ROW, Setbacks


class Mortal:
    """Its first starts fail, with these errors."""

    def __init__(self, *errors: EngineError) -> None:
        self.errors = list(errors)
        self.starts = 0
        self.is_kept = False

    async def start(self) -> None:
        self.starts += 1
        if self.errors:
            raise self.errors.pop(0)

    revive = start

    async def until_dead(self) -> None:
        """It is dead."""


async def test_an_engine_that_dies_while_it_starts_is_started_again() -> None:
    engine, setbacks = Mortal(EngineDied("killed"), EngineDied("killed")), Setbacks()
    await start_engine(engine, setbacks=setbacks)
    assert engine.starts == 3 and setbacks.figures() == {"restarts/engine": 2.0}


async def test_an_engine_that_cannot_start_is_not_tried_again() -> None:
    engine = Mortal(EngineError("no such model"))
    with pytest.raises(EngineError, match="no such model"):
        await start_engine(engine, setbacks=Setbacks())
    assert engine.starts == 1


async def test_an_engine_that_keeps_dying_ends_it_with_its_error_and_a_step_forgives() -> None:
    setbacks = Setbacks()
    for _ in range(MAX_IN_A_ROW):
        await revive_engine(Mortal(), setbacks=setbacks)
    with pytest.raises(EngineError, match="the engine process died"):
        await revive_engine(Mortal(), setbacks=setbacks)
    setbacks.progress()
    await revive_engine(Mortal(EngineError("again")), setbacks=setbacks)
    assert setbacks.figures() == {"restarts/engine": MAX_IN_A_ROW + 2.0}
