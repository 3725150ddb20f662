"""The process that moves blocks between an engine's host tier and the store: `python -m …mover SETUP`.

It ends with the channel to its engine. Lookups, loads and stores have a thread each, so that a lookup waits for no
copy. What was loaded is verified before it is told.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType

from pydantic import BaseModel, ConfigDict

from kvstore.errors import KvstoreError
from kvstore.messages import BlockState, CutReason
from kvstore.namespace import Namespace
from kvstore_client.client import Client
from kvstore_client.integrations._blocks import StoreSettings
from kvstore_client.integrations.tiering.messages import (
    DATAGRAM_BYTES_MAX,
    Answer,
    Identity,
    Kind,
    Task,
    decode_for_mover,
)
from kvstore_client.results import LookupResult, PutState

_States = tuple[bytes, KvstoreError | None]

_IS_STORED = frozenset({PutState.STORED, PutState.ALREADY_STORED})


class MoverSetup(BaseModel):
    """What a mover is started with. Nothing here is secret: others see it among the processes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    channel_fd: int
    memory_fd: int
    memory_offset_bytes: int
    memory_bytes: int
    row_bytes: int
    address: str | None
    transport: str
    recompute_s_per_block: float | None


class Mover:
    """Does what a channel's other end asks for, until that closes it."""

    def __init__(
        self,
        channel: socket.socket,
        memory: memoryview,
        *,
        row_bytes: int,
        client: Client,
        recompute_s_per_block: float | None,
    ) -> None:
        self._channel = channel
        self._memory = memory
        self._row_bytes = row_bytes
        self._client = client
        self._recompute_s_per_block = recompute_s_per_block
        self._namespaces: dict[int, Namespace] = {}
        self._queues: dict[Kind, queue.SimpleQueue[tuple[Task, Namespace] | None]] = {
            kind: queue.SimpleQueue() for kind in Kind
        }

    def run(self) -> None:
        does: dict[Kind, Callable[[Task, Namespace], _States]] = {
            Kind.LOOKUP: self._lookup,
            Kind.LOAD: self._load,
            Kind.STORE: self._store,
        }
        threads = [
            threading.Thread(target=self._work, args=(kind, does[kind]), name=f"mover {kind.name}", daemon=True)
            for kind in Kind
        ]
        for thread in threads:
            thread.start()
        while data := self._channel.recv(DATAGRAM_BYTES_MAX):
            asked = decode_for_mover(data)
            if isinstance(asked, Identity):
                self._namespaces[asked.group] = Namespace.decode(asked.namespace)
            else:
                self._queues[asked.kind].put((asked, self._namespaces[asked.group]))
        for waiting in self._queues.values():
            waiting.put(None)

    def _work(self, kind: Kind, do: Callable[[Task, Namespace], _States]) -> None:
        while (item := self._queues[kind].get()) is not None:
            task, namespace = item
            began_s = time.monotonic()
            try:
                states, error = do(task, namespace)
            except KvstoreError as refused:
                states, error = _misses(task), refused
            answer = Answer(
                kind=kind,
                part=task.part,
                states=states,
                took_s=time.monotonic() - began_s,
                error="" if error is None else f"{type(error).__name__}: {error}",
            )
            try:
                self._channel.send(answer.encode())
            except OSError:
                return  # the engine has ended, and the channel with it

    def _lookup(self, task: Task, namespace: Namespace) -> _States:
        result = self._client.lookup(namespace, task.hashes, recompute_s_per_block=self._recompute_s_per_block)
        return bytes(worth_loading(result)), result.error

    def _load(self, task: Task, namespace: Namespace) -> _States:
        result = self._client.get(namespace, task.hashes, into=self._rows(task))
        return bytes(result.states), result.error

    def _store(self, task: Task, namespace: Namespace) -> _States:
        result = self._client.put(namespace, task.hashes, self._rows(task), parent_hash=task.parent_hash)
        states = bytes(BlockState.HIT if state in _IS_STORED else BlockState.MISS for state in result.states)
        return states, result.error

    def _rows(self, task: Task) -> list[memoryview]:
        return [self._memory[row * self._row_bytes : (row + 1) * self._row_bytes] for row in task.rows]


def _misses(task: Task) -> bytes:
    return bytes([BlockState.MISS]) * len(task.hashes)


def worth_loading(result: LookupResult) -> Sequence[BlockState]:
    """What would come later than computing it takes reads as a miss."""
    if result.cut_reason is CutReason.NONE:
        return result.states
    states = list(result.states)
    end = min(len(states), result.matched_count + result.left_out_count)
    states[result.matched_count : end] = [BlockState.MISS] * (end - result.matched_count)
    return states


def _end_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Half a mover is none: the engine is told by the channel's end, and starts another."""
    traceback.print_exception(kind, error, trace)
    os._exit(1)


def main() -> None:
    setup = MoverSetup.model_validate_json(sys.argv[1])
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="kvstore mover: %(message)s")
    threading.excepthook = lambda told: _end_at_once(
        told.exc_type, told.exc_value or told.exc_type(), told.exc_traceback
    )
    # Engines pin their threads to cores, and children inherit that of the thread that starts them.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    memory = mmap.mmap(setup.memory_fd, setup.memory_bytes, offset=setup.memory_offset_bytes)
    settings = StoreSettings(address=setup.address, transport=setup.transport)
    Mover(
        socket.socket(fileno=setup.channel_fd),
        memoryview(memory),
        row_bytes=setup.row_bytes,
        client=settings.open_client(),
        recompute_s_per_block=setup.recompute_s_per_block,
    ).run()
    os._exit(0)  # nothing to give back: what the client holds goes with its process


if __name__ == "__main__":
    main()
