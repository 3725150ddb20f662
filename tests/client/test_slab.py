"""Both clients on a slab socket that refuses, ends sessions, hangs, restarts and lies."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import wire
from kvstore.errors import DeadlineExceededError, InternalError, ProtocolError, UnavailableError
from kvstore.messages import BlockState, Epoch
from kvstore.slab import (
    EMPTY_SLOT_HEADER,
    PAYLOAD_OFFSET_BYTES,
    SLOT_HEADER_BYTES,
    Access,
    Generation,
    SlotRecord,
    decode_slot_records,
    encode_slot_header,
    encode_slot_records,
)
from kvstore_client import AsyncClient, Client, PutState, cli
from kvstore_client.paths.slab_calls import CONNECTIONS_MAX
from tests.client.adapters import AnyClient
from tests.client.builders import FAST, chain, enveloped, namespace, payloads
from tests.client.conftest import Connect
from tests.client.fake_slab import FakeSlabDaemon

HIT, MISS, CORRUPT = BlockState.HIT, BlockState.MISS, BlockState.CORRUPT
SLAB = replace(FAST, transport="slab")
BLANK = b"\x55" * 256


@pytest.fixture
def slab() -> Iterator[FakeSlabDaemon]:
    daemon = FakeSlabDaemon()
    yield daemon
    daemon.close()


class Stored:
    """Three blocks that a daemon has, put through its slab."""

    def __init__(self, client: AnyClient, daemon: FakeSlabDaemon) -> None:
        self.client = client
        self.space = namespace()
        self.hashes = chain(3)
        self.blocks = payloads(self.space, 3)
        stored = client.put(self.space, self.hashes, self.blocks)
        assert stored.stored_count == 3, stored
        self.records = [daemon.records[self.space.id, block_hash] for block_hash in self.hashes]

    def load(self) -> tuple[list[BlockState], Exception | None]:
        memory = [bytearray(BLANK) for _ in self.hashes]
        loaded = self.client.get(self.space, self.hashes, memory)
        for state, found, right in zip(loaded.states, memory, self.blocks, strict=True):
            assert found == right or state is not HIT
        return list(loaded.states), loaded.error


@pytest.fixture
def stored(connect: Connect, slab: FakeSlabDaemon) -> Stored:
    return Stored(connect(slab.address, config=SLAB), slab)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "kvstore.client"]


# --- which way


def test_bytes_never_touch_grpc_where_memory_is_shared(stored: Stored, slab: FakeSlabDaemon) -> None:
    assert stored.load() == ([HIT, HIT, HIT], None)
    assert not {"ReadBlocks", "WriteBlocks"} & set(slab.calls)
    assert slab.arena_requests == [0, 0], "one mapping to write, one to read, each asked for once"


def test_a_client_that_only_reads_asks_for_no_more(connect: Connect, slab: FakeSlabDaemon, stored: Stored) -> None:
    reader = connect(slab.address, config=SLAB)
    assert reader.get(stored.space, stored.hashes, bytearray(768)).matched_count == 3
    assert slab.session_count == 2, "one of who has put, one of who reads"


def test_a_unix_address_needs_no_grpc_at_all(slab: FakeSlabDaemon) -> None:
    address = f"unix:{str(slab.slab_socket).removesuffix('.slab')}"
    script = (
        "import sys\n"
        "from kvstore_client import Client\n"
        "from tests.client.builders import chain, namespace, payloads\n"
        f"with Client({address!r}) as client:\n"
        "    space, memory = namespace(), bytearray(512)\n"
        "    assert client.put(space, chain(2), payloads(space, 2)).stored_count == 2\n"
        "    assert client.get(space, chain(2), memory).matched_count == 2\n"
        "    assert memory == b''.join(payloads(space, 2))\n"
        "print('grpc' in sys.modules)\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("trouble", ["refused", "absent", "other daemon", "not offered"])
def test_a_client_that_cannot_attach_says_so_once_and_goes_on_over_streams(
    connect: Connect, slab: FakeSlabDaemon, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    match trouble:
        case "refused":
            slab.refusal = "user 7 may not use this store"
        case "absent":
            slab.slab_socket.unlink()
        case "other daemon":
            slab.rewrites["GetStoreInfo"] = lambda info: replace(info, epoch=Epoch(b"x" * 16))
        case "not offered":
            slab.rewrites["GetStoreInfo"] = lambda info: replace(info, slab_socket="")
    client, space, hashes = connect(slab.address), namespace(), chain(2)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert client.put(space, hashes, payloads(space, 2)).stored_count == 2
            assert client.get(space, hashes, bytearray(512)).matched_count == 2
    assert {"ReadBlocks", "WriteBlocks"} <= set(slab.calls)
    (line,) = told(caplog)
    assert line.startswith("blocks travel over grpc, not through shared memory: ")
    assert client.transport == "grpc"
    reasons = {
        "refused": slab.refusal,
        "absent": "No such file",
        "other daemon": "another daemon",
        "not offered": "no slab",
    }
    assert reasons[trouble] in line


def test_insisting_on_a_slab_that_is_not_there_makes_misses_with_the_reason(
    connect: Connect, slab: FakeSlabDaemon
) -> None:
    slab.refusal = "user 7 may not use this store"
    client, space, hashes = connect(slab.address, config=SLAB), namespace(), chain(2)
    for result in (
        client.lookup(space, hashes),
        client.get(space, hashes, bytearray(512)),
        client.put(space, hashes, bytes(512)),
        client.acquire(space, hashes),
    ):
        assert isinstance(result.error, UnavailableError)
        assert "transport is 'slab'" in str(result.error)
        assert slab.refusal in str(result.error)


def test_who_may_only_read_puts_over_streams(
    connect: Connect, slab: FakeSlabDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    slab.granted = Access.READ
    client, space, hashes = connect(slab.address), namespace(), chain(2)
    for _ in range(2):
        assert client.put(space, hashes, payloads(space, 2)).stored_count == 2
        assert client.get(space, hashes, bytearray(512)).matched_count == 2
    assert slab.count(wire.WRITE_BLOCKS) == 1
    assert slab.count(wire.READ_BLOCKS) == 0
    (line,) = told(caplog)
    assert line.startswith("puts travel over grpc, not through shared memory: ")
    assert "reading only" in line
    assert client.transport == "slab"


def test_a_return_to_shared_memory_is_told_and_the_next_fall_back_warns_again(
    connect: Connect, slab: FakeSlabDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    client, space, hashes = connect(slab.address), namespace(), chain(2)
    caplog.set_level(logging.INFO, "kvstore.client")

    def use() -> None:
        for _ in range(2):
            assert client.put(space, hashes, payloads(space, 2)).error is None
            assert client.get(space, hashes, bytearray(512)).error is None

    for refusal in ("no room", "", "no room again"):
        slab.refusal = refusal
        slab.restart()  # another start has other ways, which are tried at once
        client.info()
        use()
    reported = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "kvstore.client"]
    prefix = "blocks travel over grpc, not through shared memory: the daemon refuses this client: "
    assert reported == [
        ("WARNING", f"{prefix}no room"),
        ("INFO", "blocks travel through shared memory again"),
        ("WARNING", f"{prefix}no room again"),
    ]


def test_who_is_refused_hears_why_when_grpc_cannot_be_used_either(connect: Connect, slab: FakeSlabDaemon) -> None:
    slab.refusal = "user 7 may not use this store"
    client = connect(f"unix:{str(slab.slab_socket).removesuffix('.slab')}")  # where the fake has no gRPC
    assert slab.refusal in str(client.get(namespace(), chain(1), bytearray(256)).error)
    with pytest.raises(UnavailableError, match=slab.refusal):
        client.info()


def test_ping_tells_who_is_refused_why_and_not_to_start_another_daemon(
    slab: FakeSlabDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    slab.refusal = "user 7 may not use this store"
    with pytest.raises(SystemExit):
        cli.main(["ping", "--address", f"unix:{str(slab.slab_socket).removesuffix('.slab')}"])
    said = capsys.readouterr().err
    assert slab.refusal in said
    assert "kvstore serve" not in said


def test_a_tensor_of_a_view_without_torch_says_what_to_install(slab: FakeSlabDaemon) -> None:
    script = (
        "import sys\n"
        "from kvstore_client import Client\n"
        "from tests.client.builders import chain, namespace, payloads\n"
        "sys.modules['torch'] = None\n"  # cannot be imported
        f"with Client({slab.address!r}) as client:\n"
        "    space = namespace()\n"
        "    client.put(space, chain(1), payloads(space, 1))\n"
        "    try: client.view(space, chain(1))[0].torch(plane='k')\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert "pip install torch" in done.stdout


def test_the_way_that_blocks_travel_is_known_without_moving_any(connect: Connect, slab: FakeSlabDaemon) -> None:
    client = connect(slab.address)
    assert client.transport is None
    client.info()
    client.info()
    assert client.transport == "slab"
    client.close()
    assert client.transport is None


def test_the_environment_can_turn_the_slab_off(
    connect: Connect, slab: FakeSlabDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", "grpc")
    client, space, hashes = connect(slab.address), namespace(), chain(1)
    assert client.put(space, hashes, bytes(256)).stored_count == 1
    assert slab.count(wire.WRITE_BLOCKS) == 1
    assert slab.session_count == 0


# --- sessions


def test_a_client_whose_sessions_were_ended_attaches_again(stored: Stored, slab: FakeSlabDaemon) -> None:
    for _ in range(3):
        slab.end_sessions()
        assert stored.client.lookup(stored.space, stored.hashes).matched_count == 3
        assert stored.load() == ([HIT, HIT, HIT], None)


def test_after_a_restart_the_new_daemons_memory_is_used(stored: Stored, slab: FakeSlabDaemon) -> None:
    """Users' reports: a restart went unnoticed; what an earlier start handed out was believed."""
    slab.restart()
    assert stored.client.lookup(stored.space, stored.hashes).states == (MISS,) * 3
    assert stored.client.put(stored.space, stored.hashes, stored.blocks).stored_count == 3
    assert stored.load() == ([HIT, HIT, HIT], None)
    assert slab.count(wire.READ_BLOCKS) == 0


