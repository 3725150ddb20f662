"""Pages of an engine's cache become blocks and blocks become pages, whatever the engine's arrangement."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpu_agent.device.cpu import CpuDevice
from gpu_agent.device.paged import PagedBlocks, PagedCache, gather, move_pages, scatter
from kvstore.errors import InvalidArgumentError
from kvstore.layout import BlockLayout, LayoutOrder
from kvstore.messages import BlockState
from tests.agent.conftest import MakeAgent
from tests.agent.fakes import NAMESPACE, chain

PAGE_COUNT = 12
DTYPES = {"float16": torch.float16, "float32": torch.float32, "int8": torch.int8}


@dataclass(frozen=True)
class Case:
    layout: BlockLayout
    arrangement: str
    pages_per_block: int
    pages: list[list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pages_per_block = draw(st.sampled_from([1, 2, 4]))
    v_head_dim = draw(st.sampled_from([0, 3, 4, 8]))
    arrangement = draw(st.sampled_from(["separate", "side by side", "across layers"]))
    head_dim = v_head_dim if arrangement != "separate" and v_head_dim else draw(st.sampled_from([1, 4, 6, 8]))
    layout = BlockLayout(
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        tokens_per_block=pages_per_block * draw(st.sampled_from([1, 2, 5])),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        order=draw(st.sampled_from(LayoutOrder)),
    )
    numbers = draw(st.permutations(range(PAGE_COUNT)))
    block_count = draw(st.integers(0, 3))
    pages = [
        list(numbers[block * pages_per_block : (block + 1) * pages_per_block])
        for block in range(min(block_count, PAGE_COUNT // pages_per_block))
    ]
    return Case(layout, arrangement, pages_per_block, pages)


def make_cache(case: Case, *, device: str = "cpu") -> PagedCache:
    layout = case.layout
    tokens, heads = layout.tokens_per_block // case.pages_per_block, layout.num_kv_heads
    page = (tokens, heads) if layout.order is LayoutOrder.NHD else (heads, tokens)
    dims = [dim for dim in (layout.head_dim, layout.v_head_dim) if dim]
    layers: list[list[Tensor]]
    if case.arrangement == "separate":
        layers = [[_noise(PAGE_COUNT, *page, dim, layout=layout) for dim in dims] for _ in range(layout.num_layers)]
    elif case.arrangement == "side by side":
        both = [_noise(PAGE_COUNT, len(dims), *page, dims[0], layout=layout) for _ in range(layout.num_layers)]
        layers = [list(layer.unbind(1)) for layer in both]
    else:
        whole = _noise(PAGE_COUNT, layout.num_layers, len(dims), *page, dims[0], layout=layout)
        layers = [list(layer.unbind(1)) for layer in whole.unbind(1)]
    return PagedCache(layout, [[tensor.to(device) for tensor in layer] for layer in layers])


def _noise(*shape: int, layout: BlockLayout) -> Tensor:
    dtype = DTYPES[layout.dtype]
    size = int(np.prod(shape))
    raw = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def plane_elements(case: Case, row: Tensor, number: int) -> Tensor:
    """One plane of a block as the layout says it lies in the payload."""
    plane = case.layout.planes[number]
    element_bytes = plane.strides_bytes[3]
    return torch.as_strided(
        row.clone().view(DTYPES[case.layout.dtype]),
        plane.shape,
        [stride // element_bytes for stride in plane.strides_bytes],
        plane.offset_bytes // element_bytes,
    )


def is_same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit: noise has numbers that are not equal to themselves."""
    return torch.equal(*(tensor.contiguous().cpu().view(torch.uint8) for tensor in (one, other)))


Move = Callable[[PagedBlocks, Tensor, Sequence[int], bool], None]


def move_by_reference(blocks: PagedBlocks, rows: Tensor, row_indices: Sequence[int], is_gather: bool) -> None:
    if is_gather:
        gather(blocks, range(len(blocks)), target=rows, target_rows=row_indices)
    else:
        scatter(blocks, range(len(blocks)), source=rows, source_rows=row_indices)


