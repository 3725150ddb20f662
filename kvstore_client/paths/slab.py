"""The slab path: this node's arenas, mapped, and the sessions that hold what is in use there.

Format: docs/formats/slab.md.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.envelope import ENVELOPE_BYTES, checksum
from kvstore.errors import CorruptBlockError, ProtocolError, UnavailableError
from kvstore.keys import BlockHash, NamespaceId
from kvstore.messages import BlockState, CommitState, Epoch, OwnerId
from kvstore.namespace import Namespace
from kvstore.slab import (
    ARENA_REPLY_BYTES,
    PAYLOAD_OFFSET_BYTES,
    SLOT_HEADER_BYTES,
    Access,
    ArenaReply,
    ConnectionKind,
    Generation,
    Hello,
    SlotRecord,
    SlotState,
    decode_slot_records,
    encode_arena_request,
    encode_slot_header,
    slot_state,
)
from kvstore_client.flows.steps import Fetch, Glance, Recall, SeenBlock, Send, View
from kvstore_client.forks import mend_after_fork
from kvstore_client.ids import new_owner_id
from kvstore_client.paths.idle import IdleCores
from kvstore_client.paths.slab_calls import CallPool, SessionLostError, TimedSocket, too_late
from kvstore_client.paths.slab_copy import Crew, load_slot, read_envelope, store_slot
from kvstore_client.paths.slab_places import KnownPlaces, PackedRecords, pack

_ONE = np.uint64(1)  # numpy's types know no shift of unsigned numbers by plain ones

IsStopped = Callable[[], bool]


def _never() -> bool:
    return False


class Arena:
    """One arena, mapped. It stays mapped for as long as anything looks into it."""

    __slots__ = ("incarnation", "is_read_only", "memory", "sequences", "size_bytes", "words")

    def __init__(self, fd: int, reply: ArenaReply, *, access: Access) -> None:
        self.is_read_only = access is Access.READ
        protection = mmap.PROT_READ if access is Access.READ else mmap.PROT_READ | mmap.PROT_WRITE
        self.memory = memoryview(mmap.mmap(fd, reply.size_bytes, flags=mmap.MAP_SHARED, prot=protection))
        self.words = self.memory.cast("Q")
        """The same 8 bytes at a time, each read whole."""
        self.sequences = np.frombuffer(self.memory, np.uint64)
        """The same, for many at once."""
        self.size_bytes = reply.size_bytes
        self.incarnation = reply.incarnation

    def shows(self, starts: npt.NDArray[np.uint64], sequences: npt.NDArray[np.uint64]) -> bool:
        """Whether the slots at these bytes have these sequences."""
        return bool((self.sequences[(starts >> 3).astype(np.int64)] == sequences).all())


class _Seen(NamedTuple):
    """A block that was found to be whole, and where its slot's sequence is now."""

    generation: Generation
    block_hash: BlockHash
    namespace_id: NamespaceId
    words: memoryview
    word_index: int
    block: SeenBlock