def test_a_restart_while_blocks_are_leased_is_no_hit(stored: Stored, slab: FakeSlabDaemon) -> None:
    def restart(response: Any) -> Any:
        del slab.rewrites["LeaseBlocks"]
        threading.Thread(target=slab.restart).start()
        return response

    slab.rewrites["LeaseBlocks"] = restart
    states, _ = stored.load()
    assert all(state in (HIT, MISS) for state in states)
    assert slab.wait_until(lambda: not slab.blocks)
    assert stored.client.put(stored.space, stored.hashes, stored.blocks).stored_count == 3


def test_what_a_client_holds_goes_with_it(connect: Connect, slab: FakeSlabDaemon) -> None:
    client = connect(slab.address, config=SLAB)
    mine = Stored(client, slab)
    lease, views = client.acquire(mine.space, mine.hashes), client.view(mine.space, mine.hashes)
    assert (lease.matched_count, views.matched_count, len(slab.leases)) == (3, 3, 2)
    client.close()
    assert slab.wait_until(lambda: slab.session_count == 0)
    assert slab.leases == {}


def test_a_forked_child_does_not_keep_its_parents_session_alive(slab: FakeSlabDaemon) -> None:
    """Else what a killed engine held would stay held for as long as any process that it has forked."""
    address = f"unix:{str(slab.slab_socket).removesuffix('.slab')}"
    script = (
        "import os, sys, time\n"
        "from kvstore_client import Client\n"
        "from tests.client.builders import chain, namespace, payloads\n"
        f"client = Client({address!r})\n"
        "space, memory = namespace(model='fork'), bytearray(512)\n"
        "assert client.put(space, chain(2), payloads(space, 2)).stored_count == 2\n"
        "assert client.get(space, chain(2), memory).matched_count == 2\n"
        "if os.fork() == 0:\n"
        "    assert client.get(space, chain(2), bytearray(512)).matched_count == 2\n"
        "    print('child', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    assert client.get(space, chain(2), bytearray(512)).matched_count == 2\n"
        "    print('child again', flush=True)\n"
        "    os._exit(0)\n"
        "sys.stdin.close()\n"
        "os._exit(0)\n"
    )
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "child\n"
        process.wait(10)
        assert slab.wait_until(lambda: slab.session_count == 1), "the child's own, and none of its parent's"
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "child again\n"
    assert slab.wait_until(lambda: slab.session_count == 0)


