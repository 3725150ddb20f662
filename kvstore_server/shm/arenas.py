"""The memory tier's bytes: arenas that clients can map, made of slabs, faulted in one by one."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.envelope import Buffer
from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.slab import SLOT_HEADER_BYTES, Access, Generation
from kvstore_client.sizes import format_size
from kvstore_server.core.space import Place, SlabId
from kvstore_server.shm import memory
from kvstore_server.shm.memory import MemorySource, PageKind

_WORD_BYTES = 8
_U64_MAX = (1 << 64) - 1
_ZERO_WORDS = memoryview(bytes(SLOT_HEADER_BYTES - _WORD_BYTES)).cast("Q")


class _Arena:
    """One mapping with what is needed to reach it in the cheapest way."""

    __slots__ = ("address", "array", "fd", "incarnation", "map", "view", "words")

    def __init__(self, fd: int, size_bytes: int, *, incarnation: int) -> None:
        self.fd = fd
        self.incarnation = incarnation
        self.map = mmap.mmap(fd, size_bytes)
        self.view = memoryview(self.map)
        # Assigning to one of these is one aligned store of 8 bytes, which no reader can see half of.
        self.words = self.view.cast("Q")
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self.map, dtype=np.uint8)
        self.address = int(self.array.ctypes.data)

    def close(self) -> None:
        """Frees the mapping once nobody looks into it any more."""
        self.words.release()
        self.view.release()
        del self.array
        with contextlib.suppress(BufferError):  # it goes with the last view of it
            self.map.close()
        os.close(self.fd)


class Arenas:
    """Every slot lives here. Knows bytes and places, neither blocks nor holders.

    Arenas follow each other without gaps in the numbering of places and may lie anywhere in memory. They are
    reserved at start and never grown. A slab's pages exist only after `prefault`: first touch runs several times
    slower than a copy, and the request that is being served should not pay for it. One thread at a time may
    prefault or replace; everything else may happen beside it, in places that are in service.
    """

    def __init__(
        self,
        *,
        sources: Sequence[MemorySource],
        arena_count: int,
        arena_bytes: int,
        slab_bytes: int,
        is_locked: bool = False,
    ) -> None:
        """Takes the first source that gives the whole; raises `UnavailableError` when none does.

        If there is one only, it was asked for, and cannot be had: an `InvalidArgumentError`.
        """
        assert arena_bytes % slab_bytes == 0, f"{arena_bytes} is no multiple of {slab_bytes}"
        self.arena_bytes = arena_bytes
        self.arena_count = arena_count
        self.capacity_bytes = arena_count * arena_bytes
        self.page_bytes = memory.SMALL_PAGE_BYTES
        """Of the pages that the first slab was really given; known once it is faulted in."""
        self.passed_over: list[str] = []
        """Why each source before the one that was taken was not."""
        self._slab_bytes = slab_bytes
        self._is_locked = is_locked
        self._source, self._arenas = self._take(sources)
        if self.kind is PageKind.HUGETLB:
            self.page_bytes = memory.HUGE_PAGE_BYTES

    @property
    def kind(self) -> PageKind:
        return self._source.kind

    # --- bytes

    def land(self, place: Place, offset_bytes: int, data: Buffer) -> None:
        """Copies bytes into a slot, behind its header; releases the GIL."""
        index, start = divmod(place, self.arena_bytes)
        start += SLOT_HEADER_BYTES + offset_bytes
        np.copyto(self._arenas[index].array[start : start + len(data)], np.frombuffer(data, dtype=np.uint8))

    def view(self, place: Place, size_bytes: int) -> memoryview:
        """The envelope and payload of a slot themselves, not a copy; valid while the place is retained."""
        index, start = divmod(place, self.arena_bytes)
        start += SLOT_HEADER_BYTES
        return self._arenas[index].view[start : start + size_bytes]

    def slot(self, place: Place, size_bytes: int) -> memoryview:
        """A slot from its header on, which is at the start of a page; valid while the place is retained."""
        index, start = divmod(place, self.arena_bytes)
        return self._arenas[index].view[start : start + size_bytes]

    def header(self, place: Place) -> bytes:
        """The first 64 bytes of a slot, which a client that may write can have spoilt."""
        index, start = divmod(place, self.arena_bytes)
        return bytes(self._arenas[index].view[start : start + SLOT_HEADER_BYTES])

    # --- slot headers (kvstore.slab); the order of the two stores lets no reader see what is not so

    def begin_slot(self, place: Place, generation: Generation) -> None:
        words, index = self._header_words(place)
        words[index] = generation << 1
        # The rest, too: the slab may have been cut into slots of another size, and have held a payload here.
        words[index + 1 : index + SLOT_HEADER_BYTES // _WORD_BYTES] = _ZERO_WORDS

    def publish_slot(self, place: Place, generation: Generation, *, is_verified: bool) -> None:
        words, index = self._header_words(place)
        sequence = generation << 1 | 1
        words[index + 1] = sequence ^ _U64_MAX if is_verified else 0
        words[index] = sequence

    def clear_slot(self, place: Place) -> None:
        words, index = self._header_words(place)
        words[index] = 0
        words[index + 1] = 0

    # --- for those who map them

    def descriptor(self, index: int, access: Access) -> int:
        """A new descriptor of one arena, which the caller closes; a read-only one cannot be made writable."""
        fd = self._arenas[index].fd
        return memory.reopen_read_only(fd) if access is Access.READ else os.dup(fd)

    def may_be_written_by(self, uid: int) -> bool:
        """Whether a user may have a writable descriptor: any, where it cannot be used to take the memory away.

        A process of our own user could stop us in other ways, too.
        """
        return self._source.is_sealed or uid == os.geteuid()

    def incarnation(self, index: int) -> int:
        """Changes when an arena's memory is replaced."""
        return self._arenas[index].incarnation

    def address(self, index: int) -> int:
        """Where an arena lies in this process, for hardware that it is registered with."""
        return self._arenas[index].address

    # --- memory

    def prefault(self, slab: SlabId) -> None:
        """Faults one slab's pages in; blocks for a second or so per GiB and releases the GIL. Raises `OSError`."""
        index, start = divmod(slab * self._slab_bytes, self.arena_bytes)
        arena = self._arenas[index]
        memory.populate(arena.fd, arena.address + start, offset_bytes=start, size_bytes=self._slab_bytes)
        if slab == 0:
            self.page_bytes = memory.mapped_page_bytes(arena.address)

    def replace(self, index: int) -> None:
        """Gives an arena that nothing is in new memory, so that who has mapped the old can see nothing of what comes.

        The old memory is freed first, whoever still maps it, so that the capacity is never passed. Raises `OSError`
        when there is none to be had any more; the arena is of no use then, until this is tried again.
        """
        old = self._arenas[index]
        memory.give_back(old.fd, self.arena_bytes)
        self._arenas[index] = self._create(self._source, incarnation=old.incarnation + 1)
        old.close()

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()

    def _take(self, sources: Sequence[MemorySource]) -> tuple[MemorySource, list[_Arena]]:
        for source in sources:
            arenas: list[_Arena] = []
            try:
                source.check_room(self.capacity_bytes)
                for _ in range(self.arena_count):
                    arenas.append(self._create(source, incarnation=1))  # noqa: PERF401  (closed below if one fails)
            except OSError as error:
                for arena in arenas:
                    arena.close()
                self.passed_over.append(f"{source}: {error.strerror}")
            else:
                return source, arenas
        capacity, reasons = format_size(self.capacity_bytes), "; ".join(self.passed_over)
        message = f"no memory for {capacity} of arenas ({reasons}); lower memory.capacity"
        if len(sources) == 1:
            raise InvalidArgumentError(f"{message}, or set memory.pages to another kind or to auto")
        raise UnavailableError(message)

    def _create(self, source: MemorySource, *, incarnation: int) -> _Arena:
        fd = source.create(self.arena_bytes)
        try:
            arena = _Arena(fd, self.arena_bytes, incarnation=incarnation)  # of huge pages, this sets them aside
        except OSError:
            os.close(fd)
            raise
        if source.kind is PageKind.HUGE_TMPFS:
            memory.advise_huge(arena.address, self.arena_bytes)
        if self._is_locked:
            try:
                memory.lock(arena.address, self.arena_bytes)
            except OSError as error:
                arena.close()
                raise UnavailableError(
                    f"memory.lock is true, and the system does not let us lock "
                    f"{format_size(self.capacity_bytes)} ({error.strerror}); "
                    "raise RLIMIT_MEMLOCK (ulimit -l, systemd's LimitMEMLOCK), give CAP_IPC_LOCK, "
                    "or set memory.lock to false"
                ) from error
        return arena

    def _header_words(self, place: Place) -> tuple[memoryview, int]:
        index, start = divmod(place, self.arena_bytes)
        return self._arenas[index].words, start // _WORD_BYTES
