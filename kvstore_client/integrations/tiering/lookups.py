"""What requests that wait want to know of blocks, and what is known. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.messages import BlockState


@dataclass(slots=True)
class _Asked:
    request_ids: set[str] = field(default_factory=set)
    is_there: bool | None = None
    """None until it is known."""
    first_asked_s: float | None = None
    """None until it has been asked."""


class Lookups:
    """Collects questions of one step, so that they are asked at once, and keeps answers while a request wants them.

    A key is unknown until it is answered, or for at most `timeout_s` after it was asked; then it counts as a miss. What
    another writer is just storing is asked again until then. A key is forgotten with the last request that asked, and
    an answer to a forgotten key changes nothing.
    """

    def __init__(self, *, timeout_s: float, again_s: float = 0.01) -> None:
        self._timeout_s = timeout_s
        self._again_s = again_s
        self._keys: dict[bytes, _Asked] = {}
        self._requests: dict[str, set[bytes]] = {}
        self._new: list[bytes] = []
        self._open: dict[bytes, None] = {}
        """Asked and unknown, in the order of `first_asked_s`."""
        self._again: dict[bytes, float] = {}
        """Of the open ones, those that another writer is storing, and when to ask again."""

    def ask(self, key: bytes, request_id: str) -> bool | None:
        """Whether the block is there; None while that is not known."""
        asked = self._keys.get(key)
        if asked is None:
            asked = self._keys[key] = _Asked()
            self._new.append(key)
        if request_id not in asked.request_ids:
            asked.request_ids.add(request_id)
            self._requests.setdefault(request_id, set()).add(key)
        return asked.is_there

    def take(self, *, now_s: float) -> list[bytes]:
        """What is to be asked now. What has waited for too long becomes a miss."""
        self._expire(now_s)
        due = [key for key, at_s in self._again.items() if at_s <= now_s] if self._again else []
        for key in due:
            del self._again[key]
        for key in self._new:
            asked = self._keys.get(key)
            if asked is not None and asked.first_asked_s is None:
                asked.first_asked_s = now_s
                self._open[key] = None
                due.append(key)
        self._new.clear()
        return due

    def answer(self, keys: Sequence[bytes], states: Sequence[int], *, now_s: float) -> None:
        for key, state in zip(keys, states, strict=True):
            if key not in self._open:
                continue
            if state == BlockState.PENDING:
                self._again[key] = now_s + self._again_s
            else:
                self._know(key, state == BlockState.HIT)

    def miss(self, keys: Iterable[bytes]) -> None:
        """They cannot be had, whatever was answered: who asked is not to try again."""
        for key in keys:
            if key in self._keys:
                self._know(key, False)

    def forget(self, request_id: str) -> None:
        for key in self._requests.pop(request_id, ()):
            asked = self._keys[key]
            asked.request_ids.discard(request_id)
            if not asked.request_ids:
                del self._keys[key]
                self._open.pop(key, None)
                self._again.pop(key, None)

    def check_invariants(self) -> None:
        assert self._again.keys() <= self._open.keys() <= self._keys.keys()
        for key, asked in self._keys.items():
            assert asked.request_ids, key
            assert all(key in self._requests[request_id] for request_id in asked.request_ids), key
            assert (key in self._open) == (asked.first_asked_s is not None and asked.is_there is None), key
        for request_id, keys in self._requests.items():
            assert all(request_id in self._keys[key].request_ids for key in keys), request_id

    def _expire(self, now_s: float) -> None:
        for key in list(self._open):
            first_asked_s = self._keys[key].first_asked_s
            assert first_asked_s is not None, key
            if first_asked_s + self._timeout_s > now_s:
                break
            self._know(key, False)

    def _know(self, key: bytes, is_there: bool) -> None:
        asked = self._keys[key]
        asked.is_there = is_there
        if asked.first_asked_s is None:
            asked.first_asked_s = float("-inf")
        self._open.pop(key, None)
        self._again.pop(key, None)
