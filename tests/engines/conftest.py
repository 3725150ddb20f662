"""Tests with real engines. Each folder's tests are marked with its engine, and skip where it is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ENGINES = ("vllm", "sglang")
_FOLDER = Path(__file__).parent
_TEST_S_MAX = 900
"""Of one test; what an engine is asked has deadlines of its own, far below."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(_FOLDER):
            continue
        engine = item.path.relative_to(_FOLDER).parts[0]
        if engine not in ENGINES:
            continue
        item.add_marker(getattr(pytest.mark, engine))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TEST_S_MAX))
        if importlib.util.find_spec(engine) is None:
            item.add_marker(pytest.mark.skip(reason=f"needs {engine}: make test-engines"))
