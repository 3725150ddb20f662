"""Callers' tensors as rows of bytes, one per block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpu_agent.device import PagedBlocks
from kvstore.errors import InvalidArgumentError
from kvstore.keys import HASH_BYTES, BlockHash
from kvstore.layout import BlockLayout


def check_hashes(hashes: Sequence[BlockHash], *, field: str) -> None:
    for block_hash in hashes:
        if not isinstance(block_hash, bytes) or len(block_hash) != HASH_BYTES:
            raise InvalidArgumentError.of(field, block_hash, f"{HASH_BYTES} bytes each")


def check_parent_hash(parent_hash: BlockHash | None) -> None:
    if parent_hash is not None:
        check_hashes([parent_hash], field="parent_hash")


def chain_parents(hashes: Sequence[BlockHash], *, parent_hash: BlockHash | None) -> dict[BlockHash, BlockHash | None]:
    """What each block follows; of a block that is there twice, the first place counts."""
    parents: dict[BlockHash, BlockHash | None] = {}
    for block_hash in hashes:
        parents.setdefault(block_hash, parent_hash)
        parent_hash = block_hash
    return parents


def as_rows(tensor: Tensor, *, row_count: int, block_bytes: int, device_name: str, field: str) -> Tensor:
    """A [row_count, block_bytes] uint8 view of the caller's memory; never a copy.

    Takes any contiguous tensor of that many bytes, and uint8 rows that are contiguous in themselves.
    """
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise InvalidArgumentError.of(field, type(tensor).__name__, "a dense torch tensor")
    if str(tensor.device) not in ("cpu", device_name):
        raise InvalidArgumentError.of(field, f"a tensor on {tensor.device}", f"one on cpu or {device_name}")
    tensor = tensor.detach()
    if tensor.dtype == torch.uint8 and tensor.shape == (row_count, block_bytes) and tensor.stride(1) == 1:
        return tensor
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes != row_count * block_bytes or not tensor.is_contiguous():
        raise InvalidArgumentError.of(
            field,
            f"{size_bytes} bytes, shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            f"a contiguous tensor of {row_count} blocks of {block_bytes} bytes",
        )
    return tensor.reshape(-1).view(torch.uint8).view(row_count, block_bytes)


def as_caller_rows(
    blocks: Tensor | PagedBlocks, *, row_count: int, layout: BlockLayout, device_name: str, field: str
) -> Tensor | PagedBlocks:
    """What the caller gave, checked: rows of bytes, or pages of a cache that is laid out as the blocks are."""
    if not isinstance(blocks, PagedBlocks):
        return as_rows(
            blocks, row_count=row_count, block_bytes=layout.payload_bytes, device_name=device_name, field=field
        )
    if len(blocks) != row_count:
        raise InvalidArgumentError.of(field, f"pages of {len(blocks)} blocks", f"{row_count}, one per hash")
    if blocks.cache.layout != layout:
        raise InvalidArgumentError.of(field, f"pages in {blocks.cache.layout}", f"the namespace's layout, {layout}")
    if str(blocks.cache.device) not in ("cpu", device_name):
        raise InvalidArgumentError.of(field, f"pages on {blocks.cache.device}", f"on cpu or {device_name}")
    return blocks


def check_targets(blocks: Tensor | PagedBlocks, *, field: str) -> None:
    """No page may be filled from two blocks: which one it had in the end would be chance."""
    if isinstance(blocks, PagedBlocks) and len(np.unique(blocks.pages)) != blocks.pages.size:
        raise InvalidArgumentError.of(field, "pages twice", "every page once")


def as_buffer(staging: Tensor, *, start_row: int, end_row: int) -> memoryview:
    """Rows of host memory as one flat buffer, sharing their bytes."""
    return staging[start_row:end_row].reshape(-1).numpy().data
