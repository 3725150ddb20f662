"""Places, headers and descriptors of arenas, and arenas that change hands."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

from kvstore.slab import EMPTY_SLOT_HEADER, Access, Generation, SlotState, encode_slot_header, slot_state
from kvstore_server.core.space import Place, SlabId
from kvstore_server.shm.arenas import Arenas
from kvstore_server.shm.memory import MemorySource, PageKind

SLAB_BYTES = 4 * 4096
ARENA_COUNT = 3
SEVENTH = Generation(7)


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    """Three arenas of one slab each, as with tenants."""
    arenas = Arenas(
        sources=[MemorySource(kind=PageKind.PLAIN)],
        arena_count=ARENA_COUNT,
        arena_bytes=SLAB_BYTES,
        slab_bytes=SLAB_BYTES,
    )
    for slab in range(ARENA_COUNT):
        arenas.prefault(SlabId(slab))
    yield arenas
    arenas.close()


def mapped(arenas: Arenas, index: int, access: Access = Access.READ) -> mmap.mmap:
    """An arena as a client sees it."""
    descriptor = arenas.descriptor(index, access)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if access is Access.WRITE else 0)
    try:
        return mmap.mmap(descriptor, SLAB_BYTES, prot=protection)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("place", [0, 4096, SLAB_BYTES, SLAB_BYTES + 8192, 2 * SLAB_BYTES + 4096])
def test_what_lands_in_a_place_is_behind_its_header_in_the_right_arena(arenas: Arenas, place: int) -> None:
    arenas.land(Place(place), 0, b"envelope and ")
    arenas.land(Place(place), 13, memoryview(b"payload"))
    assert bytes(arenas.view(Place(place), 20)) == b"envelope and payload"
    index, start = divmod(place, SLAB_BYTES)
    with mapped(arenas, index) as seen:
        assert seen[start : start + 64] == EMPTY_SLOT_HEADER
        assert seen[start + 64 : start + 84] == b"envelope and payload"
        assert seen.find(b"payload") == start + 77


def test_clients_see_a_slot_as_it_is_written_becomes_readable_and_leaves(arenas: Arenas) -> None:
    place = Place(SLAB_BYTES + 4096)
    with mapped(arenas, 1) as seen:

        def state() -> SlotState:
            return slot_state(seen[4096 : 4096 + 64], SEVENTH)

        arenas.begin_slot(place, SEVENTH)
        assert arenas.header(place) == encode_slot_header(SEVENTH, is_readable=False, is_verified=False)
        assert state() is SlotState.GONE
        arenas.publish_slot(place, SEVENTH, is_verified=False)
        assert state() is SlotState.READABLE
        arenas.publish_slot(place, SEVENTH, is_verified=True)
        assert state() is SlotState.VERIFIED
        arenas.clear_slot(place)
        assert state() is SlotState.GONE
        assert arenas.header(place) == EMPTY_SLOT_HEADER
        arenas.begin_slot(place, Generation(8))
        arenas.publish_slot(place, Generation(8), is_verified=True)
        assert state() is SlotState.GONE, "the next use of a slot was taken for the one before"


def test_a_generation_of_the_last_hour_of_a_very_old_daemon_fits(arenas: Arenas) -> None:
    generation = Generation((1 << 63) - 1)
    arenas.publish_slot(Place(0), generation, is_verified=True)
    assert arenas.header(Place(0)) == encode_slot_header(generation, is_readable=True, is_verified=True)


def test_a_client_that_may_write_writes_where_the_daemon_reads(arenas: Arenas) -> None:
    with mapped(arenas, 2, Access.WRITE) as seen:
        seen[64:69] = b"bytes"
    assert bytes(arenas.view(Place(2 * SLAB_BYTES), 5)) == b"bytes"


def test_an_arena_that_changes_hands_shows_nothing_to_who_had_it_and_starts_empty(arenas: Arenas) -> None:
    place = Place(SLAB_BYTES)
    arenas.land(place, 0, b"of the one")
    with mapped(arenas, 1, Access.WRITE) as old:
        assert old[64:74] == b"of the one"
        before = arenas.incarnation(1)
        arenas.replace(1)
        arenas.prefault(SlabId(1))
        assert arenas.incarnation(1) != before
        assert bytes(arenas.view(place, 10)) == bytes(10)
        arenas.land(place, 0, b"of another")
        assert old[:] == bytes(SLAB_BYTES)
        old[64:74] = b"overwrites"
        assert bytes(arenas.view(place, 10)) == b"of another"
    assert [arenas.incarnation(index) for index in (0, 2)] == [before, before]


def test_memory_of_an_arena_that_was_replaced_is_free_although_somebody_maps_it(arenas: Arenas) -> None:
    """The capacity is a hard cap: two memories of one slab would pass it."""
    descriptor = arenas.descriptor(0, Access.READ)
    assert os.fstat(descriptor).st_blocks > 0
    arenas.replace(0)
    assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)


def test_a_view_that_outlives_its_arena_is_still_safe_to_read(arenas: Arenas) -> None:
    view = arenas.view(Place(0), 4)
    arenas.replace(0)
    assert bytes(view) == bytes(4)


def test_sealed_memory_may_be_written_by_anybody_and_a_file_only_by_our_own_user(arenas: Arenas) -> None:
    assert arenas.may_be_written_by(os.geteuid())
    assert arenas.may_be_written_by(os.geteuid() + 1)
    assert not MemorySource(kind=PageKind.HUGE_TMPFS).is_sealed