@pytest.fixture
def move_by_kernel(monkeypatch: pytest.MonkeyPatch) -> Move:
    """The kernel, compiled where there is a GPU, else run by triton's interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernel = importlib.import_module("gpu_agent.device.paged_kernel")

    def move(blocks: PagedBlocks, rows: Tensor, row_indices: Sequence[int], is_gather: bool) -> None:
        mover = kernel.PageMover(blocks.cache.pieces, device=blocks.cache.device)
        payloads = [rows.data_ptr() + row * rows.stride(0) for row in row_indices]
        mover.move(blocks, range(len(blocks)), payloads=payloads, is_gather=is_gather)

    return move


def check_gather_and_scatter(case: Case, move: Move, *, device: str = "cpu") -> None:
    cache = make_cache(case, device=device)
    blocks = cache.blocks(case.pages)
    # Slots are as wide as their slab makes them: rows need not follow each other without a gap.
    rows = torch.full((len(blocks) + 1, case.layout.payload_bytes + 64), 255, dtype=torch.uint8, device=device)
    rows = rows[:, : case.layout.payload_bytes]
    row_indices = list(range(len(blocks), 0, -1))
    move(blocks, rows, row_indices, True)
    tokens_axis = 1 if case.layout.order is LayoutOrder.NHD else 2
    for block, row in enumerate(row_indices):
        for number in range(len(case.layout.planes)):
            found = plane_elements(case, rows[row], number)
            for layer, tensors in enumerate(cache.layers):
                pages = [tensors[number][page] for page in case.pages[block]]
                expected = torch.cat(pages, dim=tokens_axis - 1)
                assert is_same(found[layer], expected)
    assert bool((rows[0] == 255).all())

    kept = [[tensor.clone() for tensor in layer] for layer in cache.layers]
    named = sorted(page for pages in case.pages for page in pages)
    for layer in cache.layers:
        for tensor in layer:
            tensor[named] = 0
    move(blocks, rows, row_indices, False)
    for layer, before in zip(cache.layers, kept, strict=True):
        for tensor, right in zip(layer, before, strict=True):
            assert is_same(tensor, right)


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_gathered_blocks_are_as_the_layout_says_and_scatter_undoes_it(case: Case) -> None:
    check_gather_and_scatter(case, move_by_reference)


@given(case=cases())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_kernel_does_what_the_reference_does(move_by_kernel: Move, case: Case) -> None:
    check_gather_and_scatter(case, move_by_kernel, device="cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(latency_s=0.01)
    yield device
    device.close()


def test_an_engine_stores_its_pages_and_loads_them_into_others(make_agent: MakeAgent) -> None:
    case = Case(NAMESPACE.block_layout, "side by side", 2, [[3, 1], [0, 7], [5, 2]])
    cache, target = make_cache(case), make_cache(case)
    agent, hashes = make_agent(2, device=CpuDevice(latency_s=0.002)), chain(3)
    assert agent.store(hashes, cache.blocks(case.pages)) == (True,) * 3
    right = [[tensor.clone() for tensor in layer] for layer in cache.layers]
    for layer in cache.layers:
        for tensor in layer:
            tensor.zero_()  # the engine may overwrite its pages as soon as `store` has returned
    states = agent.load([*hashes, *chain(1, seed=9)], target.blocks([[0, 2], [4, 6], [8, 9], [10, 11]]))
    assert states == (BlockState.HIT,) * 3 + (BlockState.MISS,)
    for layer, expected in zip(target.layers, right, strict=True):
        for tensor, source in zip(layer, expected, strict=True):
            assert is_same(tensor[[0, 2, 4, 6, 8, 9]], source[[3, 1, 0, 7, 5, 2]])


def test_pages_that_the_engine_goes_on_computing_are_read_when_the_copy_runs(device: CpuDevice) -> None:
    case = Case(NAMESPACE.block_layout, "separate", 1, [[3]])
    cache = make_cache(case)
    rows = torch.zeros((1, case.layout.payload_bytes), dtype=torch.uint8)
    device.copy_rows_for_caller(source=cache.blocks([[3]]), source_rows=[0], target=rows, target_rows=[0])
    assert is_same(plane_elements(case, rows[0], 0)[1], cache.layers[1][0][3])
    with pytest.raises(AssertionError, match="neither end has pages"):
        move_pages(source=rows, source_rows=[0], target=rows, target_rows=[0])


def test_a_cache_that_is_not_as_the_layout_says_is_refused_with_what_is_wrong() -> None:
    layout = NAMESPACE.block_layout
    case = Case(layout, "separate", 1, [])
    layers = [list(layer) for layer in make_cache(case).layers]
    with pytest.raises(InvalidArgumentError, match="layers is '1 layers'; allowed: 2"):
        PagedCache(layout, layers[:1])
    with pytest.raises(InvalidArgumentError, match=r"layers\[1\] is '1 tensors'; allowed: 2: K and V"):
        PagedCache(layout, [layers[0], layers[1][:1]])
    with pytest.raises(InvalidArgumentError, match=r"layers\[1\]\[1\] is '\(12, 1, 16, 16\)"):
        PagedCache(layout, [layers[0], [layers[1][0], layers[1][1][..., :16]]])
    with pytest.raises(InvalidArgumentError, match="innermost two axes contiguous"):
        PagedCache(layout, [layers[0], [layers[1][0], layers[1][1].transpose(2, 3).contiguous().transpose(2, 3)]])
    with pytest.raises(InvalidArgumentError, match="a divisor of 16"):
        PagedCache(replace(layout, num_layers=1), [[torch.zeros((4, 1, 3, 32)), torch.zeros((4, 1, 3, 32))]])


def test_pages_and_blocks_that_do_not_fit_are_refused_with_what_is_wrong(make_agent: MakeAgent) -> None:
    case = Case(NAMESPACE.block_layout, "separate", 2, [])
    cache, agent = make_cache(case), make_agent(4)
    with pytest.raises(InvalidArgumentError, match="2 per block"):
        cache.blocks([[1], [2]])
    with pytest.raises(InvalidArgumentError, match="pages is '1 to 12'; allowed: 0 to 11"):
        cache.blocks([[1, 12]])
    with pytest.raises(InvalidArgumentError, match="pages of 1 blocks'; allowed: 2, one per hash"):
        agent.store(chain(2), cache.blocks([[1, 2]]))
    other = make_cache(replace(case, layout=replace(case.layout, order=LayoutOrder.NHD)))
    with pytest.raises(InvalidArgumentError, match="the namespace's layout"):
        agent.store(chain(1), other.blocks([[1, 2]]))
    with pytest.raises(InvalidArgumentError, match="pages twice"):
        agent.load(chain(2), cache.blocks([[1, 2], [3, 2]]))
    assert agent.store([], cache.blocks([])) == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_pages_in_vram_are_offloaded_and_come_back_bit_for_bit(make_agent: MakeAgent) -> None:
    from gpu_agent.device import open_device

    case = Case(NAMESPACE.block_layout, "across layers", 2, [[3, 1], [0, 7], [5, 2]])
    cache, target = make_cache(case, device="cuda:0"), make_cache(case, device="cuda:0")
    agent, hashes = make_agent(2, device=open_device("cuda:0")), chain(3)
    right = [[tensor.clone() for tensor in layer] for layer in cache.layers]
    assert agent.store(hashes, cache.blocks(case.pages)) == (True,) * 3
    for layer in cache.layers:
        for tensor in layer:
            tensor.zero_()
    assert agent.load(hashes, target.blocks([[0, 2], [4, 6], [8, 9]])) == (BlockState.HIT,) * 3
    for layer, expected in zip(target.layers, right, strict=True):
        for tensor, source in zip(layer, expected, strict=True):
            assert is_same(tensor[[0, 2, 4, 6, 8, 9]], source[[3, 1, 0, 7, 5, 2]])
