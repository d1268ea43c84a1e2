"""Two steps under each of many settings report and learn what they did when `tests/support/golden_steps.json` was written: a change
that is meant to change no number changes none."""

import json
from pathlib import Path

import pytest

from tests.support.golden_steps import FILE, figures
from tests.support.learner_parts import make_model

GOLDEN: dict[str, dict[str, float]] = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.seconds
@pytest.mark.parametrize("label", GOLDEN)
def test_steps_give_the_numbers_that_they_gave_before(label: str, model: Path, tmp_path: Path) -> None:
    assert figures(label, model=model, folder=tmp_path) == pytest.approx(GOLDEN[label], rel=1e-3, abs=1e-4)
