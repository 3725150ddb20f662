"""Blocks as the caller sees them without copying: bytes, numpy arrays, torch tensors."""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidArgumentError, KvstoreError
from kvstore.layout import Plane
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore.slab import PAYLOAD_OFFSET_BYTES, SLOT_HEADER_BYTES, SlotState, slot_state
from kvstore_client.checks import check_lease_s
from kvstore_client.flows import look
from kvstore_client.flows.attach import Scope
from kvstore_client.flows.look import Viewed
from kvstore_client.flows.steps import Flow, SeenBlock

_NUMPY_DTYPES = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""Element types that numpy does not have, and those of the same size that show their bits."""


class BlockView:
    """One verified block, read-only. In place it shows what the daemon's memory holds, so its lease must be held.

    The memory stays mapped for as long as anything made from a view is alive, whatever became of the lease.
    """

    __slots__ = ("_namespace", "_seen", "payload")

    def __init__(self, block: SeenBlock | memoryview, *, namespace: Namespace) -> None:
        self._namespace = namespace
        self._seen = block if isinstance(block, SeenBlock) else None
        self.payload: memoryview = block.slot[PAYLOAD_OFFSET_BYTES:] if isinstance(block, SeenBlock) else block

    @property
    def is_copy(self) -> bool:
        """True where no memory is shared with the daemon: then these bytes are the caller's own."""
        return self._seen is None

    def is_valid(self) -> bool:
        """False once the slot has been given to another block. What was computed from it before is right when this is
        still true afterwards."""
        if self._seen is None:
            return True
        return slot_state(self._seen.slot[:SLOT_HEADER_BYTES], self._seen.generation) is not SlotState.GONE

    def numpy(self, *, plane: str) -> npt.NDArray[Any]:
        """The K plane ("k") or the V plane ("v"), shaped as the layout says; bfloat16 and float8 show as their bits.

        Of planes that are stored exact: in fewer bits they are not arrays, and `payload` is all there is to see.
        """
        found = self._plane(plane)
        dtype = np.dtype(_NUMPY_DTYPES.get(self._namespace.dtype, self._namespace.dtype))
        flat = np.frombuffer(self.payload, dtype, found.size_bytes // dtype.itemsize, found.offset_bytes)
        return flat.reshape(found.shape)

    def torch(self, *, plane: str) -> Any:
        """The same as a CPU tensor of the layout's dtype. Torch knows no read-only tensors: do not write to it."""
        try:
            torch = importlib.import_module("torch")  # by who asks for a tensor, never by importing this package
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "`torch` of a view needs torch, which is not installed: `pip install torch`, or take `numpy`",
                name=error.name,
            ) from error
        found = self._plane(plane)
        dtype = getattr(torch, self._namespace.dtype)
        held = _writable_face(self.payload)
        flat = torch.frombuffer(held, dtype=dtype, offset=found.offset_bytes, count=_element_count(found))
        return flat.reshape(found.shape)

    def _plane(self, name: str) -> Plane:
        planes = {plane.name.lower(): plane for plane in self._namespace.block_layout.planes}
        if name not in planes:
            raise InvalidArgumentError.of("plane", name, " or ".join(repr(known) for known in planes))
        stored = self._namespace.encoded_layout.planes[list(planes).index(name)]
        if not stored.is_exact:
            raise InvalidArgumentError.of("plane", name, f"one that is stored exact; this one is {stored.precision}")
        return replace(planes[name], offset_bytes=stored.offset_bytes)


class HeldViews:
    """What `Views` and `AsyncViews` tell alike: a sequence of one `BlockView` per block, None for what is no hit."""

    def __init__(self, viewed: Viewed, *, lease_s: float, scope: Scope) -> None:
        self._viewed = viewed
        self._lease_s = lease_s
        self._scope = scope

    @property
    def states(self) -> tuple[BlockState, ...]:
        return tuple(self._viewed.states)

    @property
    def matched_count(self) -> int:
        """Leading blocks that are in view."""
        return self._viewed.matched_count

    @property
    def error(self) -> KvstoreError | None:
        return self._viewed.error

    def __len__(self) -> int:
        return len(self._viewed.blocks)

    def __getitem__(self, index: int) -> BlockView | None:
        block = self._viewed.blocks[index]
        return None if block is None else BlockView(block, namespace=self._viewed.namespace)

    def __iter__(self) -> Iterator[BlockView | None]:
        return (self[index] for index in range(len(self)))

    def _renewal(self, lease_s: float | None) -> Flow[bool]:
        lease_s = self._lease_s if lease_s is None else lease_s
        check_lease_s(lease_s)
        return look.renew(self._scope, self._viewed, lease_s=lease_s)


class Views(HeldViews):
    """Holds the blocks in view. Leaving its `with` block releases them; what was made from them stays readable, but
    shows whatever takes their place."""

    def __init__(self, viewed: Viewed, *, lease_s: float, scope: Scope, run: Callable[[Flow[Any]], Any]) -> None:
        super().__init__(viewed, lease_s=lease_s, scope=scope)
        self._run = run

    def renew(self, *, lease_s: float | None = None) -> bool:
        """Holds on for `lease_s` from now (None: as long as at first); False when the hold had ended already."""
        return bool(self._run(self._renewal(lease_s)))

    def release(self) -> None:
        """Gives the blocks back; doing so twice changes nothing."""
        self._run(look.release(self._viewed))

    def __enter__(self) -> Views:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class AsyncViews(HeldViews):
    """`Views` for asyncio; leaving its `async with` block releases them."""

    def __init__(
        self, viewed: Viewed, *, lease_s: float, scope: Scope, run: Callable[[Flow[Any]], Awaitable[Any]]
    ) -> None:
        super().__init__(viewed, lease_s=lease_s, scope=scope)
        self._run = run

    async def renew(self, *, lease_s: float | None = None) -> bool:
        """See `Views.renew`."""
        return bool(await self._run(self._renewal(lease_s)))

    async def release(self) -> None:
        """See `Views.release`."""
        await self._run(look.release(self._viewed))

    async def __aenter__(self) -> AsyncViews:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


def _element_count(plane: Plane) -> int:
    first, second, third, fourth = plane.shape
    return first * second * third * fourth


def _writable_face(payload: memoryview) -> Any:
    """The same memory as an object that torch takes without a warning for every block; keeps it mapped."""
    face = _face_type(len(payload)).from_address(np.frombuffer(payload, np.uint8).ctypes.data)
    face.payload = payload
    return face


@functools.lru_cache(maxsize=64)
def _face_type(size_bytes: int) -> Any:
    """An array type that can carry a reference, which those of ctypes cannot."""
    return type("Face", (ctypes.c_char * size_bytes,), {})
