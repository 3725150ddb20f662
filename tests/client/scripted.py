"""Runs a flow by hand: no sockets, no threads, outcomes from a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from kvstore.errors import KvstoreError
from kvstore_client.flows.steps import Flow

_Result = TypeVar("_Result")

Outcome: TypeAlias = object | KvstoreError | Callable[[Any], object]
"""A response; an error to throw; or a function of the step that acts and returns either."""


def run(flow: Flow[_Result], *outcomes: Outcome) -> tuple[_Result, list[Any]]:
    """The flow's result and the steps it took; every outcome must be used, and no more be asked for."""
    steps: list[Any] = []
    left = list(outcomes)
    try:
        step = next(flow)
        while True:
            steps.append(step)
            assert left, f"one step more than expected: {step}"
            outcome = left.pop(0)
            if callable(outcome):
                outcome = outcome(step)
            step = flow.throw(outcome) if isinstance(outcome, KvstoreError) else flow.send(outcome)
    except StopIteration as end:
        assert not left, f"never asked for {left}"
        result: _Result = end.value
        return result, steps


def names(steps: list[Any]) -> list[str]:
    return [step.method.name for step in steps]
