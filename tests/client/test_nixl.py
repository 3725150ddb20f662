"""The NIXL path between two processes, over UCX and TCP."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import mmap
import os
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from kvstore.envelope import ENVELOPE_BYTES, Envelope, checksum
from kvstore.errors import DeadlineExceededError, ProtocolError, UnavailableError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState, TransferPath
from kvstore.namespace import Namespace
from kvstore.slab import (
    PAYLOAD_OFFSET_BYTES,
    SLOT_HEADER_BYTES,
    Generation,
    SlotRecord,
    encode_slot_header,
    encode_slot_records,
)
from kvstore_client import Client
from kvstore_client.flows.steps import Fetch, Send
from kvstore_client.paths.nixl import BareTransfer, NixlMetadata, NixlMover
from kvstore_server.rpc.nixl_endpoint import NixlEndpoint
from tests.client.builders import FAST, chain, namespace, payloads
from tests.conftest import DaemonProcess

_ARENA_BYTES = 64 << 20
_ARENA_COUNT = 2
_WAIT_S_MAX = 30.0

_METADATA = NixlMetadata(arena_bytes=4096, addresses=(0x1000, 0xFFFF_FFFF_F000), agent=b"agent")

_is_installed = importlib.util.find_spec("nixl_cu12") is not None


def needs_nixl(test: Callable[..., object]) -> Callable[..., object]:
    """All in one event loop, with one endpoint: it takes a second to start."""
    test = pytest.mark.asyncio(loop_scope="module")(test)
    return pytest.mark.skipif(not _is_installed, reason="nixl-cu12 is not installed")(test)


@pytest.fixture(scope="module", autouse=True)
def _tcp_only() -> Iterator[None]:
    """As between two machines: on one, UCX would rather read the other process' memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


