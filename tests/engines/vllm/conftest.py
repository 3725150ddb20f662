from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engines.models import ensure_models

from .rig import Engine, Reference

_MODELS = ("tiny-llama", "tiny-llama-reseeded", "tiny-hybrid", "tiny-lora", "tiny-lora-reseeded")


@pytest.fixture(scope="session")
def models() -> dict[str, Path]:
    return dict(zip(_MODELS, ensure_models(*_MODELS), strict=True))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Reference]]:
    """The reference for a model, a dtype and other settings. One of them has an engine running, at most."""
    known: dict[str, Reference] = {}

    def find(model: Path, **settings: Any) -> Reference:
        key = repr((model, sorted(settings.items())))
        for other_key, other in known.items():
            if other_key != key:
                other.rest()
        if key not in known:
            log_path = tmp_path_factory.mktemp("reference") / "engine.log"
            known[key] = Reference(partial(Engine, model, log_path=log_path, **settings))
        return known[key]

    yield find
    for one in known.values():
        one.rest()


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
