"""Host pools that lay out their memory, and tell of it, as SGLang's do. Named as there, for the name is looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


class MHATokenToKVPoolHost:
    """K and V of all layers in one tensor, in one of SGLang's orders."""

    start_layer = 0
    storage_format_tag = None

    def __init__(
        self,
        *,
        layout: str = "page_first",
        page_count: int = 8,
        page_size: int = 4,
        layer_num: int = 3,
        head_num: int = 2,
        head_dim: int = 8,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.layout, self.page_size, self.size = layout, page_size, page_count * page_size
        self.layer_num, self.head_num, self.head_dim, self.dtype = layer_num, head_num, head_dim, dtype
        self.end_layer = layer_num
        row = (head_num, head_dim)
        shape = {
            "layer_first": (layer_num, self.size, *row),
            "page_first": (self.size, layer_num, *row),
            "page_first_direct": (page_count, layer_num, page_size, *row),
        }[layout]
        self.kv_buffer = torch.zeros((2, *shape), dtype=dtype)

    def fill(self, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=generator))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        element = self.dtype.itemsize
        token_bytes = self.head_num * self.head_dim * element
        v_offset = self.layer_num * self.size * token_bytes
        start = self.kv_buffer.data_ptr()
        addresses = []
        for index in indices.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                for layer in range(self.layer_num):
                    k = start + (index + layer * self.size) * token_bytes
                    addresses += [k, k + v_offset]
            else:
                k = start + index * self.layer_num * token_bytes
                addresses += [k, k + v_offset]
        layers_per_piece = 1 if self.layout == "layer_first" else self.layer_num
        return addresses, [layers_per_piece * self.page_size * token_bytes] * len(addresses)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self._page(index)
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self._page(index)
        page.copy_(data_page.reshape(page.shape))

    def _page(self, index: int) -> torch.Tensor:
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, index : index + self.page_size]
        if self.layout == "page_first":
            return self.kv_buffer[:, index : index + self.page_size]
        number = index // self.page_size
        return self.kv_buffer[:, number : number + 1]


class MLATokenToKVPoolHost:
    """One latent vector per token and layer."""

    def __init__(self, *, page_count: int = 8, page_size: int = 4, layer_num: int = 3, kv_cache_dim: int = 24) -> None:
        self.layout, self.page_size, self.dtype = "page_first", page_size, torch.bfloat16
        self.layer_num, self.kv_cache_dim = layer_num, kv_cache_dim
        self.kv_buffer = torch.zeros((page_count * page_size, layer_num, 1, kv_cache_dim), dtype=self.dtype)

    def fill(self, *, seed: int) -> None:
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        token_bytes = self.layer_num * self.kv_cache_dim * self.dtype.itemsize
        start = self.kv_buffer.data_ptr()
        addresses = [start + index * token_bytes for index in indices.tolist()[:: self.page_size]]
        return addresses, [self.page_size * token_bytes] * len(addresses)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.kv_buffer[index : index + self.page_size]
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        raise AssertionError("pages lie in pieces")


class MambaPoolHost:
    """A state per page of one slot, in tensors of different sizes and types; `has_pieces` as with its layouts."""

    page_size = 1

    def __init__(self, *, slot_count: int = 8, has_pieces: bool = True, state_sizes: Sequence[int] = (16, 6)) -> None:
        self.layout = "page_first" if has_pieces else "layer_first"
        self.temporal_dtype, self.conv_dtype = torch.float32, torch.bfloat16
        self.temporal = torch.zeros((slot_count, state_sizes[0]), dtype=self.temporal_dtype)
        self.conv = torch.zeros((slot_count, state_sizes[1]), dtype=self.conv_dtype)

    def fill(self, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for states in (self.temporal, self.conv):
            states.copy_(torch.randn(states.shape, generator=generator))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        if self.layout == "layer_first":
            raise ValueError(f"Mamba storage zero-copy requires page_first layout, got {self.layout}")
        states = (self.temporal, self.conv)
        sizes = [math.prod(each.shape[1:]) * each.element_size() for each in states]
        addresses = [
            each.data_ptr() + index * size
            for index in indices.tolist()
            for each, size in zip(states, sizes, strict=True)
        ]
        return addresses, sizes * len(indices)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return torch.cat([self.temporal[index].view(torch.uint8), self.conv[index].view(torch.uint8)])

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        split = self.temporal[index].numel() * 4
        self.temporal[index] = data_page[:split].view(torch.float32)
        self.conv[index] = data_page[split:].view(torch.bfloat16)


class LogicalHostPool:
    """Slots without bytes: other pools' pages have their numbers."""

    layout = "layer_first"

    def __init__(self, *, page_size: int = 4) -> None:
        self.page_size = page_size

    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
        return None

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        raise AssertionError("there is nothing to set")


def slots(pool: Any, *pages: int) -> torch.Tensor:
    """The indices of these pages, as SGLang gives them."""
    return torch.cat([torch.arange(page * pool.page_size, (page + 1) * pool.page_size) for page in pages])


def page_of(pool: Any, page: int) -> torch.Tensor:
    """A copy of its bytes."""
    return pool.get_data_page(page * pool.page_size).contiguous().view(torch.uint8).clone()