# --- calls


def test_an_error_keeps_its_kind_and_message(stored: Stored, slab: FakeSlabDaemon) -> None:
    slab.fail(wire.LOOKUP_BLOCKS, InternalError("boom"))
    unknown = chain(2, seed=77)
    error = stored.client.lookup(stored.space, unknown).error
    assert isinstance(error, InternalError)
    assert str(error) == "boom"
    assert stored.client.lookup(stored.space, unknown).error is None


def test_a_call_that_hangs_ends_by_its_deadline_and_the_next_has_another_connection(
    connect: Connect, slab: FakeSlabDaemon
) -> None:
    config = replace(SLAB, control_timeout_s=0.3)
    client, space, hashes = connect(slab.address, config=config), namespace(), chain(2)
    assert client.lookup(space, hashes).error is None
    slab.hang(wire.LOOKUP_BLOCKS)
    assert isinstance(client.lookup(space, hashes).error, DeadlineExceededError)
    slab.resume("LookupBlocks")
    assert slab.wait_until(lambda: client.lookup(space, hashes).error is None)


def test_more_threads_than_connections_all_get_their_answers(slab: FakeSlabDaemon) -> None:
    space, hashes, wrong = namespace(), chain(2), []
    with Client(slab.address, config=SLAB) as client:
        assert client.put(space, hashes, payloads(space, 2)).stored_count == 2

        def work() -> None:
            for _ in range(10):
                found = client.lookup(space, hashes)
                if found.matched_count != 2:
                    wrong.append(found)

        threads = [threading.Thread(target=work) for _ in range(2 * CONNECTIONS_MAX)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_closing_a_client_ends_the_calls_of_other_threads(slab: FakeSlabDaemon) -> None:
    client, space, hashes = Client(slab.address, config=SLAB), namespace(), chain(1)
    assert client.lookup(space, hashes).error is None
    slab.hang(wire.LOOKUP_BLOCKS)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(client.lookup(space, hashes)))
    thread.start()
    slab.wait_for_call(wire.LOOKUP_BLOCKS, count=2)
    client.close()
    thread.join(10)
    assert isinstance(found[0].error, UnavailableError)
    slab.resume("LookupBlocks")


