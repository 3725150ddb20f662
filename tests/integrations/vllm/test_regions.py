"""The engine's memory as rows: what is read is what the layers hold, and nothing else is ever written."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

from kvstore_client.integrations.vllm.regions import CpuMover, Mover, Placement, make_mover, merged, placements, region

BLOCKS, LAYERS, HEADS, TOKENS, WIDTH = 5, 3, 2, 4, 6
HEAD_BYTES = TOKENS * WIDTH
PAGE_BYTES = HEADS * HEAD_BYTES


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One allocation, as vLLM describes the layers in it."""

    size_bytes: int
    layer_stride_bytes: int
    block_stride_bytes: int
    offset_bytes: int = 0
    page_bytes: int = PAGE_BYTES

    def layer(self, index: int) -> list[Placement]:
        return placements(
            offset_bytes=self.offset_bytes,
            layer_index=index,
            layer_stride_bytes=self.layer_stride_bytes,
            block_stride_bytes=self.block_stride_bytes,
            block_count=BLOCKS,
            page_bytes=self.page_bytes,
        )

    def layers(self, indices: Sequence[int] = range(LAYERS)) -> list[Placement]:
        return [placement for index in indices for placement in self.layer(index)]


LAYERS_OUTERMOST = Memory(
    size_bytes=LAYERS * BLOCKS * PAGE_BYTES, layer_stride_bytes=BLOCKS * PAGE_BYTES, block_stride_bytes=PAGE_BYTES
)
HEADS_BEFORE_BLOCKS = Memory(
    size_bytes=LAYERS * BLOCKS * PAGE_BYTES, layer_stride_bytes=BLOCKS * PAGE_BYTES, block_stride_bytes=HEAD_BYTES
)
BLOCKS_OUTERMOST = Memory(
    size_bytes=LAYERS * BLOCKS * PAGE_BYTES, layer_stride_bytes=PAGE_BYTES, block_stride_bytes=LAYERS * PAGE_BYTES
)
PADDED = Memory(
    size_bytes=LAYERS * BLOCKS * (PAGE_BYTES + 16),
    layer_stride_bytes=BLOCKS * (PAGE_BYTES + 16),
    block_stride_bytes=PAGE_BYTES + 16,
)
PADDED_BLOCKS_OUTERMOST = Memory(
    size_bytes=BLOCKS * (LAYERS * PAGE_BYTES + 32),
    layer_stride_bytes=PAGE_BYTES,
    block_stride_bytes=LAYERS * PAGE_BYTES + 32,
)
BEHIND_OTHERS = Memory(
    size_bytes=100 + LAYERS * BLOCKS * PAGE_BYTES + 60,
    layer_stride_bytes=BLOCKS * PAGE_BYTES,
    block_stride_bytes=PAGE_BYTES,
    offset_bytes=100,
)
MEMORIES = {
    "layers outermost": LAYERS_OUTERMOST,
    "heads before blocks": HEADS_BEFORE_BLOCKS,
    "blocks outermost": BLOCKS_OUTERMOST,
    "padded pages": PADDED,
    "padded blocks": PADDED_BLOCKS_OUTERMOST,
    "behind others": BEHIND_OTHERS,
}


def make_storage(memory: Memory, *, seed: int = 0) -> tuple[torch.Tensor, npt.NDArray[np.uint8]]:
    """An engine's tensor over all of the allocation, and the same bytes for us to look at."""
    raw = np.random.default_rng(seed).integers(0, 256, memory.size_bytes, dtype=np.uint8)
    return torch.from_numpy(raw).view(torch.int16), raw


def mover_of(storage: torch.Tensor, found: Sequence[Placement]) -> CpuMover:
    mover = make_mover([region(storage, part, block_count=BLOCKS) for part in merged(found)])
    assert isinstance(mover, CpuMover)
    return mover


