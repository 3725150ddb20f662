"""Callers' memory is seen as bytes, never copied, and checked before anything is done with it."""

from __future__ import annotations

import array
import mmap
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore_client.buffers import block_views
from tests.client.builders import refuses


def views(buffers: Any, *, block_count: int, block_bytes: int, is_writable: bool = True) -> list[memoryview]:
    return block_views(buffers, block_count=block_count, block_bytes=block_bytes, field="into", is_writable=is_writable)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.bool, torch.float8_e4m3fn, torch.int64],
    ids=str,
)
def test_tensors_of_any_dtype_share_their_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3, 4, dtype=dtype)
    block_bytes = 12 * tensor.element_size()
    first, second = views(tensor, block_count=2, block_bytes=block_bytes)
    second[:] = b"\x01" * block_bytes
    assert tensor.view(torch.uint8).flatten().tolist() == [0] * block_bytes + [1] * block_bytes
    assert len(first) == block_bytes


def test_a_tensor_that_wants_gradients_and_one_of_no_dimension_will_do() -> None:
    views(torch.zeros(4, requires_grad=True), block_count=1, block_bytes=16)
    views([torch.tensor(1.0)], block_count=1, block_bytes=4)


def test_a_part_of_a_tensor_starts_where_it_starts() -> None:
    tensor = torch.zeros(4, 4)
    views(tensor[1:3], block_count=2, block_bytes=16)[0][:] = np.ones(4, np.float32).tobytes()
    assert tensor.sum(1).tolist() == [0, 4, 0, 0]


@pytest.mark.parametrize("dtype", ["float16", "uint8", "int64", "datetime64[s]", "complex64", ">f4"])
def test_arrays_of_any_dtype_share_their_memory(dtype: str) -> None:
    data = np.zeros((2, 4), dtype)
    views(data, block_count=2, block_bytes=data.nbytes // 2)[1][:] = b"\xff" * (data.nbytes // 2)
    assert data.view(np.uint8).flatten().tolist() == [0] * (data.nbytes // 2) + [255] * (data.nbytes // 2)


@given(block_count=st.integers(0, 8), block_bytes=st.integers(1, 32), data=st.data())
def test_one_buffer_is_cut_into_blocks_in_order(block_count: int, block_bytes: int, data: st.DataObject) -> None:
    content = data.draw(st.binary(min_size=block_count * block_bytes, max_size=block_count * block_bytes))
    kinds: list[Any] = [
        content, bytearray(content), memoryview(content), array.array("B", content), np.frombuffer(content, np.uint8),
    ]  # fmt: skip
    for buffers in kinds:
        cut = views(buffers, block_count=block_count, block_bytes=block_bytes, is_writable=False)
        assert [len(view) for view in cut] == [block_bytes] * block_count
        assert b"".join(cut) == content


def test_any_other_buffer_will_do() -> None:
    with mmap.mmap(-1, 4096) as pages:
        for view in views(pages, block_count=2, block_bytes=2048):
            view[:4] = b"mmap"
            view.release()
        assert pages[2048:2052] == b"mmap"
    assert views(memoryview(bytearray(16)).cast("B", (4, 4)), block_count=1, block_bytes=16)[0].ndim == 1


def test_a_sequence_may_mix_kinds() -> None:
    plain, data, tensor = bytearray(8), np.zeros(2, np.float32), torch.zeros(4, dtype=torch.bfloat16)
    for view in views([plain, data, tensor], block_count=3, block_bytes=8):
        view[:] = b"\x01" * 8
    assert plain == data.tobytes() == tensor.view(torch.uint8).numpy().tobytes() == b"\x01" * 8


@pytest.mark.parametrize(
    ("buffers", "named"),
    [
        (bytearray(15), "into is 'one buffer of 15 bytes'; allowed: 16 bytes"),
        (np.zeros((4, 8), np.uint8)[:, ::2], "into is 'a strided array'"),
        (np.array([object(), object()]), "into is 'an array of Python objects'"),
        (torch.zeros(4, 4).T, "into is 'a strided or sparse tensor'"),
        (torch.zeros(2, 2).to_sparse(), "into is 'a strided or sparse tensor'"),
        (torch.zeros(4, device="meta"), "into is 'a tensor on meta'"),
        (memoryview(bytearray(32))[::2], "into is 'a strided buffer'"),
        (bytes(16), "into is 'a read-only bytes'"),
        (np.frombuffer(bytes(16), np.uint8), "into is 'a read-only ndarray'"),
        ([bytearray(8)], "into is '1 buffers'; allowed: 2"),
        ([bytearray(8), bytes(8)], r"into\[1\] is 'a read-only bytes'"),
        ([bytearray(8), bytearray(9)], r"into\[1\] is '9 bytes'; allowed: 8 bytes"),
        ([bytearray(8), "no memory"], r"into\[1\] is 'str'"),
        ([bytearray(8), [1.0]], r"into\[1\] is 'list'"),
        ("no memory at all", "into"),
        (None, "into is 'NoneType'"),
        (7, "into is 'int'"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(buffers: Any, named: str) -> None:
    with refuses(named):
        views(buffers, block_count=2, block_bytes=8)
