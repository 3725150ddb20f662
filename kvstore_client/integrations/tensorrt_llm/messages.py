"""What the scheduler tells the workers for one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.errors import UnavailableError
from kvstore_client.integrations.tensorrt_llm.plan import NO_PAGE, Save
from kvstore_client.views import BlockView


class Held:
    """Blocks of one rank: in the daemon's memory, in the process that looked them up, and copies in any other."""

    def __init__(self, blocks: Sequence[BlockView | Any]) -> None:
        self._blocks = list(blocks)

    def tensors(self) -> list[Any]:
        """One flat int8 CPU tensor per block; right if `check` passes after they were used."""
        return [
            (block.torch(plane="kv") if isinstance(block, BlockView) else block).flatten() for block in self._blocks
        ]

    def check(self) -> None:
        """Raises `UnavailableError` where memory that was read may have been another block's by then."""
        if not all(block.is_valid() for block in self._blocks if isinstance(block, BlockView)):
            raise UnavailableError(
                "blocks went while they were loaded: this process stood still for longer than they are held"
            )

    def __getstate__(self) -> dict[str, Any]:
        copies = [tensor.clone() for tensor in self.tensors()]
        self.check()
        return {"_blocks": copies}


@dataclass(frozen=True, kw_only=True)
class Load:
    """Blocks that the engine counts on: `held` per rank, to go to the pool before this step runs."""

    block_ids: tuple[int, ...]
    held: tuple[Held, ...]

    def pages(self, *, rank: int) -> list[tuple[int, Any]]:
        """Page and bytes of each block that has a page."""
        pairs = zip(self.block_ids, self.held[rank].tensors(), strict=False)
        return [(block_id, tensor) for block_id, tensor in pairs if block_id != NO_PAGE]


@dataclass(frozen=True, kw_only=True)
class Step:
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
