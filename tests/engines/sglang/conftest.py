from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.models import ensure_models

from .rig import Engine

_MODELS = ("tiny-llama", "tiny-llama-reseeded")


@pytest.fixture(scope="session")
def models() -> dict[str, Path]:
    return dict(zip(_MODELS, ensure_models(*_MODELS), strict=True))


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts engines with arguments of `Engine`, and ends with the test those that it left."""
    started: list[Engine] = []
    numbers = itertools.count()

    def start(model: Path, **settings: Any) -> Engine:
        engine = Engine(model, log_path=tmp_path / f"engine{next(numbers)}.log", **settings)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.kill()
