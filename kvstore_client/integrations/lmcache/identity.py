"""LMCache's keys and memory objects as namespaces and block hashes.

An object of LMCache is a chunk of 256 tokens by default, 32 MiB and more of a usual model. It is stored as blocks of at
most 2 MiB: slots waste little on those, and the daemon's slabs hold them as they come.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvstore.errors import InvalidArgumentError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState, CutReason
from kvstore.namespace import Namespace, Shard
from kvstore_client.flows.prefix import HeldPrefix
from kvstore_client.integrations._blocks import BlockShape, EngineModel, StoreSettings, to_block_hash
from kvstore_client.integrations._identity import canonical_json, model_label, model_revision
from kvstore_client.results import LookupResult

LOG = logging.getLogger("kvstore.integrations.lmcache")

_LAYOUT = "opaque:lmcache.object"
_BLOCK_BYTES_MAX = 2 << 20
_AXIS_MAX = 1 << 20
"""Longest axis of a namespace's layout."""


class _Dtype(Protocol):
    """A torch dtype."""

    @property
    def itemsize(self) -> int: ...


class LMCacheSettings(StoreSettings):
    """What both plug-ins take beside what every integration does."""

    recompute_s_per_chunk: float | None = None
    """Seconds that computing one chunk takes the engine: chunks that would be there later are not fetched. None: all
    are."""


@dataclass(frozen=True)
class ObjectLayout:
    """What a memory object holds: tensors back to back, each [K and V, layers, tokens, hidden] if of attention."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    element_bytes: tuple[int, ...]

    @classmethod
    def of(cls, shapes: Iterable[Sequence[int]], dtypes: Iterable[_Dtype]) -> ObjectLayout:
        dtypes = tuple(dtypes)
        return cls(
            tuple(tuple(shape) for shape in shapes),
            tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
            tuple(dtype.itemsize for dtype in dtypes),
        )

    @cached_property
    def object_bytes(self) -> int:
        return sum(math.prod(shape) * size for shape, size in zip(self.shapes, self.element_bytes, strict=True))

    @cached_property
    def block_count(self) -> int:
        """Equal parts, each of `_BLOCK_BYTES_MAX` at most where halves of the object are whole bytes."""
        count = 1
        while self.object_bytes > count * _BLOCK_BYTES_MAX and self.object_bytes % (count * 2) == 0:
            count *= 2
        return count

    def block_shape(self) -> BlockShape:
        """Opaque: the sizes only have to give the bytes of one part."""
        axis, factor = self.object_bytes // self.block_count, 1
        while axis > _AXIS_MAX and axis % 2 == 0:
            axis, factor = axis // 2, factor * 2
        whole = BlockShape.of_bytes(layout=_LAYOUT, num_layers=1, tokens_per_block=1, layer_bytes=axis)
        return replace(whole, num_kv_heads=factor)


@dataclass(frozen=True, kw_only=True)
class Space:
    """Objects of one identity and size: the namespace of their blocks, and how many each has."""

    namespace: Namespace
    block_count: int


class Revisions:
    """What the weights of a model are. Read in the background, so that nobody waits for files of many GB."""

    def __init__(self, settings: LMCacheSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._found: dict[str, str | None] = {}

    def of(self, model: str) -> str | None:
        """None while it is not known yet, and for good where neither files nor settings tell."""
        if self._settings.weights_revision is not None:
            return self._settings.weights_revision
        with self._lock:
            if model in self._found:
                return self._found[model]
            self._found[model] = None
        threading.Thread(target=self._read, args=(model,), name="kvstore-weights", daemon=True).start()
        return None

    def _read(self, model: str) -> None:
        try:
            found = model_revision(model)
        except (InvalidArgumentError, OSError, ValueError) as error:
            LOG.warning("blocks of %s are neither stored nor found: %s. Name them: `weights_revision`", model, error)
            return
        with self._lock:
            self._found[model] = found


class Namespaces:
    """The namespaces of one process that runs LMCache, by what distinguishes its objects."""

    def __init__(self, settings: LMCacheSettings, *, mode: str, lmcache_version: str, revisions: Revisions) -> None:
        self._settings = settings
        self._revisions = revisions
        # Objects of another LMCache are another order of bytes for all that anybody promises.
        self._common: dict[str, object] = {"lmcache": lmcache_version, "mode": mode}
        self._known: dict[tuple[str, ObjectLayout, str], Space] = {}

    def of(
        self, model: str, layout: ObjectLayout, *, worker: int, worker_count: int, settings: Mapping[str, object]
    ) -> Space | None:
        """None while the weights of `model` are not known; raises `InvalidArgumentError` for what is no namespace."""
        more = canonical_json({"worker": [worker, worker_count], **settings})
        known = self._known.get((model, layout, more))
        if known is not None:
            return known
        revision = self._revisions.of(model)
        if revision is None:
            return None
        engine = EngineModel(
            model=model_label(model),
            weights_revision=revision,
            settings=self._common,
            tenant_salt=self._settings.tenant_salt,
        )
        namespace = engine.namespace(
            layout.block_shape(),
            # A cache that all workers share is kept by one of them, as of a world of one.
            shard=Shard(tp_rank=worker, tp_size=worker_count) if worker < worker_count else None,
            settings={"key": more, "shapes": layout.shapes, "dtypes": layout.dtypes},
        )
        space = Space(namespace=namespace, block_count=layout.block_count)
        self._known[model, layout, more] = space
        return space


def chunk_hash(key: str | bytes, *, parts: Sequence[object] = ()) -> BlockHash:
    """LMCache's hash of a prefix, and what else tells two of its keys apart (tags, salts)."""
    own = to_block_hash(key)
    return own if not parts else BlockHash(blake3(own + canonical_json(parts).encode()).digest())