def read(mover: Mover, block_ids: Sequence[int]) -> list[bytes]:
    targets = [bytearray(mover.payload_bytes) for _ in block_ids]
    mover.read(block_ids, [memoryview(target) for target in targets], after=mover.mark())
    return [bytes(target) for target in targets]


def page(name: str, raw: npt.NDArray[np.uint8], *, layer: int, block: int) -> bytes:
    """By the layout's own words, as shapes of numpy."""
    match name:
        case "layers outermost":
            return raw.reshape(LAYERS, BLOCKS, PAGE_BYTES)[layer, block].tobytes()
        case "heads before blocks":
            return raw.reshape(LAYERS, HEADS, BLOCKS, HEAD_BYTES)[layer, :, block].tobytes()
        case "blocks outermost":
            return raw.reshape(BLOCKS, LAYERS, PAGE_BYTES)[block, layer].tobytes()
        case "padded pages":
            return raw.reshape(LAYERS, BLOCKS, PAGE_BYTES + 16)[layer, block, :PAGE_BYTES].tobytes()
        case "padded blocks":
            rows = raw.reshape(BLOCKS, LAYERS * PAGE_BYTES + 32)[:, : LAYERS * PAGE_BYTES]
            return rows.reshape(BLOCKS, LAYERS, PAGE_BYTES)[block, layer].tobytes()
        case "behind others":
            return raw[100:-60].reshape(LAYERS, BLOCKS, PAGE_BYTES)[layer, block].tobytes()
        case _:
            raise AssertionError(name)


@pytest.mark.parametrize("name", MEMORIES)
def test_a_block_is_what_its_layers_hold_layer_after_layer(name: str) -> None:
    storage, raw = make_storage(MEMORIES[name])
    mover = mover_of(storage, MEMORIES[name].layers())
    assert mover.payload_bytes == LAYERS * PAGE_BYTES
    for block, found in enumerate(read(mover, range(BLOCKS))):
        assert found == b"".join(page(name, raw, layer=layer, block=block) for layer in range(LAYERS))


@pytest.mark.parametrize("name", MEMORIES)
def test_layers_come_in_the_order_that_is_asked_for(name: str) -> None:
    storage, raw = make_storage(MEMORIES[name])
    mover = mover_of(storage, MEMORIES[name].layers([2, 0]))
    (found,) = read(mover, [3])
    assert found == page(name, raw, layer=2, block=3) + page(name, raw, layer=0, block=3)


@pytest.mark.parametrize("name", MEMORIES)
def test_what_is_written_is_read_again_and_no_other_byte_has_changed(name: str) -> None:
    memory = MEMORIES[name]
    storage, raw = make_storage(memory)
    mover = mover_of(storage, memory.layers([0, 2]))
    before = raw.copy()
    rng = np.random.default_rng(1)
    payloads = [rng.integers(0, 256, mover.payload_bytes, dtype=np.uint8).tobytes() for _ in range(2)]
    mover.write([4, 1], [memoryview(payload) for payload in payloads])
    assert read(mover, [4, 1]) == payloads

    written = before.copy()
    for layer, block in itertools.product((0, 2), (4, 1)):
        start = 0 if layer == 0 else PAGE_BYTES
        expected = payloads[(4, 1).index(block)][start : start + PAGE_BYTES]
        assert page(name, raw, layer=layer, block=block) == expected
        written[_bytes_of(memory, layer=layer, block=block)] = raw[_bytes_of(memory, layer=layer, block=block)]
    assert np.array_equal(raw, written)


def _bytes_of(memory: Memory, *, layer: int, block: int) -> npt.NDArray[np.intp]:
    """Where the page lies, by what vLLM says: heads apart where blocks are closer to each other than a page is long."""
    start = memory.offset_bytes + layer * memory.layer_stride_bytes + block * memory.block_stride_bytes
    if memory.block_stride_bytes >= PAGE_BYTES:
        return np.arange(start, start + PAGE_BYTES)
    return np.concatenate(
        [np.arange(HEAD_BYTES) + start + head * BLOCKS * memory.block_stride_bytes for head in range(HEADS)]
    )