async def test_a_cancelled_get_gives_its_lease_back(slab: FakeSlabDaemon) -> None:
    async with AsyncClient(slab.address, config=SLAB) as client:
        space, hashes = namespace(), chain(2)
        assert (await client.put(space, hashes, payloads(space, 2))).stored_count == 2
        slab.hang(wire.LEASE_BLOCKS)
        task = asyncio.create_task(client.get(space, hashes, bytearray(512)))
        await asyncio.to_thread(slab.wait_for_call, wire.LEASE_BLOCKS, count=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        slab.resume("LeaseBlocks")
        await asyncio.to_thread(slab.wait_for_call, wire.RELEASE_LEASES, count=1)
        assert await asyncio.to_thread(slab.wait_until, lambda: not slab.leases)


async def test_nothing_is_copied_into_memory_whose_get_was_cancelled(slab: FakeSlabDaemon) -> None:
    async with AsyncClient(slab.address, config=SLAB) as client:
        space, hashes = namespace(payload_bytes=1 << 20), chain(8)
        assert (await client.put(space, hashes, payloads(space, 8))).stored_count == 8
        for pause_count in range(30):
            memory = bytearray(8 << 20)
            task = asyncio.create_task(client.get(space, hashes, memory))
            for _ in range(pause_count):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            memory[:] = blank = bytes(8 << 20)
            await asyncio.sleep(0.002)
            assert memory == blank


# --- lies


@pytest.mark.parametrize(
    "record",
    [
        SlotRecord(64 << 20, Generation(1), 384),
        SlotRecord((64 << 20) - 128, Generation(1), 384),
        SlotRecord(1 << 60, Generation(1), 384),
        SlotRecord(0, Generation(1), 1 << 60),
        SlotRecord(0, Generation(1), 64),
    ],
)
def test_a_slot_that_is_not_in_the_arena_is_not_followed(
    stored: Stored, slab: FakeSlabDaemon, record: SlotRecord
) -> None:
    def lie(response: Any) -> Any:
        return replace(response, slots=encode_slot_records([record] * 3))

    slab.rewrites["LeaseBlocks"] = lie
    states, error = stored.load()
    assert states == [MISS] * 3
    assert isinstance(error, ProtocolError)
    with stored.client.view(stored.space, stored.hashes) as views:
        assert views.states == (MISS,) * 3
    slab.rewrites["ReserveBlocks"] = lie
    other = chain(3, seed=1)
    result = stored.client.put(stored.space, other, stored.blocks)
    assert result.states == (PutState.DROPPED,) * 3
    assert isinstance(result.error, ProtocolError)
    assert slab.wait_until(lambda: not slab.leases and not slab.reservations)


def test_a_slot_that_is_not_reserved_for_the_writer_is_not_written(
    connect: Connect, slab: FakeSlabDaemon, stored: Stored
) -> None:
    """A slow writer's slot may have been given up, and be somebody else's by now."""
    victim = stored.records[0]

    def lie(response: Any) -> Any:
        (record,) = decode_slot_records(response.slots)
        return replace(response, slots=encode_slot_records([SlotRecord(victim.place, record.generation, 384)]))

    slab.rewrites["ReserveBlocks"] = lie
    other = namespace()
    assert stored.client.put(other, chain(1), payloads(other, 1, seed=5)).states == (PutState.DROPPED,)
    assert stored.load() == ([HIT, HIT, HIT], None)


def test_a_damaged_block_costs_only_itself_and_is_reported(stored: Stored, slab: FakeSlabDaemon) -> None:
    slab.slot(stored.records[1])[PAYLOAD_OFFSET_BYTES + 100] ^= 1
    states, error = stored.load()
    assert states == [HIT, CORRUPT, HIT]
    assert "does not match its envelope" in str(error)
    assert slab.calls[-1] == "VerifyBlocks"


def test_a_block_that_was_evicted_under_its_lease_is_a_miss(stored: Stored, slab: FakeSlabDaemon) -> None:
    slab.set_header(stored.records[0], EMPTY_SLOT_HEADER)
    slab.rewrite(stored.records[2], enveloped(stored.space, chain(1, seed=9)[0], bytes(256)))
    assert stored.load() == ([MISS, HIT, MISS], None)


# --- views


def test_a_view_shows_blocks_in_place(slab: FakeSlabDaemon) -> None:
    with Client(slab.address, config=SLAB) as client:
        mine = Stored(client, slab)
        layout = mine.space.block_layout
        with client.view(mine.space, [*mine.hashes, *chain(1, seed=9)]) as views:
            assert (views.states, views.matched_count, views.error) == ((HIT, HIT, HIT, MISS), 3, None)
            assert len(views) == 4
            assert views[3] is None
            for view, block in zip(views, mine.blocks, strict=False):
                assert view is not None
                assert (view.payload, view.payload.readonly, view.is_copy, view.is_valid()) == (
                    block,
                    True,
                    False,
                    True,
                )
                whole = np.frombuffer(block, np.float16)
                k, v = view.numpy(plane="k"), view.numpy(plane="v")
                assert k.shape == v.shape == layout.planes[0].shape
                assert not k.flags.writeable
                assert np.array_equal(np.concatenate([k.ravel(), v.ravel()]), whole, equal_nan=True)
                tensor = view.torch(plane="v")
                assert (tensor.dtype, tuple(tensor.shape)) == (torch.float16, layout.planes[1].shape)
                assert tensor.numpy().tobytes() == v.tobytes()
            assert len(slab.leases) == 1
            assert views.renew(lease_s=9.0)
        assert slab.wait_until(lambda: not slab.leases)
        assert not views.renew()


def test_a_plane_that_is_not_there_is_refused_by_name(slab: FakeSlabDaemon) -> None:
    with Client(slab.address, config=SLAB) as client:
        mine = Stored(client, slab)
        view = client.view(mine.space, mine.hashes)[0]
        assert view is not None
        with pytest.raises(ValueError, match=r"^plane is 'x'; allowed: 'k' or 'v'"):
            view.numpy(plane="x")


def test_a_view_knows_when_its_slot_was_given_to_another_block(slab: FakeSlabDaemon) -> None:
    with Client(slab.address, config=SLAB) as client:
        mine = Stored(client, slab)
        views = client.view(mine.space, mine.hashes)
        first, second = views[0], views[1]
        assert first is not None
        assert second is not None
        slab.rewrite(mine.records[0], enveloped(mine.space, chain(1, seed=9)[0], bytes(256)))
        assert (first.is_valid(), second.is_valid()) == (False, True)
        assert client.view(mine.space, mine.hashes).states == (MISS, HIT, HIT)


@pytest.mark.parametrize("position", [SLOT_HEADER_BYTES, SLOT_HEADER_BYTES + 50, PAYLOAD_OFFSET_BYTES + 200])
def test_a_damaged_block_is_never_in_view(slab: FakeSlabDaemon, position: int) -> None:
    with Client(slab.address, config=SLAB) as client:
        mine = Stored(client, slab)
        slab.slot(mine.records[1])[position] ^= 0x20
        views = client.view(mine.space, mine.hashes)
        assert (views.states, views[1]) == ((HIT, CORRUPT, HIT), None)
        assert "does not match its envelope" in str(views.error)
        assert slab.calls[-1] == "VerifyBlocks"


def test_a_slot_that_was_viewed_before_is_looked_at_anew_for_another_block(slab: FakeSlabDaemon) -> None:
    with Client(slab.address, config=SLAB) as client:
        mine = Stored(client, slab)
        assert client.view(mine.space, mine.hashes).matched_count == 3
        wrong = bytearray(enveloped(mine.space, mine.hashes[0], mine.blocks[0]))
        wrong[-1] ^= 1
        slab.records[mine.space.id, mine.hashes[0]] = slab.rewrite(mine.records[0], bytes(wrong))
        assert client.view(mine.space, mine.hashes).states == (CORRUPT, HIT, HIT)


@pytest.mark.parametrize("is_verified", [False, True])
def test_what_the_daemon_has_verified_is_not_hashed_again(slab: FakeSlabDaemon, is_verified: bool) -> None:
    with Client(slab.address, config=SLAB) as client:
        mine = Stored(client, slab)
        record = mine.records[0]
        slab.slot(record)[PAYLOAD_OFFSET_BYTES] ^= 1
        slab.set_header(record, encode_slot_header(record.generation, is_readable=True, is_verified=is_verified))
        assert client.view(mine.space, mine.hashes[:1]).states == (HIT if is_verified else CORRUPT,)


def test_views_over_streams_are_private_copies(slab: FakeSlabDaemon) -> None:
    with (
        Client(slab.address, config=SLAB) as writer,
        Client(slab.address, config=replace(FAST, transport="grpc")) as client,
    ):
        mine = Stored(writer, slab)
        with client.view(mine.space, mine.hashes) as views:
            view = views[0]
            assert view is not None
            assert (view.payload, view.payload.readonly, view.is_copy) == (mine.blocks[0], True, True)
            slab.restart()
            assert view.is_valid()
            assert view.payload == mine.blocks[0]
            assert view.torch(plane="k").numpy().tobytes() == mine.blocks[0][:128]


async def test_views_for_asyncio(slab: FakeSlabDaemon) -> None:
    async with AsyncClient(slab.address, config=SLAB) as client:
        space, hashes, blocks = (
            namespace(payload_bytes=1 << 20),
            chain(4),
            payloads(namespace(payload_bytes=1 << 20), 4),
        )
        assert (await client.put(space, hashes, blocks)).stored_count == 4
        async with await client.view(space, hashes) as views:
            assert [view.payload for view in views if view is not None] == blocks
            assert await views.renew()
            assert len(slab.leases) == 1
        assert await asyncio.to_thread(slab.wait_until, lambda: not slab.leases)


def test_what_was_made_from_a_view_outlives_its_client(slab: FakeSlabDaemon) -> None:
    client = Client(slab.address, config=SLAB)
    mine = Stored(client, slab)
    view = client.view(mine.space, mine.hashes)[0]
    assert view is not None
    array, tensor = view.numpy(plane="k"), view.torch(plane="k")
    del view
    client.close()
    assert array.tobytes() == tensor.numpy().tobytes() == mine.blocks[0][:128]
