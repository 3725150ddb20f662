"""Where the time of one loaded prompt goes: the connector's parts, each told when it begins and ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PHASES = {
    "ask": "the engine takes the request up, hashes it, and the lookup begins",
    "lookup": "until the store has answered what it has",
    "begin": "until a step tells the worker to load, and its thread takes that up",
    "load": "the load: calls of the store, its checks, and copies",
    "notice": "until the step begins that computes the rest",
    "compute": "that step's model",
    "answer": "until the caller has the token",
}
PARTS = {
    "load_copy": "of the load: bytes from slots to the engine's blocks",
    "load_check": "of the load: that slots did not change meanwhile",
    "load_store": "of the load: the rest, calls of the store above all",
}


class Clockwork:
    """Notes when wrapped methods are called and return, on any thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, float]] = []

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                self.calls.append((name, began_s, time.perf_counter()))

        setattr(owner, method, timed)

    def began_s(self, name: str) -> float:
        return min(began_s for called, began_s, _ in self.calls if called == name)

    def ended_s(self, name: str) -> float:
        return max(ended_s for called, _, ended_s in self.calls if called == name)

    def took_s(self, name: str) -> float:
        return sum(ended_s - began_s for called, began_s, ended_s in self.calls if called == name)


def measure(llm: Any, ask: Callable[[], object]) -> dict[str, float]:
    """Seconds per phase of the prompt that `ask` asks; all of its blocks are to come from the store."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvstore_client.views import BlockView

    core = llm.llm_engine.engine_core.engine_core
    scheduler_side = core.scheduler.connector._scheduler  # noqa: SLF001  (what is measured is inside)
    worker_side = get_kv_transfer_group()._worker  # noqa: SLF001
    clock = Clockwork()
    wrapped = [
        (scheduler_side._lookups, "_ask", "lookup"),  # noqa: SLF001
        (worker_side, "_load", "load"),
        (core.model_executor, "execute_model", "compute"),
        *((mover, "write", "copy") for mover in worker_side._movers if mover is not None),  # noqa: SLF001
        (BlockView, "is_valid", "check"),
    ]
    before = [(owner, method, vars(owner).get(method)) for owner, method, _ in wrapped]
    for owner, method, name in wrapped:
        clock.wrap(owner, method, name)
    try:
        began_s = time.perf_counter()
        ask()
        ended_s = time.perf_counter()
    finally:
        for owner, method, own in before:
            if own is None:
                delattr(owner, method)
            else:
                setattr(owner, method, own)
    return _phases(clock, began_s=began_s, ended_s=ended_s)


def _phases(clock: Clockwork, *, began_s: float, ended_s: float) -> dict[str, float]:
    loaded_s = clock.ended_s("load")
    # Steps without tokens come and go while the load is under way.
    computed = [(began, ended) for name, began, ended in clock.calls if name == "compute" and began >= loaded_s]
    computes_s, computed_s = max(computed, key=lambda times: times[1] - times[0])
    marks_s = [
        began_s,
        clock.began_s("lookup"),
        clock.ended_s("lookup"),
        clock.began_s("load"),
        loaded_s,
        computes_s,
        computed_s,
        ended_s,
    ]
    found = {phase: end_s - start_s for phase, start_s, end_s in zip(PHASES, marks_s, marks_s[1:], strict=False)}
    copy_s, check_s = clock.took_s("copy"), clock.took_s("check")
    return found | {"load_copy": copy_s, "load_check": check_s, "load_store": found["load"] - copy_s - check_s}
