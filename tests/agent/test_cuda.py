"""What only a GPU can show."""

from __future__ import annotations

import pytest
import torch

from gpu_agent.core.layers import layer_groups
from gpu_agent.device import open_device
from kvstore.errors import InvalidArgumentError
from kvstore.messages import BlockState
from tests.agent.conftest import MakeAgent
from tests.agent.fakes import BLOCK_BYTES, NAMESPACE, FakeArena, FakeStore, chain, content

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


def test_a_cuda_device_that_is_not_there_is_named_and_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="cuda:99"):
        open_device("cuda:99")


@pytest.mark.gpu
@needs_gpu
def test_blocks_in_vram_are_offloaded_and_come_back_bit_for_bit(make_agent: MakeAgent) -> None:
    agent, hashes = make_agent(10, device=open_device("cuda:0")), chain(30)
    blocks = content(hashes).to("cuda:0")
    assert agent.store(hashes, blocks) == (True,) * 30
    into = torch.zeros((30, BLOCK_BYTES), dtype=torch.uint8, device="cuda:0")
    assert agent.load(hashes, into) == (BlockState.HIT,) * 30
    assert torch.equal(into.cpu(), content(hashes))


@pytest.mark.gpu
@needs_gpu
def test_copies_come_after_what_the_engine_computed_and_before_what_it_computes_next(make_agent: MakeAgent) -> None:
    agent, hashes = make_agent(8, device=open_device("cuda:0")), chain(4)
    right = content(hashes).to("cuda:0")
    blocks = torch.zeros_like(right)
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # the values that are to be stored are still being computed
    blocks.copy_(right)
    agent.store(hashes, blocks)
    blocks.zero_()
    into = torch.zeros_like(right)
    agent.load(hashes, into)
    seen = into.clone()
    into.zero_()
    assert torch.equal(seen, right)
    assert not bool(into.any())


@pytest.mark.gpu
@needs_gpu
def test_host_tensors_are_taken_and_filled_by_a_cuda_pool(make_agent: MakeAgent) -> None:
    agent, hashes = make_agent(8, device=open_device("cuda:0")), chain(12)
    blocks = content(hashes).pin_memory()
    agent.store(hashes, blocks)
    blocks.zero_()
    into = torch.zeros((12, BLOCK_BYTES), dtype=torch.uint8)
    assert agent.load(hashes, into) == (BlockState.HIT,) * 12
    assert torch.equal(into, content(hashes))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("is_read_only", [False, True])
def test_blocks_go_between_vram_and_registered_slots_without_staging(
    make_agent: MakeAgent, store: FakeStore, is_read_only: bool
) -> None:
    store.shared = (FakeArena(is_read_only=is_read_only),)
    agent, hashes = make_agent(10, device=open_device("cuda:0")), chain(30)
    agent.load(chain(1, seed=99), torch.zeros((1, BLOCK_BYTES), dtype=torch.uint8))
    assert agent._arenas.wait_settled(10.0)
    if not agent._arenas.is_direct(is_written=False):
        pytest.skip("this device registers no read-only memory")
    assert agent.store(hashes, content(hashes).to("cuda:0")) == (True,) * 30
    into = torch.zeros((30, BLOCK_BYTES), dtype=torch.uint8, device="cuda:0")
    assert agent.load(hashes, into) == (BlockState.HIT,) * 30
    assert torch.equal(into.cpu(), content(hashes))
    counters = agent.snapshot().counters
    assert counters.direct_loaded_bytes == counters.loaded_bytes > 0
    assert counters.direct_offloaded_bytes == (0 if is_read_only else counters.offloaded_bytes)


@pytest.mark.gpu
@needs_gpu
def test_a_layer_is_read_on_the_current_stream_as_soon_as_it_has_come_and_not_before() -> None:
    device = open_device("cuda:0")
    pool = device.allocate_pool(slot_count=4, block_bytes=BLOCK_BYTES)
    staging = device.allocate_staging(row_count=2, block_bytes=BLOCK_BYTES)
    staging.copy_(content(chain(2)))
    pool.zero_()
    torch.cuda._sleep(50_000_000)
    device.follow_caller()  # so the first layer is late, too
    groups = layer_groups(NAMESPACE.block_layout, 2)
    events = device.copy_layers(source=staging, source_rows=[0, 1], target=pool, target_rows=[3, 1], groups=groups)
    assert not events[0].is_over()
    for group, event in zip(groups, events, strict=True):
        device.before_caller(event)
        for offset_bytes, size_bytes in group.parts:
            seen = pool[[3, 1], offset_bytes : offset_bytes + size_bytes].cpu()
            assert torch.equal(seen, staging[:, offset_bytes : offset_bytes + size_bytes])
    assert events[-1].is_over()
    assert not bool(pool[[0, 2]].any())
    device.close()


@pytest.mark.gpu
@needs_gpu
def test_what_crosses_the_link_is_timed_without_waiting_for_it() -> None:
    device = open_device("cuda:0")
    pool = device.allocate_pool(slot_count=4, block_bytes=1 << 20)
    staging = device.allocate_staging(row_count=4, block_bytes=1 << 20)
    torch.cuda._sleep(50_000_000)
    device.follow_caller()
    event = device.copy_rows(source=pool, source_rows=range(4), target=staging, target_rows=range(4))
    assert device.link().d2h.queued_bytes == 4 << 20
    event.wait()
    sample = device.link()
    assert (sample.d2h.moved_bytes, sample.d2h.queued_bytes) == (4 << 20, 0)
    assert 0 < sample.d2h.busy_s < 0.02  # not the time for which the stream was held back
    assert sample.h2d.moved_bytes == 0
    device.close()


@pytest.mark.gpu
@needs_gpu
def test_work_of_the_copy_stream_sees_what_was_copied_before_it() -> None:
    device = open_device("cuda:0")
    pool = device.allocate_pool(slot_count=2, block_bytes=BLOCK_BYTES)
    scratch = device.allocate_scratch(row_count=2, block_bytes=BLOCK_BYTES)
    staging = device.allocate_staging(row_count=2, block_bytes=BLOCK_BYTES)
    staging.copy_(content(chain(2)))
    device.copy_rows(source=staging, source_rows=[0, 1], target=scratch, target_rows=[0, 1])
    device.compute(lambda: pool.copy_(scratch.flip(0))).wait()
    assert torch.equal(pool.cpu(), staging.flip(0))
    device.close()
