"""How pages of SGLang's host pools become blocks and pages again; nothing here needs SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.errors import InvalidArgumentError
from kvstore_client.integrations.sglang.pages import PagePool

from .sglang_pools import (
    LogicalHostPool,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    page_of,
    slots,
)

POOLS: dict[str, Callable[[], Any]] = {
    "layer_first": lambda: MHATokenToKVPoolHost(layout="layer_first"),
    "page_first": lambda: MHATokenToKVPoolHost(layout="page_first"),
    "page_first_direct": lambda: MHATokenToKVPoolHost(layout="page_first_direct"),
    "latent": MLATokenToKVPoolHost,
    "states": MambaPoolHost,
    "states in whole pages": lambda: MambaPoolHost(has_pieces=False),
}


def read(pool: Any, page: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    pages = PagePool(pool, name="kv")
    block = np.zeros(pages.page_bytes, np.uint8)
    [one] = pages.pages(slots(pool, page), page_count=1)
    one.read(block)
    return block


@pytest.mark.parametrize("make", POOLS.values(), ids=POOLS.keys())
def test_a_page_comes_back_whole_wherever_it_is_put_and_touches_no_other(make: Callable[[], Any]) -> None:
    source, target = make(), make()
    source.fill(seed=1)
    target.fill(seed=2)
    before = [page_of(target, page) for page in range(8)]

    wanted = PagePool(target, name="kv").pages(slots(target, 6, 1), page_count=2)
    for place, page in zip(wanted, (3, 5), strict=True):
        place.write(read(source, page))

    expected = {6: page_of(source, 3), 1: page_of(source, 5)}
    for page in range(8):
        assert torch.equal(page_of(target, page), expected.get(page, before[page])), f"page {page}"


def test_layouts_whose_pages_hold_the_same_share_blocks() -> None:
    by_layer, by_page = MHATokenToKVPoolHost(layout="layer_first"), MHATokenToKVPoolHost(layout="page_first_direct")
    by_layer.fill(seed=1)
    for page in range(8):
        by_page.set_from_flat_data_page(page * 4, by_layer.get_data_page(page * 4))

    assert read(by_layer, 3).tobytes() == read(by_page, 3).tobytes()
    one, other = PagePool(by_layer, name="kv"), PagePool(by_page, name="kv")
    assert (one.shape, one.identity) == (other.shape, other.identity)
    assert one.shape.layout == "NHD"


def test_a_block_is_the_page_as_the_engine_flattens_it() -> None:
    """What was stored page by page can be had as whole tensors, and the other way round."""
    for layout in ("layer_first", "page_first", "page_first_direct"):
        pool = MHATokenToKVPoolHost(layout=layout)
        pool.fill(seed=1)
        assert read(pool, 2).tobytes() == page_of(pool, 2).numpy().tobytes(), layout


@pytest.mark.parametrize(
    "other",
    [
        MHATokenToKVPoolHost(layout="page_first"),
        MHATokenToKVPoolHost(layout="layer_first", dtype=torch.float16),
        MHATokenToKVPoolHost(layout="layer_first", layer_num=4),
        MHATokenToKVPoolHost(layout="layer_first", page_size=8),
        # As many bytes as before.
        MHATokenToKVPoolHost(layout="layer_first", head_num=4, head_dim=4),
    ],
    ids=["order", "dtype", "layers", "page size", "heads"],
)
def test_pools_that_hold_other_bytes_share_nothing(other: Any) -> None:
    known, told = PagePool(MHATokenToKVPoolHost(layout="layer_first"), name="kv"), PagePool(other, name="kv")
    assert (known.shape, known.identity) != (told.shape, told.identity)


def test_a_pool_that_only_numbers_slots_has_nothing_to_store() -> None:
    assert PagePool(LogicalHostPool(), name="kv").is_logical
    assert not PagePool(MHATokenToKVPoolHost(), name="kv").is_logical


@pytest.mark.parametrize("indices", [None, torch.arange(7)], ids=["none", "too few"])
def test_pages_without_all_of_their_slots_are_refused(indices: Any) -> None:
    pool = PagePool(MHATokenToKVPoolHost(), name="kv")
    with pytest.raises(ValueError, match="indices of pool kv for 2 pages of 4 slots"):
        pool.pages(indices, page_count=2)


def test_a_layout_whose_pages_cannot_be_had_is_named() -> None:
    class Unsupported(MHATokenToKVPoolHost):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            raise ValueError("Unsupported layout")

        def get_data_page(self, index: int, flat: bool = True) -> Any:
            raise NotImplementedError("no flat pages where heads of K and V differ")

    with pytest.raises(InvalidArgumentError, match=r"hicache_mem_layout.*layer_first.*pool kv.*no flat pages"):
        PagePool(Unsupported(layout="layer_first"), name="kv")


def test_states_larger_than_an_axis_of_a_block_are_blocks_all_the_same() -> None:
    pool = PagePool(MambaPoolHost(slot_count=1, state_sizes=(1 << 20, 6)), name="mamba")
    assert pool.page_bytes == 4 * (1 << 20) + 12
    assert max(pool.shape.head_dim, pool.shape.num_kv_heads) <= 1 << 20
