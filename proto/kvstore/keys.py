"""Block hashes: the identity of a block's content, chained over its prefix.

Format (docs/formats/keys.md): root = BLAKE3("kvstore block chain v1" || u32 tokens_per_block), then
hash_i = BLAKE3(hash_(i-1) || u32 token ids of block i || for each extra key: u32 length || bytes),
all integers little-endian. The same input gives the same hash in every process and language.
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NewType, Protocol, cast

from blake3 import blake3

from kvstore.errors import InvalidArgumentError

BlockHash = NewType("BlockHash", bytes)
"""32 bytes; equal only if the whole prefix up to and including this block is equal."""

NamespaceId = NewType("NamespaceId", bytes)
"""32 bytes: BLAKE3 of a namespace's canonical encoding."""

HASH_BYTES = 32
TOKEN_BYTES = 4
TOKENS_PER_BLOCK_MAX = 1 << 20
_HASH_FORMAT = f"{HASH_BYTES}s"
_RUN = struct.Struct(_HASH_FORMAT * 256)
"""How hashes are split: as many at once as a short prompt has. Seven times as fast as one by one."""
SESSION_BYTES_MAX = 4096
"""Of a session's name in UTF-8: more than any engine's request id."""
_CHAIN_DOMAIN = b"kvstore block chain v1"


class SupportsArray(Protocol):
    """A numpy array, or a tensor that numpy can take."""

    def __array__(self) -> Any: ...


def chain_root(tokens_per_block: int) -> BlockHash:
    """The parent of every first block; depends on the block size alone."""
    return BlockHash(blake3(_CHAIN_DOMAIN + struct.pack("<I", tokens_per_block)).digest())


def hash_blocks(
    tokens: Sequence[int] | SupportsArray,
    *,
    tokens_per_block: int,
    extra_keys: Mapping[int, Sequence[bytes]] | None = None,
    parent_hash: BlockHash | None = None,
) -> list[BlockHash]:
    """Hashes of all full blocks of a prompt; a partial last block has none.

    With `parent_hash` the tokens are those that follow that block, and the chain goes on.

    `tokens` is a sequence of ints, or a one-dimensional numpy array or torch tensor of integers. Each id
    must fit in 32 unsigned bits. `extra_keys` maps a block's position to what else its content depends
    on, such as multimodal digests, in a fixed order; they reach all later blocks through the chain.
    """
    if not 1 <= tokens_per_block <= TOKENS_PER_BLOCK_MAX:
        raise InvalidArgumentError.of("tokens_per_block", tokens_per_block, f"1 to {TOKENS_PER_BLOCK_MAX}")
    packed = _pack_tokens(tokens)
    step = tokens_per_block * TOKEN_BYTES
    count = len(packed) // step
    parent: bytes = chain_root(tokens_per_block) if parent_hash is None else parent_hash
    # One hasher, reset per block: building a hasher costs as much as hashing a block does.
    hasher = blake3()
    update, digest, reset = hasher.update, hasher.digest, hasher.reset
    hashes: list[bytes] = []
    append = hashes.append
    extra_at = extra_keys or {}
    for index, (block,) in enumerate(struct.iter_unpack(f"{step}s", memoryview(packed)[: count * step])):
        update(parent + block)
        if index in extra_at:
            update(_pack_extra(extra_at[index]))
        parent = digest()
        append(parent)
        reset()
    return cast("list[BlockHash]", hashes)


def block_hash_from_engine(engine_hash: bytes) -> BlockHash:
    """A block hash from an engine's own chain hash, whatever its length.

    32-byte hashes pass unchanged; others are hashed, so that no padding can make two of them equal.
    """
    if not engine_hash:
        raise InvalidArgumentError.of("engine_hash", engine_hash, "at least one byte")
    if len(engine_hash) == HASH_BYTES:
        return BlockHash(bytes(engine_hash))
    return BlockHash(blake3(bytes(engine_hash)).digest())


def session_hash(namespace_id: NamespaceId, name: str) -> int:
    """What stands for a session's name outside the process that knows it: 64 bits, never 0, of no use elsewhere.

    BLAKE3 of its UTF-8, keyed with the namespace's id, which has the tenant's salt in it; the first 8 bytes,
    little-endian.
    """
    return int.from_bytes(blake3(name.encode(), key=namespace_id).digest(length=8), "little") or 1


def pack_hashes(hashes: Iterable[BlockHash]) -> bytes:
    """Hashes back to back, 32 bytes each: how they travel in one `bytes` field."""
    return b"".join(hashes)


def split_hashes(packed: bytes) -> list[BlockHash]:
    """The inverse of `pack_hashes`; raises `InvalidArgumentError` on a length that is no multiple of 32."""
    if len(packed) % HASH_BYTES:
        raise InvalidArgumentError.of("block_hashes", f"{len(packed)} bytes", "a multiple of 32 bytes")
    rest_bytes = len(packed) % _RUN.size
    runs = _RUN.iter_unpack(memoryview(packed)[: len(packed) - rest_bytes])
    rest = struct.unpack_from(_HASH_FORMAT * (rest_bytes // HASH_BYTES), packed, len(packed) - rest_bytes)
    return [*chain.from_iterable(runs), *rest]


def _pack_extra(extra: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in extra)


def _pack_tokens(tokens: Sequence[int] | SupportsArray) -> bytes:
    """Token ids as little-endian u32."""
    if hasattr(tokens, "__array__"):
        import numpy as np  # only for callers that already hold arrays or tensors

        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidArgumentError.of("tokens", f"{ids.ndim}-d {ids.dtype}", "a one-dimensional array of integers")
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 0xFFFFFFFF):
            raise InvalidArgumentError.of("tokens", f"ids {ids.min()}..{ids.max()}", "ids from 0 to 4294967295")
        return ids.astype("<u4").tobytes()
    if isinstance(tokens, (bytes, bytearray)):  # `array` would take four bytes for one id
        raise InvalidArgumentError.of("tokens", tokens, "a sequence of ids or an array, not packed bytes")
    try:
        words = array.array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidArgumentError.of("tokens", str(error), "ids from 0 to 4294967295") from error
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
