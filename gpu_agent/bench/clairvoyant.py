"""How little must move, for somebody who knows the whole schedule. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from gpu_agent.bench.serving import Step
from kvstore.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Moves:
    """Blocks that cross the link."""

    loaded_count: int
    offloaded_count: int

    @property
    def count(self) -> int:
        return self.loaded_count + self.offloaded_count


@dataclass(slots=True)
class _Held:
    """What one sequence has in the pool: blocks with and without a copy below, and its tail that is not full."""

    clean_count: int = 0
    dirty_count: int = 0
    total_count: int = 0
    has_tail: bool = False
    is_running: bool = False

    @property
    def pool_count(self) -> int:
        return self.clean_count + self.dirty_count


def clairvoyant_moves(steps: Sequence[Step], *, tokens_per_block: int, slot_count: int) -> Moves:
    """Belady's rule on the same steps: blocks come when they are needed, those that are needed last make room.

    Of a sequence that waits, those leave first that cost no copy. Nothing is lost, so every block that leaves for the
    first time is copied. Tails that are not full stay, as they do in an agent's pool.
    """
    starts: dict[str, list[int]] = {}
    for step in steps:
        for name in step.starts:
            starts.setdefault(name, []).append(step.number)
    held = {name: _Held() for name in starts}
    loaded_count = offloaded_count = 0

    def needed_at(name: str, number: int) -> float:
        later = bisect_right(starts[name], number)
        return starts[name][later] if later < len(starts[name]) else inf

    def make_room(number: int) -> int:
        """Returns how many blocks it copied down."""
        copied_count = 0
        excess_count = sum(one.pool_count + one.has_tail for one in held.values()) - slot_count
        while excess_count > 0:
            waiting = [name for name, one in held.items() if one.pool_count and not one.is_running]
            if not waiting:
                raise InvalidArgumentError.of("slot_count", slot_count, f"{excess_count} more for one step's sequences")
            last = held[max(waiting, key=lambda name: needed_at(name, number))]
            clean_count = min(excess_count, last.clean_count)
            dirty_count = min(excess_count - clean_count, last.dirty_count)
            last.clean_count -= clean_count
            last.dirty_count -= dirty_count
            excess_count -= clean_count + dirty_count
            copied_count += dirty_count
        return copied_count

    for step in steps:
        for name in step.starts:
            one = held[name]
            one.is_running = True
            missing_count = one.total_count - one.pool_count
            loaded_count += missing_count
            one.clean_count += missing_count
        for work in step.works:
            one, after_count = held[work.sequence], work.token_count + work.new_count
            new_count = after_count // tokens_per_block - one.total_count
            one.dirty_count += new_count
            one.total_count += new_count
            one.has_tail = after_count % tokens_per_block > 0
        offloaded_count += make_room(step.number)
        for name in step.ends:
            held[name].is_running = False
            if needed_at(name, step.number) == inf:
                held[name].has_tail = False
    return Moves(loaded_count, offloaded_count)
