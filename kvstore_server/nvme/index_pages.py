"""What LMDB's own verifier lets pass, and LMDB itself would stumble over and take the process with it.

That is entries of a page which do not lie side by side without a gap: one whose length was damaged reaches into the
next one, and LMDB, which moves entries by their lengths, would write past the page when it changes something near it.
And it is trees of other kinds than ours are.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint16]
_Numbers = npt.NDArray[np.int64]

# LMDB 0.9, 64 bits, little-endian (mdb.c: MDB_page, MDB_node, MDB_db, MDB_meta).
_PAGE_HEADER_BYTES = 16
_META = struct.Struct("<IIQQ48s48sQQ")
"""Magic, version, address, map bytes, record of the free list, record of the main tree, last page, transaction."""
_TREE = struct.Struct("<IHHQQQQQ")
"""Page bytes (in the free list's), flags, depth, branch pages, leaf pages, overflow pages, entries, root page."""
_FREE_LIST_FLAGS = 0x08
"""Keys that are integers; our own trees have no flags."""
_NO_PAGE = (1 << 64) - 1
_FLAGS_WORD, _LOWER_WORD, _UPPER_WORD, _POINTER_WORD = 5, 6, 7, 8
_BRANCH, _LEAF = 1, 2
_NODE_HEADER_BYTES = 8
_IN_OVERFLOW, _IS_TREE = 1, 2
_OVERFLOW_BYTES = 8
_PAGES_AT_ONCE = 1024


def find_damage(path: Path) -> str | None:
    """What is wrong with a file in which LMDB's verifier found nothing.

    Raises `OSError`, and `ValueError` or `LookupError` for a file that it would have found something in.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        page_bytes, pages = _roots(fd)
        while pages:
            below: list[int] = []
            for start in range(0, len(pages), _PAGES_AT_ONCE):
                numbers = pages[start : start + _PAGES_AT_ONCE]
                loose = _check(_read(fd, numbers, page_bytes), below)
                if loose is not None:
                    return f"entries of page {numbers[loose]} have wrong lengths"
            pages = below
    except _OtherTreeError as error:
        return str(error)
    finally:
        os.close(fd)
    return None


class _OtherTreeError(Exception):
    """A tree is of a kind that is never made here."""


def _roots(fd: int) -> tuple[int, list[int]]:
    """The page size, and the roots of both trees of the last transaction."""
    first = _META.unpack(os.pread(fd, _META.size, _PAGE_HEADER_BYTES))
    page_bytes = int(_TREE.unpack(first[4])[0])
    second = _META.unpack(os.pread(fd, _META.size, page_bytes + _PAGE_HEADER_BYTES))
    roots = [
        [_root_of(free_list, flags=_FREE_LIST_FLAGS), _root_of(main)] for *_, free_list, main, _, _ in (first, second)
    ]
    return page_bytes, [root for root in roots[second[-1] > first[-1]] if root != _NO_PAGE]


def _root_of(tree: bytes, *, flags: int = 0) -> int:
    _, found_flags, *_, root = _TREE.unpack(tree)
    if found_flags != flags:
        raise _OtherTreeError(f"a tree has flags {found_flags:#x} instead of {flags:#x}")
    return int(root)


def _read(fd: int, numbers: list[int], page_bytes: int) -> _Words:
    pages = np.empty((len(numbers), page_bytes), np.uint8)
    for row, number in zip(pages, numbers, strict=True):
        if os.preadv(fd, [row.data], number * page_bytes) != page_bytes:
            raise ValueError(f"page {number} is cut off")
    return pages.view("<u2")


def _check(words: _Words, below: list[int]) -> int | None:
    """Which of these pages is loose, if any; adds the pages that they lead to to `below`."""
    page_bytes = words.shape[1] * 2
    flags = words[:, _FLAGS_WORD]
    counts = (words[:, _LOWER_WORD].astype(np.int64) - _PAGE_HEADER_BYTES) // 2
    # One row of these for each entry.
    page: _Numbers = np.repeat(np.arange(len(words)), counts)
    entry = np.arange(len(page)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = words[page, _POINTER_WORD + entry].astype(np.int64)
    low, high, entry_flags, key_bytes = (words[page, start // 2 + word].astype(np.int64) for word in range(4))
    is_branch = flags[page] == _BRANCH
    data_bytes = np.where(entry_flags & _IN_OVERFLOW, _OVERFLOW_BYTES, low | high << 16)
    size = _NODE_HEADER_BYTES + key_bytes + np.where(is_branch, 0, data_bytes)
    size += size & 1

    order = np.lexsort((start, page))
    end = (start + size)[order]
    is_first = np.diff(page[order], prepend=-1) != 0
    is_last = np.roll(is_first, -1)
    next_start = np.where(is_last, page_bytes, np.roll(start[order], -1))
    is_loose = (end != next_start) | (start[order] & 1 != 0)
    is_loose |= is_first & (start[order] != words[page[order], _UPPER_WORD])
    if is_loose.any():
        return int(page[order][is_loose][0])
    odd = np.flatnonzero(((flags != _BRANCH) & (flags != _LEAF)) | (counts < 1))
    if len(odd):
        return int(odd[0])

    below.extend((low | high << 16 | entry_flags << 32)[is_branch].tolist())
    below.extend(
        _trees_in(words, page, start + _NODE_HEADER_BYTES + key_bytes, ~is_branch & (entry_flags & _IS_TREE != 0))
    )
    return None


def _trees_in(words: _Words, page: _Numbers, data: _Numbers, is_tree: npt.NDArray[Any]) -> Iterator[int]:
    """Roots of the named trees."""
    for entry in np.flatnonzero(is_tree):
        at = int(data[entry])
        root = _root_of(words[page[entry]].tobytes()[at : at + _TREE.size])
        if root != _NO_PAGE:
            yield root