def test_groups_that_overlay_the_same_memory_touch_their_own_blocks_only() -> None:
    """Of two groups of layers in one allocation, block 1 is the first's and block 2 the second's."""
    storage, raw = make_storage(LAYERS_OUTERMOST)
    first, second = (mover_of(storage, LAYERS_OUTERMOST.layers()) for _ in range(2))
    kept = read(second, [2])
    before = raw.copy()
    payload = bytes(range(first.payload_bytes % 256)) + bytes(first.payload_bytes - first.payload_bytes % 256)
    first.write([1], [memoryview(payload)])
    assert read(second, [2]) == kept
    pages = raw.reshape(LAYERS, BLOCKS, PAGE_BYTES)
    assert np.array_equal(np.delete(pages, 1, axis=1), np.delete(before.reshape(pages.shape), 1, axis=1))


def test_layers_of_other_sizes_may_share_memory() -> None:
    """A group with one layer of twice the page, over the same bytes as one with two layers."""
    storage, raw = make_storage(LAYERS_OUTERMOST)
    wide = Memory(
        size_bytes=LAYERS_OUTERMOST.size_bytes,
        layer_stride_bytes=BLOCKS * PAGE_BYTES,
        block_stride_bytes=PAGE_BYTES,
        page_bytes=PAGE_BYTES // 2,
    )
    (found,) = read(mover_of(storage, wide.layers([1])), [3])
    assert found == page("layers outermost", raw, layer=1, block=3)[: PAGE_BYTES // 2]


def test_pages_that_follow_each_other_are_copied_at_once() -> None:
    assert [part.row_bytes for part in merged(BLOCKS_OUTERMOST.layers())] == [LAYERS * PAGE_BYTES]
    assert [part.row_bytes for part in merged(PADDED_BLOCKS_OUTERMOST.layers())] == [LAYERS * PAGE_BYTES]
    assert [part.row_bytes for part in merged(BLOCKS_OUTERMOST.layers([0, 2]))] == [PAGE_BYTES] * 2
    assert [part.row_bytes for part in merged(LAYERS_OUTERMOST.layers())] == [PAGE_BYTES] * LAYERS
    assert [part.row_bytes for part in merged(HEADS_BEFORE_BLOCKS.layers())] == [HEAD_BYTES] * (LAYERS * HEADS)


def test_rows_of_different_strides_or_longer_than_a_block_stay_apart() -> None:
    row = Placement(offset_bytes=0, block_stride_bytes=64, row_bytes=32)
    behind = Placement(offset_bytes=32, block_stride_bytes=64, row_bytes=32)
    assert merged([row, behind]) == [Placement(offset_bytes=0, block_stride_bytes=64, row_bytes=64)]
    other_stride = Placement(offset_bytes=32, block_stride_bytes=128, row_bytes=32)
    too_long = Placement(offset_bytes=32, block_stride_bytes=64, row_bytes=33)
    with_gap = Placement(offset_bytes=40, block_stride_bytes=64, row_bytes=16)
    for apart in (other_stride, too_long, with_gap):
        assert merged([row, apart]) == [row, apart]
    assert merged([]) == []


def test_a_page_that_its_heads_cannot_share_evenly_is_no_layout_of_ours() -> None:
    with pytest.raises(AssertionError):
        placements(
            offset_bytes=0,
            layer_index=0,
            layer_stride_bytes=3 * BLOCKS * 8,
            block_stride_bytes=8,
            block_count=BLOCKS,
            page_bytes=25,
        )


def test_every_target_has_its_block() -> None:
    storage, _ = make_storage(LAYERS_OUTERMOST)
    mover = mover_of(storage, LAYERS_OUTERMOST.layers())
    with pytest.raises(ValueError, match="zip"):
        mover.read([0, 1], [memoryview(bytearray(mover.payload_bytes))], after=None)
