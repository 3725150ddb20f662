"""How large a tier is, as people say it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidArgumentError
from kvstore_client.sizes import format_size, parse_size

_BYTES_MAX = 1 << 60
_BLOCKS_MAX = 1 << 40
_ALLOWED = (
    "a share of the trace's unique blocks such as 5%, a number of blocks up to 2^40, "
    "or a size such as 64GiB up to 1024PiB"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A share of a trace's unique blocks, or blocks, or bytes; exactly one of them is set."""

    text: str
    percent: float | None = None
    blocks: int | None = None
    size_bytes: int | None = None

    @classmethod
    def parse(cls, text: str, *, field: str) -> Capacity:
        said = text.strip()
        try:
            if said.endswith("%"):
                capacity = cls(text=said, percent=float(said[:-1]))
            elif said.isdecimal():
                capacity = cls(text=said, blocks=int(said))
            else:
                capacity = cls(text=said, size_bytes=parse_size(said, field=field))
        except ValueError as error:
            raise InvalidArgumentError.of(field, text, _ALLOWED) from error
        is_share = capacity.percent is None or 0 < capacity.percent <= 100
        is_count = 1 <= (capacity.blocks or 1) <= _BLOCKS_MAX and 1 <= (capacity.size_bytes or 1) <= _BYTES_MAX
        if not is_share or not is_count or 0 in (capacity.blocks, capacity.size_bytes):
            raise InvalidArgumentError.of(field, text, _ALLOWED)
        return capacity

    def plus(self, size_bytes: int, *, unique_blocks: int, block_bytes: int) -> Capacity:
        """So much more, in blocks."""
        blocks = self.in_blocks(unique_blocks=unique_blocks, block_bytes=block_bytes) + size_bytes // block_bytes
        return Capacity(text=f"{self.text} + {format_size(size_bytes)}", blocks=blocks)

    def in_blocks(self, *, unique_blocks: int, block_bytes: int | None) -> int:
        """At least 1. Raises where bytes are meant and nobody has said how many a block has."""
        if self.percent is not None:
            return max(round(unique_blocks * self.percent / 100), 1)
        if self.blocks is not None:
            return self.blocks
        assert self.size_bytes is not None, f"{self} says nothing"
        if block_bytes is None:
            raise InvalidArgumentError(f"{self.text} is in bytes: say with --block-bytes what a block has")
        return max(self.size_bytes // block_bytes, 1)