class Served:
    """Arenas of this process and the endpoint that serves them."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.metadata = b""
        self.fence_count = 0
        self.endpoint = NixlEndpoint(
            descriptors, arena_bytes=_ARENA_BYTES, on_metadata=self._note, on_fenced=self._note_fence
        )
        self._arenas = [mmap.mmap(descriptor, _ARENA_BYTES) for descriptor in descriptors]

    def _note(self, metadata: bytes) -> None:
        self.metadata = metadata

    def _note_fence(self) -> None:
        assert not self.metadata, "clients are sent to a process that is no more"
        self.fence_count += 1

    @property
    def pid(self) -> int:
        assert self.endpoint._process is not None
        return self.endpoint._process.pid

    async def renew(self) -> None:
        """Another process serves: one whose clients have vanished while it was stopped may end later."""
        await self.endpoint.fence()

    async def mover(self) -> NixlMover:
        deadline_s = time.monotonic() + _WAIT_S_MAX
        while not self.metadata:
            assert time.monotonic() < deadline_s, "the endpoint does not serve"
            await asyncio.sleep(0.01)
        return NixlMover(self.metadata)

    def view(self, place: int, size_bytes: int) -> memoryview:
        index, start = divmod(place, _ARENA_BYTES)
        return memoryview(self._arenas[index])[start : start + size_bytes]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks of one namespace, each in a slot of its own."""

    space: Namespace
    hashes: list[BlockHash]
    payloads: list[bytes]
    slots: list[SlotRecord]

    @classmethod
    def make(cls, count: int, *, payload_bytes: int, first_place: int = 0) -> Blocks:
        space = namespace(payload_bytes=payload_bytes)
        slot_bytes = -(-(PAYLOAD_OFFSET_BYTES + payload_bytes) // 4096) * 4096
        return cls(
            space=space,
            hashes=chain(count),
            payloads=payloads(space, count),
            slots=[
                SlotRecord(first_place + index * slot_bytes, Generation(index + 1), ENVELOPE_BYTES + payload_bytes)
                for index in range(count)
            ],
        )

    def store(self, served: Served) -> None:
        for block_hash, payload, slot in zip(self.hashes, self.payloads, self.slots, strict=True):
            envelope = self.space.envelopes.encode(block_hash, payload_checksum=checksum(payload))
            served.view(slot.place + SLOT_HEADER_BYTES, slot.size_bytes)[:] = envelope + payload
        self.publish(served)

    def clear(self, served: Served) -> None:
        for slot in self.slots:
            served.view(slot.place, SLOT_HEADER_BYTES + slot.size_bytes)[:] = bytes(SLOT_HEADER_BYTES + slot.size_bytes)

    def publish(self, served: Served) -> None:
        for slot in self.slots:
            header = encode_slot_header(slot.generation, is_readable=True, is_verified=True)
            served.view(slot.place, SLOT_HEADER_BYTES)[:] = header

    def fetch(self, targets: Sequence[bytearray], *, timeout_s: float = _WAIT_S_MAX) -> Fetch:
        return Fetch(
            path=TransferPath.NIXL,
            namespace=self.space,
            hashes=self.hashes,
            targets=[memoryview(target) for target in targets],
            slots=encode_slot_records(self.slots),
            ticket=b"",
            timeout_s=timeout_s,
        )

    def send(self, *, timeout_s: float = _WAIT_S_MAX) -> Send:
        return Send(
            path=TransferPath.NIXL,
            namespace=self.space,
            hashes=self.hashes,
            blocks=[memoryview(payload) for payload in self.payloads],
            slots=encode_slot_records(self.slots),
            ticket=b"",
            timeout_s=timeout_s,
        )

    def targets(self) -> list[bytearray]:
        return [bytearray(len(payload)) for payload in self.payloads]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    descriptors = [os.memfd_create("arena") for _ in range(_ARENA_COUNT)]
    for descriptor in descriptors:
        os.ftruncate(descriptor, _ARENA_BYTES)
    served = Served(descriptors)
    running = asyncio.create_task(served.endpoint.run())
    yield served
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    served.endpoint.close()


@needs_nixl
async def test_what_is_sent_lies_in_its_slots_and_comes_back_verified(served: Served) -> None:
    mover = await served.mover()
    blocks = Blocks.make(5, payload_bytes=1 << 20, first_place=_ARENA_BYTES)
    blocks.clear(served)
    assert await asyncio.to_thread(mover.send, blocks.send()) is None
    for block_hash, payload, slot in zip(blocks.hashes, blocks.payloads, blocks.slots, strict=True):
        assert Envelope.decode(served.view(slot.place + SLOT_HEADER_BYTES, ENVELOPE_BYTES)).block_hash == block_hash
        assert served.view(slot.place + PAYLOAD_OFFSET_BYTES, len(payload)) == payload
        assert not any(served.view(slot.place, SLOT_HEADER_BYTES)), "a client wrote a slot's header"
    blocks.publish(served)
    targets = blocks.targets()
    assert await asyncio.to_thread(mover.fetch, blocks.fetch(targets)) == [BlockState.HIT] * 5
    assert targets == blocks.payloads
    mover.close()


@needs_nixl
async def test_a_slot_that_is_used_anew_is_a_miss_and_a_flipped_byte_is_found(served: Served) -> None:
    mover = await served.mover()
    blocks = Blocks.make(6, payload_bytes=4096)
    blocks.store(served)
    gone, unreadable, envelope, payload, other_block, _ = blocks.slots
    for slot, is_readable, generation in ((gone, True, gone.generation + 9), (unreadable, False, 2)):
        header = encode_slot_header(Generation(generation), is_readable=is_readable, is_verified=False)
        served.view(slot.place, SLOT_HEADER_BYTES)[:] = header
    served.view(envelope.place + SLOT_HEADER_BYTES + 50, 1)[0] ^= 1
    served.view(payload.place + PAYLOAD_OFFSET_BYTES + 4095, 1)[0] ^= 0x80
    size_bytes = other_block.size_bytes
    served.view(other_block.place + SLOT_HEADER_BYTES, size_bytes)[:] = served.view(SLOT_HEADER_BYTES, size_bytes)
    states = await asyncio.to_thread(mover.fetch, blocks.fetch(blocks.targets()))
    corrupt = BlockState.CORRUPT
    assert states == [BlockState.MISS, BlockState.MISS, corrupt, corrupt, corrupt, BlockState.HIT]
    mover.close()


@needs_nixl
async def test_many_threads_use_one_mover(served: Served) -> None:
    mover = await served.mover()
    blocks = Blocks.make(64, payload_bytes=16384)
    blocks.store(served)

    def fetch() -> bool:
        targets = blocks.targets()
        states = [mover.fetch(blocks.fetch(targets)) for _ in range(3)]
        return states == [[BlockState.HIT] * 64] * 3 and targets == blocks.payloads

    assert all(await asyncio.gather(*[asyncio.to_thread(fetch) for _ in range(4)]))
    mover.close()


@needs_nixl
async def test_a_bare_transfer_moves_the_same_bytes(served: Served) -> None:
    await served.mover()
    blocks = Blocks.make(3, payload_bytes=1 << 20)
    blocks.store(served)
    targets = blocks.targets()
    places = [slot.place + PAYLOAD_OFFSET_BYTES for slot in blocks.slots]
    bare = BareTransfer(served.metadata, places=places, buffers=[memoryview(target) for target in targets])
    await asyncio.to_thread(bare.read, timeout_s=_WAIT_S_MAX)
    assert targets == blocks.payloads
    targets[1][:] = bytes(1 << 20)
    await asyncio.to_thread(bare.write, timeout_s=_WAIT_S_MAX)
    assert served.view(places[1], 1 << 20) == bytes(1 << 20)
    bare.close()


@needs_nixl
async def test_a_killed_serving_process_fails_transfers_and_is_replaced(served: Served) -> None:
    mover = await served.mover()
    blocks = Blocks.make(4, payload_bytes=1 << 20)
    blocks.store(served)
    assert await asyncio.to_thread(mover.fetch, blocks.fetch(blocks.targets())) == [BlockState.HIT] * 4
    killed, fence_count = served.pid, served.fence_count
    os.kill(killed, signal.SIGKILL)
    await _until(lambda: not served.metadata)
    assert served.fence_count == fence_count + 1
    with pytest.raises(UnavailableError):
        await asyncio.to_thread(mover.fetch, blocks.fetch(blocks.targets()))
    assert await _fetch_again(served, blocks)
    assert served.pid != killed
    mover.close()


@needs_nixl
async def test_nothing_of_a_broken_send_lands_behind_a_fence(served: Served) -> None:
    await served.renew()
    mover = await served.mover()
    blocks = Blocks.make(4, payload_bytes=4 << 20)
    blocks.clear(served)
    await asyncio.to_thread(mover.send, Blocks.make(1, payload_bytes=4096, first_place=_ARENA_BYTES).send())
    await _stop(served.pid)  # so that a part waits in the socket
    with pytest.raises(DeadlineExceededError):
        await asyncio.to_thread(mover.send, blocks.send(timeout_s=0.5))
    killed, fence_count = served.pid, served.fence_count
    await asyncio.gather(served.endpoint.fence(), served.endpoint.fence())
    assert served.fence_count == fence_count + 1
    assert not psutil.pid_exists(killed)
    await served.mover()
    for slot in blocks.slots:
        assert not any(served.view(slot.place, SLOT_HEADER_BYTES + slot.size_bytes))
    blocks.store(served)
    assert await _fetch_again(served, blocks)
    mover.close()


@needs_nixl
async def test_close_ends_what_is_under_way(served: Served) -> None:
    await served.renew()
    mover = await served.mover()
    blocks = Blocks.make(4, payload_bytes=1 << 20)
    blocks.store(served)
    await asyncio.to_thread(mover.fetch, blocks.fetch(blocks.targets()))
    await _stop(served.pid)
    task = asyncio.create_task(asyncio.to_thread(mover.fetch, blocks.fetch(blocks.targets())))
    await _until(lambda: not mover._idle)
    mover.close()
    with pytest.raises(UnavailableError, match="closed"):
        await task
    os.kill(served.pid, signal.SIGCONT)
    assert await _fetch_again(served, blocks)


@needs_nixl
async def test_nothing_lands_in_a_target_after_a_fetch_was_given_up(served: Served) -> None:
    await served.renew()
    blocks = Blocks.make(8, payload_bytes=4 << 20)
    blocks.store(served)
    for _ in range(20):
        mover, targets = await served.mover(), blocks.targets()
        task = asyncio.create_task(asyncio.to_thread(mover.fetch, blocks.fetch(targets, timeout_s=1.0)))
        await _until(lambda task=task, targets=targets: task.done() or any(targets[0][:64]))
        await _stop(served.pid)
        try:
            await task
        except DeadlineExceededError:
            break
        os.kill(served.pid, signal.SIGCONT)  # it had ended before it was stopped
    else:
        pytest.skip("this machine is too fast or too busy to stop a transfer half way")
    left = [bytes(target) for target in targets]
    assert left != blocks.payloads
    os.kill(served.pid, signal.SIGCONT)
    # Either the process goes on or it ends, as it may when a client vanished meanwhile, and another one serves.
    assert await _fetch_again(served, blocks)
    assert targets == left
    mover.close()


def test_metadata_is_what_was_encoded() -> None:
    assert NixlMetadata.decode(_METADATA.encode()) == _METADATA
    assert _METADATA.encode().hex() == (
        "4b564e58 0100 0000 02000000 0010000000000000 0010000000000000 00f0ffffffff0000 6167656e74".replace(" ", "")
    )


@pytest.mark.parametrize("size_bytes", [0, 19, 27, 36])
def test_metadata_that_is_cut_off_is_refused(size_bytes: int) -> None:
    with pytest.raises(ProtocolError):
        NixlMetadata.decode(_METADATA.encode()[:size_bytes])


@pytest.mark.parametrize("place", [8192, 4096 + 4096 - SLOT_HEADER_BYTES - 255])
def test_a_slot_beyond_its_arena_is_refused(place: int) -> None:
    with pytest.raises(ProtocolError, match="not within the arenas"):
        _METADATA.address_of(SlotRecord(place, Generation(1), 256))
    assert _METADATA.address_of(SlotRecord(4096 + 512, Generation(1), 256)) == 0xFFFF_FFFF_F000 + 512


def test_without_nixl_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(UnavailableError, match=r"pip install 'kvstore\[nixl\]'"):
        NixlMover(_METADATA.encode())
    with pytest.raises(UnavailableError, match=r"pip install 'kvstore\[nixl\]'"):
        NixlEndpoint([0], arena_bytes=4096, on_metadata=print, on_fenced=print)


async def _stop(pid: int) -> None:
    """Returns when no thread of a process runs any more, which is some time after the signal."""
    os.kill(pid, signal.SIGSTOP)
    await _until(lambda: all(_state(thread) == "T" for thread in Path(f"/proc/{pid}/task").iterdir()))


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


async def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _WAIT_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s, "it does not happen"
        await asyncio.sleep(0)


async def _fetch_again(served: Served, blocks: Blocks) -> bool:
    """Whether a new client gets all blocks, now or once another process serves."""
    deadline_s = time.monotonic() + _WAIT_S_MAX
    while time.monotonic() < deadline_s:
        mover = await served.mover()
        targets = blocks.targets()
        try:
            states = await asyncio.to_thread(mover.fetch, blocks.fetch(targets, timeout_s=5.0))
        except (UnavailableError, DeadlineExceededError):
            await asyncio.sleep(0.05)
            continue
        finally:
            mover.close()
        return states == [BlockState.HIT] * len(states) and targets == blocks.payloads
    return False


@pytest.fixture(scope="module")
def nixl_daemon(
    start_daemon: Callable[..., DaemonProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    settings = tmp_path_factory.mktemp("nixl") / "kvstore.yaml"
    settings.write_text("nixl: {enabled: true}\n")
    daemon = start_daemon("--config", str(settings))
    yield daemon
    daemon.stop()


@needs_nixl
async def test_a_client_stores_and_loads_over_nixl_and_survives_the_serving_process(nixl_daemon: DaemonProcess) -> None:
    daemon = nixl_daemon
    space = namespace(payload_bytes=1 << 20)
    hashes, blocks = chain(8), payloads(space, 8)
    config = replace(FAST, transport="nixl")
    with Client(daemon.address, config=config) as client, Client(daemon.address) as other:
        assert await _in_time(lambda: client.put(space, hashes, blocks).stored_count == 8)
        assert await _in_time(lambda: _loaded(client, space, hashes) == blocks)
        assert _loaded(other, space, hashes) == blocks
        for process in psutil.Process(daemon.pid).children():
            process.kill()
        assert await _in_time(lambda: _loaded(client, space, hashes) == blocks)


@needs_nixl
async def test_a_broken_write_is_fenced_before_its_slots_are_anybody_elses(nixl_daemon: DaemonProcess) -> None:
    """Its bytes wait in the socket of a serving process that is stopped, and would arrive when it goes on."""
    daemon, space, other_space = nixl_daemon, namespace(payload_bytes=1 << 20), namespace(payload_bytes=1 << 20)
    config = replace(FAST, transport="nixl")
    blocks, others = payloads(space, 8), payloads(other_space, 24, seed=1)
    with Client(daemon.address, config=config) as client, Client(daemon.address, config=FAST) as other:
        assert await _in_time(lambda: client.put(space, chain(1), blocks[:1]).stored_count == 1)
        assert await _in_time(lambda: "kvstore_store_stranded_slots 0.0" in _metrics(daemon))
        used_bytes = other.stats().used_bytes
        (serving,) = psutil.Process(daemon.pid).children()
        await _stop(serving.pid)
        broken = await asyncio.to_thread(client.put, space, chain(8), blocks)
        assert isinstance(broken.error, DeadlineExceededError), broken
        # Nobody lets the process go on: that the slots are free says that it has ended.
        assert await _in_time(lambda: other.stats().used_bytes == used_bytes)
        assert not serving.is_running()
        assert other.put(other_space, chain(24), others).stored_count == 24
        assert await _in_time(lambda: client.put(space, chain(8), blocks).stored_count == 8)
        assert await _in_time(lambda: _loaded(client, space, chain(8)) == blocks)
        assert _loaded(other, other_space, chain(24)) == others
        assert "kvstore_store_stranded_slots 0.0" in _metrics(daemon)


def _metrics(daemon: DaemonProcess) -> str:
    with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=_WAIT_S_MAX) as response:
        return str(response.read().decode())


def _loaded(client: Client, space: Namespace, hashes: list[BlockHash]) -> list[bytearray]:
    targets = [bytearray(space.block_layout.payload_bytes) for _ in hashes]
    client.get(space, hashes, targets)
    return targets


async def _in_time(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + _WAIT_S_MAX
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.05)
    return True