class SlabSession:
    """One SESSION connection: while it is open, the daemon keeps what is held in its name. Threads may share it."""

    def __init__(self, path: Path, *, access: Access, timeout_s: float) -> None:
        """Attaches. Raises `UnavailableError`, `DeadlineExceededError` or `ProtocolError`."""
        self.id: OwnerId = new_owner_id()
        self.path = path
        self._timeout_s = timeout_s
        hello = Hello(kind=ConnectionKind.SESSION, access=access, session_id=self.id)
        try:
            self._socket = TimedSocket(path, hello, timeout_s=timeout_s, idle_cores=IdleCores())
        except (OSError, EOFError) as error:
            raise UnavailableError(f"{path}: {getattr(error, 'strerror', None) or 'closed'}") from error
        welcome = self._socket.welcome
        self.epoch: Epoch = welcome.epoch
        self.access = welcome.access
        self.calls = CallPool(path, session_id=self.id)
        self._arena_count = welcome.arena_count
        self._arena_bytes = welcome.arena_bytes
        self._arenas: dict[int, Arena] = {}
        self._seen: dict[int, _Seen] = {}
        """By place: what was found to be whole there."""
        self._lock = threading.Lock()
        self._user_count = 0
        self._is_closed = False
        self.is_lost = False
        mend_after_fork(self)

    # --- what is held

    @contextmanager
    def used(self) -> Iterator[None]:
        """Around a copy: what is copied from or to is held by the session, which stays open until the last one ends."""
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the client is closed")
            self._user_count += 1
        try:
            yield
        finally:
            with self._lock:
                self._user_count -= 1
            self._close_when_unused()

    def close(self) -> None:
        """Gives back all that the session holds, once no copy is under way."""
        with self._lock:
            self._is_closed = True
        self.calls.close()
        self._close_when_unused()

    def _close_when_unused(self) -> None:
        with self._lock:
            if self._is_closed and not self._user_count:
                self._socket.socket.close()

    def after_fork(self) -> None:
        """For the child: the session is its parent's, and must end with it."""
        self._lock = threading.Lock()
        self.calls.close_descriptors()
        self._socket.socket.close()
        self.is_lost = True

    def is_alive(self) -> bool:
        """False once the daemon has closed the session, or has ended; costs one system call."""
        try:
            is_ended = self._socket.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return True
        except OSError:
            return False
        return not is_ended  # what is there is the answer to another thread

    # --- where things are

    def arenas(self) -> tuple[Arena, ...]:
        """What is mapped now."""
        return tuple(self._arenas.values())

    def is_mapped(self, records: Sequence[SlotRecord]) -> bool:
        """Whether nothing has to be asked of the daemon to reach these slots."""
        return all(record.place // self._arena_bytes in self._arenas for record in records)

    def is_readable(self, records: PackedRecords) -> bool:
        """Whether each of these slots is mapped and readable as what it was when it was met."""
        expected = records[:, 1] << _ONE | _ONE
        if self._arena_count == 1:
            arena = self._arenas.get(0)
            return arena is not None and arena.shows(records[:, 0], expected)
        indexes = records[:, 0] // self._arena_bytes
        starts = records[:, 0] % self._arena_bytes
        for index in np.unique(indexes).tolist():
            arena = self._arenas.get(index)
            is_inside = indexes == index
            if arena is None or not arena.shows(starts[is_inside], expected[is_inside]):
                return False
        return True

    def is_seen(self, records: Sequence[SlotRecord]) -> bool:
        """Whether these slots were viewed before, as what they are now."""
        found = (self._seen.get(record.place) for record in records)
        return all(
            known is not None and known.generation == record.generation
            for known, record in zip(found, records, strict=True)
        )

    def slot(self, record: SlotRecord, *, sequence: bytes, payload_bytes: int) -> memoryview:
        """The slot of a block: header, envelope, payload. Asks for its arena (again) when it does not begin with
        `sequence`; raises `ProtocolError` when the block does not fit there."""
        index, start = divmod(record.place, self._arena_bytes)
        end = start + PAYLOAD_OFFSET_BYTES + payload_bytes
        is_inside = start + SLOT_HEADER_BYTES + record.size_bytes <= self._arena_bytes
        if record.size_bytes < ENVELOPE_BYTES + payload_bytes or not is_inside:
            raise ProtocolError(f"a slot of {record.size_bytes} bytes at {record.place} for {payload_bytes} bytes")
        arena = self._arenas.get(index)
        if arena is None or arena.memory[start : start + len(sequence)] != sequence:
            arena = self._mapped(index, known=arena)
        return arena.memory[start:end]

    def _mapped(self, index: int, *, known: Arena | None) -> Arena:
        if not 0 <= index < self._arena_count:
            raise ProtocolError(f"arena {index}; the daemon has {self._arena_count}")
        if known is not None and self._arena_count == 1:
            return known  # nobody else's, ever
        with self._lock:
            found = self._arenas.get(index)
            if found is not known and found is not None:
                return found  # another thread was here first
            reply, fd = self._ask_for(index)
            try:
                if known is not None and known.incarnation == reply.incarnation:
                    return known
                if not self._arena_bytes <= reply.size_bytes <= os.fstat(fd).st_size:
                    raise ProtocolError(f"an arena of {reply.size_bytes} bytes that is not there")
                if known is not None:  # what was seen in it is not there any more, and must not keep it mapped
                    self._seen = {place: seen for place, seen in self._seen.items() if seen.words is not known.words}
                found = self._arenas[index] = Arena(fd, reply, access=self.access)
                return found
            finally:
                os.close(fd)

    def _ask_for(self, index: int) -> tuple[ArenaReply, int]:
        """The arena's descriptor, which the caller closes."""
        descriptors: list[int] = []
        try:
            self._socket.start(self._timeout_s)
            self._socket.send(encode_arena_request(index))
            data, descriptors, _, _ = socket.recv_fds(self._socket.socket, ARENA_REPLY_BYTES, 1)
            # An empty answer is the end of the connection, which `receive` finds, too.
            data += self._socket.receive(ARENA_REPLY_BYTES - len(data))
            return _granted(ArenaReply.decode(data), descriptors, index=index), descriptors[0]
        except BaseException as error:
            for descriptor in descriptors:
                os.close(descriptor)
            self.is_lost = True  # half a reply may be under way, or whatever was not understood
            match error:
                case BlockingIOError():
                    raise too_late("an arena", self._timeout_s) from error
                case EOFError() | OSError():
                    raise SessionLostError("the daemon has closed the slab session") from error
            raise

    # --- views

    def view(
        self, records: Sequence[SlotRecord], hashes: Sequence[BlockHash], *, namespace: Namespace, is_stopped: IsStopped
    ) -> list[SeenBlock | BlockState]:
        """Leased blocks in place, or what kept each from being one. Bytes are hashed at first sight only."""
        blocks: list[SeenBlock | BlockState] = []
        seen, namespace_id = self._seen, namespace.id
        for record, block_hash in zip(records, hashes, strict=True):
            place, generation, _ = record
            # By hand rather than in a function of its own: a view of known blocks costs hardly more than this.
            known = seen.get(place)
            if known is not None:
                known_generation, known_hash, known_namespace, words, index, block = known
                if (
                    known_generation == generation
                    and known_hash == block_hash
                    and known_namespace == namespace_id
                    and words[index] == generation << 1 | 1
                ):
                    blocks.append(block)
                    continue
            if is_stopped():
                break
            blocks.append(self._first_view(record, namespace=namespace, block_hash=block_hash))
        return blocks

    def _first_view(self, record: SlotRecord, *, namespace: Namespace, block_hash: BlockHash) -> SeenBlock | BlockState:
        generation = record.generation
        payload_bytes = namespace.stored_bytes
        slot = self.slot(record, sequence=_readable(generation), payload_bytes=payload_bytes)
        header = slot[:SLOT_HEADER_BYTES]
        state = slot_state(header, generation)
        if state is SlotState.GONE:
            return BlockState.MISS
        try:
            envelope = read_envelope(slot, namespace=namespace, block_hash=block_hash, payload_bytes=payload_bytes)
            payload = slot[PAYLOAD_OFFSET_BYTES:]
            is_sound = state is SlotState.VERIFIED or checksum(payload) == envelope.payload_checksum
        except CorruptBlockError:
            is_sound = False
        if slot_state(header, generation) is SlotState.GONE:
            return BlockState.MISS
        if not is_sound:
            return BlockState.CORRUPT
        index, start = divmod(record.place, self._arena_bytes)
        arena = self._arenas[index]
        block = SeenBlock(arena.memory, start, len(slot), generation)
        self._seen[record.place] = _Seen(generation, block_hash, namespace.id, arena.words, start // 8, block)
        return block


class SlabMover:
    """Moves blocks between the caller's memory and slots. `find` gives the session of an id while it lives."""

    def __init__(self, find: Callable[[OwnerId | None], SlabSession | None], *, copy_thread_count_max: int) -> None:
        self._find = find
        self._crew = Crew(thread_count_max=copy_thread_count_max)
        self._places = KnownPlaces()
        self._epoch: Epoch | None = None
        mend_after_fork(self)

    def recall(self, step: Recall) -> bytes:
        """See `Recall`."""
        session = self._find(step.owner_id)
        if session is None:
            return b""
        self._meet(session)
        records = self._places.find(step.namespace.id, step.hashes)
        if records is None or not session.is_readable(records):
            return b""
        return records.astype("<u8", copy=False).tobytes()

    def glance(self, step: Glance, sessions: Sequence[SlabSession]) -> bool:
        """See `Glance`; any of the sessions may have mapped what is to be seen."""
        for session in sessions:
            self._meet(session)
        records = self._places.find(step.namespace.id, step.hashes)
        return records is not None and any(session.is_readable(records) for session in sessions)

    def fetch(self, step: Fetch, *, is_stopped: IsStopped = _never) -> list[BlockState]:
        """See `Mover`; blocks that are left when `is_stopped` are misses."""
        session = self._session(step)
        records, payload_bytes = _records(step), step.namespace.stored_bytes
        states = [BlockState.MISS] * len(records)
        envelopes = step.namespace.envelopes

        def load(index: int) -> None:
            record = records[index]
            states[index] = load_slot(
                session.slot(record, sequence=_readable(record.generation), payload_bytes=payload_bytes),
                step.targets[index],
                generation=record.generation,
                envelopes=envelopes,
                block_hash=step.hashes[index],
            )

        with session.used():
            self._crew.run(load, block_count=len(records), block_bytes=payload_bytes, is_stopped=is_stopped)
        hits = [index for index, state in enumerate(states) if state is BlockState.HIT]
        self._note(step, hits, records)
        return states

    def send(self, step: Send, *, is_stopped: IsStopped = _never) -> list[CommitState] | None:
        """See `Mover`; what is left when `is_stopped` is not in its slot, and the daemon will not commit it."""
        session = self._session(step)
        records, payload_bytes = _records(step), step.namespace.stored_bytes
        envelopes = step.namespace.envelopes

        def store(index: int) -> None:
            record = records[index]
            sequence = encode_slot_header(record.generation, is_readable=False, is_verified=False)
            slot = session.slot(record, sequence=sequence, payload_bytes=payload_bytes)
            # Otherwise it is nobody's or somebody else's slot, and the daemon will say so when asked to commit.
            if slot[:SLOT_HEADER_BYTES] == sequence:
                store_slot(slot, step.blocks[index], envelopes=envelopes, block_hash=step.hashes[index])

        with session.used():
            self._crew.run(store, block_count=len(records), block_bytes=payload_bytes, is_stopped=is_stopped)
        self._note(step, range(len(records)), records)  # where they will be, if the daemon commits them
        return None

    def view(self, step: View, *, is_stopped: IsStopped = _never) -> list[SeenBlock | BlockState]:
        """What is left when `is_stopped` is left out."""
        # Not `used`: when the session ends meanwhile, so do the leases, and the headers tell.
        return self._session(step).view(_records(step), step.hashes, namespace=step.namespace, is_stopped=is_stopped)

    def is_mapped(self, step: Fetch | Send | View) -> bool:
        """Whether the step asks nothing of the daemon."""
        session = self._find(step.owner_id)
        return session is None or session.is_mapped(decode_slot_records(step.slots))

    def is_seen(self, step: View) -> bool:
        """Whether the step asks nothing of the daemon and hashes nothing."""
        session = self._find(step.owner_id)
        return session is None or session.is_seen(decode_slot_records(step.slots))

    def close(self) -> None:
        self._crew.close()

    def after_fork(self) -> None:
        self._crew.after_fork()

    def _note(self, step: Fetch | Send, indexes: Sequence[int], records: Sequence[SlotRecord]) -> None:
        self._places.note(
            step.namespace.id,
            [step.hashes[index] for index in indexes],
            pack([records[index] for index in indexes]),
        )

    def _session(self, step: Fetch | Send | View) -> SlabSession:
        session = self._find(step.owner_id)
        if session is None:
            raise UnavailableError("the slab session has ended, and what it held with it")
        self._meet(session)
        return session

    def _meet(self, session: SlabSession) -> None:
        """Another daemon, or another start of it, gives the same numbers to other blocks."""
        if session.epoch != self._epoch:
            self._epoch = session.epoch
            self._places.clear()


class OtherEpochError(UnavailableError):
    """Somebody else answers at the slab socket than the daemon that has named it."""


class SlabLink:
    """A client's sessions with the daemon of its node: one that reads, and from the first put on one that writes."""

    def __init__(self) -> None:
        self._sessions: dict[Access, SlabSession] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        mend_after_fork(self)

    def after_fork(self) -> None:
        """The sessions are the parent's; one that was being opened never will be here."""
        self._lock = threading.Lock()
        self._sessions = {}

    def living(self, access: Access) -> SlabSession | None:
        """The session, after a look at whether the daemon still is there."""
        session = self.session(access)
        if session is not None and not session.is_alive():
            self.drop(session)
            return None
        return session

    def session(self, access: Access) -> SlabSession | None:
        session = self._sessions.get(access)
        if session is not None and session.is_lost:
            self.drop(session)
            return None
        return session

    def find(self, owner_id: OwnerId | None) -> SlabSession | None:
        for session in tuple(self._sessions.values()):
            if session.id == owner_id:
                return session
        return None

    def arenas(self) -> tuple[Arena, ...]:
        return tuple(arena for session in tuple(self._sessions.values()) for arena in session.arenas())

    def attach(self, path: Path, *, access: Access, epoch: Epoch | None, timeout_s: float) -> SlabSession:
        """The session for `access`, attached if need be, with the daemon of this epoch. Raises a `KvstoreError`."""
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the client is closed")
            known = self.session(access)
            if known is not None:
                return known
            session = SlabSession(path, access=access, timeout_s=timeout_s)
            if epoch is not None and session.epoch != epoch:
                session.close()
                raise OtherEpochError(f"{path} belongs to another daemon, or another start of it")
            self._sessions[access] = session
        return self._still_open(session)

    def _still_open(self, session: SlabSession) -> SlabSession:
        """`close` does not wait for who is attaching, so that one may be there first, or see nothing of it."""
        if self._is_closed:
            self.drop(session)
            raise UnavailableError("the client is closed")
        return session

    def drop(self, session: SlabSession) -> None:
        """Lets go of a session that has ended, or of one whose daemon is not the one that answers now."""
        for access, known in tuple(self._sessions.items()):
            if known is session:
                self._sessions.pop(access, None)
        session.close()

    def drop_others(self, epoch: Epoch) -> None:
        for session in tuple(self._sessions.values()):
            if session.epoch != epoch:
                self.drop(session)

    def close(self) -> None:
        self._is_closed = True
        for session in tuple(self._sessions.values()):
            self.drop(session)


def _granted(reply: ArenaReply, descriptors: Sequence[int], *, index: int) -> ArenaReply:
    if not reply.is_granted:
        raise ProtocolError(f"arena {index} holds blocks of ours, but the daemon does not hand it out")
    if reply.index != index or not descriptors:
        raise ProtocolError(f"asked for arena {index}, got {reply} with {len(descriptors)} descriptors")
    return reply


def _readable(generation: Generation) -> bytes:
    return (generation << 1 | 1).to_bytes(8, "little")


def _records(step: Fetch | Send | View) -> list[SlotRecord]:
    records = decode_slot_records(step.slots)
    if len(records) != len(step.hashes):
        raise ProtocolError(f"{len(records)} slots for {len(step.hashes)} blocks")
    return records
