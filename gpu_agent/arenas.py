"""Keeps the store's arenas registered with the device, so that blocks go between VRAM and slots without a copy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from gpu_agent.device import Device, Registration
from gpu_agent.store import Arena
from kvstore.errors import KvstoreError

_log = structlog.get_logger("kvstore.agent")


@dataclass(slots=True)
class _Known:
    arena: Arena
    registration: Registration | None = None
    is_settled: bool = False
    """Whether it was registered, or was tried and cannot be."""


class ArenaRegistrar:
    """Registers what is mapped and unregisters what is not any more, in a thread of its own: it takes seconds.

    Until an arena is registered, and where it cannot be, blocks go through staging. Memory that is registered stays
    mapped. A failure is told once per arena and changes nothing else.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._known: dict[int, _Known] = {}
        """By identity of their memory: another mapping of the same arena is another one."""
        self._leaving: list[_Known] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstore-agent-arenas", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def follow(self, arenas: Sequence[Arena]) -> None:
        """Takes note of what is mapped now; never waits."""
        with self._changed:
            mapped = {id(arena.memory): arena for arena in arenas}
            if mapped.keys() == self._known.keys():
                return
            for key in self._known.keys() - mapped.keys():
                self._leaving.append(self._known.pop(key))
            for key in mapped.keys() - self._known.keys():
                self._known[key] = _Known(mapped[key])
            self._changed.notify_all()

    def is_direct(self, *, is_written: bool) -> bool:
        """Whether the device reaches some slots, for reading or for writing, so that asking for slots is worth it."""
        with self._changed:
            return any(
                known.registration is not None and not (is_written and known.arena.is_read_only)
                for known in self._known.values()
            )

    def wait_settled(self, timeout_s: float) -> bool:
        """Until everything that is mapped is registered or was refused; False when that took longer."""
        with self._changed:
            return self._changed.wait_for(self._is_settled, timeout_s)

    def close(self, *, timeout_s: float) -> None:
        """Unregisters everything; what is being registered for longer than this is left to the process's end."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # --- on the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                leaving, self._leaving = self._leaving, []
                if self._is_stopping:
                    leaving += self._known.values()
                    self._known.clear()
                coming = [known for known in self._known.values() if not known.is_settled]
                is_last = self._is_stopping
            for known in leaving:
                self._unregister(known)
            for known in coming:
                registration = self._register(known.arena)
                with self._changed:
                    known.registration, known.is_settled = registration, True
                    self._changed.notify_all()
            if is_last:
                return

    def _register(self, arena: Arena) -> Registration | None:
        size_bytes = len(arena.memory)
        try:
            registration = self._device.register_host(arena.memory, is_read_only=arena.is_read_only)
        except KvstoreError as error:
            _log.warning(
                "arena_not_registered",
                size_bytes=size_bytes,
                is_read_only=arena.is_read_only,
                reason=str(error),
                effect="blocks of this arena go through staging buffers",
            )
            return None
        _log.info("arena_registered", size_bytes=size_bytes, is_read_only=arena.is_read_only)
        return registration

    def _unregister(self, known: _Known) -> None:
        try:
            if known.registration is not None:
                known.registration.unregister()
        except KvstoreError as error:  # the device is lost: its memory with it
            _log.warning("arena_not_unregistered", size_bytes=len(known.arena.memory), reason=str(error))

    def _has_work(self) -> bool:
        return self._is_stopping or bool(self._leaving) or not self._is_settled()

    def _is_settled(self) -> bool:
        return all(known.is_settled for known in self._known.values()) and not self._leaving