class Located:
    """Objects of one space: the hashes of their blocks, object by object, and where in the call each object stands."""

    def __init__(self, space: Space, once: Mapping[BlockHash, int]) -> None:
        self.namespace = space.namespace
        self.positions = [*once.values()]
        self.block_count = space.block_count
        self.hashes = [part for own in once for part in _part_hashes(own, space.block_count)]

    def blocks(self, objects: Iterable[npt.NDArray[np.uint8]]) -> list[Any]:
        """The parts of the objects' bytes, which they share, as the hashes go."""
        return [part for whole in objects for part in np.split(whole, self.block_count)]

    def whole_positions(self, is_there: Sequence[bool]) -> list[int]:
        """Where the objects stand of which every block is there. Flags may be those of the first blocks alone."""
        parts = range(self.block_count)
        return [
            at
            for number, at in enumerate(self.positions[: len(is_there) // self.block_count])
            if all(is_there[number * self.block_count + part] for part in parts)
        ]

    def recompute_s_per_block(self, recompute_s_per_chunk: float | None) -> float | None:
        return None if recompute_s_per_chunk is None else recompute_s_per_chunk / self.block_count


def locate(spaces: Sequence[Space | None], hashes: Sequence[BlockHash]) -> list[Located]:
    """Keys without a space are left out, as are those that come again."""
    found: dict[Space, dict[BlockHash, int]] = {}
    for at, (space, block_hash) in enumerate(zip(spaces, hashes, strict=True)):
        if space is not None:
            found.setdefault(space, {}).setdefault(block_hash, at)
    return [Located(space, once) for space, once in found.items()]


def worth_loading(found: LookupResult | HeldPrefix) -> list[bool]:
    """Whether each block is there; those behind the prefix count, too, unless it ends where the rest is too slow."""
    if found.cut_reason is not CutReason.NONE:
        return [at < found.matched_count for at in range(len(found.states))]
    return hits(found.states)


def hits(states: Sequence[BlockState]) -> list[bool]:
    return [state is BlockState.HIT for state in states]


def bytes_of(memory_obj: Any) -> npt.NDArray[np.uint8]:
    """A memory object's bytes, in place."""
    return np.frombuffer(memory_obj.byte_array, np.uint8)


def _part_hashes(own: BlockHash, count: int) -> list[BlockHash]:
    if count == 1:
        return [own]
    return [BlockHash(blake3(own + struct.pack("<I", part)).digest()) for part in range(count)]
