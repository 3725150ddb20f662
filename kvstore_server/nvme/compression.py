"""Payloads made smaller for the disk, without loss: bytes of equal weight side by side, then zstd or lz4.

Half the bytes of bfloat16 are sign and exponent, of which few values are common; the other half is noise. Apart, the
first half compresses and the second is found out and kept as it is.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from kvstore.errors import CorruptBlockError, InvalidArgumentError
from kvstore_server.nvme.format import PAGE_BYTES, StoredCodec

try:
    import lz4.block as lz4_block
except ImportError:  # the extra `compression` is not installed
    lz4_block = None

_Bytes = npt.NDArray[np.uint8]
_WORDS: dict[int, np.dtype[np.unsignedinteger[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_ELEMENT_BYTES = (1, *_WORDS)
_LEVEL_MAX = zstandard.MAX_COMPRESSION_LEVEL


class _OfThread(threading.local):
    """What threads must not share, and what is costly to make anew for each block."""

    def __init__(self) -> None:
        self.compressors: dict[tuple[int, int], zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()
        self.shuffled: _Bytes = np.empty(0, np.uint8)

    def compressor(self, level: int, *, size_bytes: int) -> zstandard.ZstdCompressor:
        # Counts of bytes are kept per window: one that reaches across two planes fits neither. 128 KiB is a fifth
        # faster than 32 KiB, which is small enough for all blocks from 64 KiB on.
        window_log = 17 if size_bytes >= 1 << 20 else 15
        key = (level, window_log)
        if key not in self.compressors:
            self.compressors[key] = _new_compressor(level, window_log=window_log)
        return self.compressors[key]

    def room(self, size_bytes: int) -> _Bytes:
        """Grows to the largest payload that the thread has seen."""
        if len(self.shuffled) < size_bytes:
            self.shuffled = np.empty(size_bytes, np.uint8)
        return self.shuffled[:size_bytes]


_own = _OfThread()


def available() -> frozenset[StoredCodec]:
    """What payloads can be stored with here; lz4 comes with the extra `compression`."""
    missing = {StoredCodec.LZ4} if lz4_block is None else set()
    return frozenset(StoredCodec) - missing


def compress(payload: memoryview, *, codec: StoredCodec, element_bytes: int, level: int = 1) -> bytes | None:
    """The payload as stored; None when it is to be stored raw, since less than a page would be saved.

    `element_bytes` is the width of the plane's elements: 1, 2 or 4. `level` is zstd's; at level 1, which is the fast
    one here, only how often bytes occur is used, and repetition is not looked for. Releases the interpreter.
    """
    _check_element_bytes(element_bytes)
    if not 1 <= level <= _LEVEL_MAX:
        raise InvalidArgumentError.of("level", level, f"1 to {_LEVEL_MAX}")
    _check_available(codec)
    if codec is StoredCodec.RAW or len(payload) <= PAGE_BYTES:
        return None
    source = _shuffle(np.frombuffer(payload, np.uint8), element_bytes)
    if codec is StoredCodec.ZSTD:
        stored = _own.compressor(level, size_bytes=len(payload)).compress(source.data)
    else:
        stored = lz4_block.compress(source.data, store_size=False)
    return stored if len(stored) < len(payload) - PAGE_BYTES else None


def decompress_into(stored: memoryview, target: memoryview, *, codec: StoredCodec, element_bytes: int) -> None:
    """Fills `target` with the payload that `compress` was given; `element_bytes` must be what it was then.

    Raises `CorruptBlockError`, with `target` untouched, for anything that is not exactly one payload of that size, and
    for a codec that is not installed, whose blocks are of no use here. Whatever `stored` claims, no more than `target`
    takes is decompressed. That the payload is right is for its checksum to say. Releases the interpreter.
    """
    _check_element_bytes(element_bytes)
    if codec not in available():
        raise CorruptBlockError(f"the block is stored with {codec.name}, which needs the extra `compression`")
    payload: memoryview | bytes
    match codec:
        case StoredCodec.RAW:
            payload = stored
        case StoredCodec.ZSTD:
            payload = _from_zstd(stored, len(target))
        case StoredCodec.LZ4:
            payload = _from_lz4(stored, len(target))
    if len(payload) != len(target):
        raise CorruptBlockError(f"{codec.name} gives {len(payload)} bytes of a payload of {len(target)}")
    if codec is StoredCodec.RAW:
        target[:] = payload
    else:
        _unshuffle(np.frombuffer(payload, np.uint8), np.frombuffer(target, np.uint8), element_bytes)


def _new_compressor(level: int, *, window_log: int) -> zstandard.ZstdCompressor:
    if level > 1:
        return zstandard.ZstdCompressor(level=level)
    # The bytes of a plane hardly ever repeat in sequence, and the matches that zstd-1 finds among them by chance cost
    # both time and size. A table of 64 entries leaves the entropy coder to work alone, but still finds long runs.
    entropy_only = zstandard.ZstdCompressionParameters.from_level(
        1, window_log=window_log, hash_log=6, chain_log=6, min_match=7
    )
    return zstandard.ZstdCompressor(compression_params=entropy_only)


def _from_zstd(stored: memoryview, size_bytes: int) -> bytes:
    try:
        # Believed by the library, which reserves that much before it looks further.
        claimed_bytes = zstandard.frame_content_size(stored)
        if claimed_bytes != size_bytes:
            raise CorruptBlockError(f"the zstd frame claims {claimed_bytes} bytes of a payload of {size_bytes}")
        return _own.decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptBlockError(f"not a zstd frame: {error}") from error


def _from_lz4(stored: memoryview, size_bytes: int) -> bytes:
    try:
        payload: bytes = lz4_block.decompress(stored, uncompressed_size=size_bytes)
    except lz4_block.LZ4BlockError as error:
        raise CorruptBlockError(f"not an lz4 block: {error}") from error
    return payload


def _shuffle(payload: _Bytes, element_bytes: int) -> _Bytes:
    """All first bytes of the elements, all second bytes, …, then what is left of a last element."""
    if element_bytes == 1:
        return payload
    count = len(payload) // element_bytes
    whole_bytes = count * element_bytes
    words = payload[:whole_bytes].view(_WORDS[element_bytes])
    shuffled = _own.room(len(payload))
    # Shifts of whole words, which the CPU does many at a time: 4 times as fast as copies with a stride.
    for index, plane in enumerate(shuffled[:whole_bytes].reshape(element_bytes, count)):
        np.right_shift(words, 8 * index, out=plane, casting="unsafe")
    shuffled[whole_bytes:] = payload[whole_bytes:]
    return shuffled


def _unshuffle(shuffled: _Bytes, target: _Bytes, element_bytes: int) -> None:
    if element_bytes == 1:
        target[:] = shuffled
        return
    count = len(target) // element_bytes
    whole_bytes = count * element_bytes
    words = target[:whole_bytes].view(_WORDS[element_bytes])
    planes = shuffled[:whole_bytes].reshape(element_bytes, count)
    words[:] = planes[-1]
    for plane in planes[-2::-1]:
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, plane, out=words)
    target[whole_bytes:] = shuffled[whole_bytes:]


def _check_element_bytes(element_bytes: int) -> None:
    if element_bytes not in _ELEMENT_BYTES:
        raise InvalidArgumentError.of("element_bytes", element_bytes, "1, 2 or 4")


def _check_available(codec: StoredCodec) -> None:
    if codec not in available():
        allowed = ", ".join(sorted(each.name for each in available()))
        raise InvalidArgumentError.of("codec", codec.name, f"{allowed}; LZ4 needs the extra `compression`")
