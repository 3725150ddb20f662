"""Runs a flow by hand: no sockets, no threads, outcomes from a list. Choosing a path and checksums are answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from kvstore.envelope import checksum
from kvstore.errors import KvstoreError
from kvstore.messages import TransferPath
from kvstore_client.flows.steps import Checksum, ChoosePath, Flow, Glance, HashAhead, Recall, Route

_Result = TypeVar("_Result")

Outcome: TypeAlias = object | KvstoreError | Callable[[Any], object]
"""A response; an error to throw; or a function of the step that acts and returns either."""


STREAM = Route(path=TransferPath.STREAM)


class Hashed:
    """Checksums that are known from the start."""

    def __init__(self, blocks: Sequence[memoryview]) -> None:
        self._checksums = [checksum(block) for block in blocks]

    def take(self, index: int) -> int:
        return self._checksums[index]

    def close(self) -> None:
        self._checksums.clear()


def run(
    flow: Flow[_Result], *outcomes: Outcome, route: Route = STREAM, known: bytes = b"", is_there: bool = False
) -> tuple[_Result, list[Any]]:
    """The flow's result and the steps it took; every outcome must be used, and no more be asked for.

    Choosing a path always gives `route`, recalling places `known`, and a glance `is_there`; they are no steps here, nor
    are checksums, whose threads are none.
    """
    steps: list[Any] = []
    left = list(outcomes)
    try:
        step = next(flow)
        while True:
            if isinstance(step, ChoosePath):
                step = flow.send(route)
                continue
            if isinstance(step, Recall):
                step = flow.send(known)
                continue
            if isinstance(step, Glance):
                step = flow.send(is_there)
                continue
            if isinstance(step, HashAhead):
                step = flow.send(Hashed(step.blocks))
                continue
            if isinstance(step, Checksum):
                step = flow.send([checksum(block) for block in step.blocks])
                continue
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
    """RPCs by their own names, other steps by what they are."""
    return [step.method.name if hasattr(step, "method") else type(step).__name__ for step in steps]
