"""Jobs under way at a mover, in parts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

from kvstore.messages import BlockState
from kvstore_client.integrations.tiering.messages import Kind, PartId

JobId = NewType("JobId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What became of one job. `done` are the keys whose blocks are where they were to go, whole and verified."""

    job_id: JobId
    kind: Kind
    done: tuple[bytes, ...]
    failed: tuple[bytes, ...]
    took_s: float


@dataclass(slots=True, kw_only=True)
class _Job:
    kind: Kind
    left_count: int
    done: list[bytes] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)
    took_s: float = 0.0


class Jobs:
    """Knows which part belongs to which job, and tells of each job once: when all its parts have ended."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, _Job] = {}
        self._parts: dict[PartId, tuple[JobId, tuple[bytes, ...]]] = {}
        self.storing_count = 0
        """Blocks that stores under way hold in the host tier."""

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def begin(self, job_id: JobId, kind: Kind, parts: Mapping[PartId, Sequence[bytes]]) -> None:
        assert job_id not in self._jobs, job_id
        assert parts, job_id
        self._jobs[job_id] = _Job(kind=kind, left_count=len(parts))
        for part, keys in parts.items():
            self._parts[part] = (job_id, tuple(keys))
            self.storing_count += len(keys) * (kind is Kind.STORE)

    def answer(self, part: PartId, states: bytes, *, took_s: float) -> Finished | None:
        """None while the job has other parts under way, and for a part that is not."""
        if part not in self._parts:
            return None
        job_id, keys = self._parts.pop(part)
        job = self._jobs[job_id]
        for key, state in zip(keys, states, strict=True):
            (job.done if state == BlockState.HIT else job.failed).append(key)
        job.took_s += took_s
        job.left_count -= 1
        self.storing_count -= len(keys) * (job.kind is Kind.STORE)
        if job.left_count:
            return None
        del self._jobs[job_id]
        return Finished(job_id=job_id, kind=job.kind, done=tuple(job.done), failed=tuple(job.failed), took_s=job.took_s)

    def fail(self) -> list[Finished]:
        """Ends all that is under way: only once nothing touches the host tier any more."""
        ended = [
            self.answer(part, bytes([BlockState.MISS]) * len(keys), took_s=0.0)
            for part, (_, keys) in list(self._parts.items())
        ]
        return [finished for finished in ended if finished is not None]

    def check_invariants(self) -> None:
        for job_id, job in self._jobs.items():
            parts = [keys for owner, keys in self._parts.values() if owner == job_id]
            assert job.left_count == len(parts) > 0, job_id
        assert {owner for owner, _ in self._parts.values()} == self._jobs.keys()
        held = (len(keys) for owner, keys in self._parts.values() if self._jobs[owner].kind is Kind.STORE)
        assert self.storing_count == sum(held), self.storing_count


class Progress:
    """Tells a mover that hangs from one that has much to do: of each kind, tasks are done one after another."""

    def __init__(self, *, hang_s: float) -> None:
        self._hang_s = hang_s
        self._open: dict[PartId, Kind] = {}
        self._since_s: dict[Kind, float] = {}

    @property
    def is_awaited(self) -> bool:
        return bool(self._open)

    def begin(self, part: PartId, kind: Kind, *, now_s: float) -> None:
        if kind not in self._open.values():
            self._since_s[kind] = now_s
        self._open[part] = kind

    def end(self, part: PartId, *, now_s: float) -> None:
        kind = self._open.pop(part, None)
        if kind is not None:
            self._since_s[kind] = now_s

    def is_hung(self, *, now_s: float) -> bool:
        return any(self._since_s[kind] + self._hang_s < now_s for kind in set(self._open.values()))

    def clear(self) -> None:
        self._open.clear()
