"""Whether LMDB can be trusted with a file: it walks what it maps without doubting it, and may end the process.

This checks what LMDB's own offline verifier does, for trees of the kinds that ours are, and many pages at a time, for
every start after a crash waits for it. And what that verifier lets pass: entries of a page must lie side by side
without a gap, since one whose length was damaged reaches into the next one, and LMDB, which moves entries by their
lengths, would write past the page when it changes something near it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from operator import lt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint16]
_Numbers = npt.NDArray[np.int64]

# LMDB 0.9, 64 bits, little-endian (mdb.c: MDB_page, MDB_node, MDB_db, MDB_meta).
_PAGE_HEADER = struct.Struct("<QHHI")
"""Page number, padding, flags, pages of an overflow; of other pages where their free space begins and ends."""
_FLAGS_WORD, _LOWER_WORD, _UPPER_WORD, _POINTER_WORD = 5, 6, 7, 8
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_META = struct.Struct("<IIQQ48s48sQQ")
"""Magic, version, address, map bytes, record of the free list, record of the main tree, last page, transaction."""
_META_KIND = (0xBEEFC0DE, 1)
_META_COUNT = 2
_TREE = struct.Struct("<IHHQQQQQ")
_FREE_LIST_FLAGS = 0x08
"""Keys that are numbers; our own trees have no flags."""
_NO_PAGE = (1 << 64) - 1
_DEPTH_MAX = 32
_NODE_HEADER_BYTES = 8
_IN_OVERFLOW, _IS_TREE = 1, 2
_NUMBER_BYTES = 8
_PAGE_BYTES_ALLOWED = frozenset(1 << power for power in range(8, 16))
_UNWRITTEN_COUNT_MAX = 1 << 20
"""Free pages at the end need not be in the file; a number of them far above its size is a damaged one."""
_PAGES_AT_ONCE = 1024
_READ_AT_ONCE_BYTES = 4 << 20


def find_damage(path: Path) -> str | None:
    """What is wrong with a file, which is read and never mapped; None: nothing. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _read_through(fd)
        _check(_Pages(fd))
    except _DamageError as error:
        return str(error)
    finally:
        os.close(fd)
    return None


def _read_through(fd: int) -> None:
    """So that all is in the page cache: pages are wanted in the order of the trees, which is none on the disk."""
    buffer, at = bytearray(_READ_AT_ONCE_BYTES), 0
    while count := os.preadv(fd, [buffer], at):
        at += count


class _DamageError(Exception):
    """Says what is wrong."""


class _Tree(NamedTuple):
    padding: int
    """0, but the size of the file's pages in the record of the free list."""
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Entries(NamedTuple):
    """Of some pages of one kind, in the order of their keys."""

    page: _Numbers
    """Which of these pages it is in."""
    low: _Numbers
    high: _Numbers
    flags: _Numbers
    """In branches, the page that it leads to together with the two before; in leaves those are the bytes of data."""
    key_start: _Numbers
    """Counted from the start of the first page."""
    key_end: _Numbers


class _Pages:
    """The pages of a file, each of which is to have one use."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        file_bytes = os.fstat(fd).st_size
        first = self._read_meta(0, at=0)
        self.page_bytes = _tree(first[4]).padding
        if self.page_bytes not in _PAGE_BYTES_ALLOWED:
            raise _DamageError(f"pages of {self.page_bytes} bytes")
        second = self._read_meta(1, at=self.page_bytes)
        if _tree(second[4]).padding != self.page_bytes or 0 != first[-1] == second[-1]:
            raise _DamageError("the two headers contradict each other")
        *_, free_list, main, last_page, self.transaction = second if second[-1] > first[-1] else first
        self.free_list, self.main = _tree(free_list)._replace(padding=0), _tree(main)
        self.count = last_page + 1
        in_file_count = file_bytes // self.page_bytes
        if not _META_COUNT <= self.count <= in_file_count + max(in_file_count, _UNWRITTEN_COUNT_MAX):
            raise _DamageError(f"{self.count} pages in a file of {in_file_count}")
        self._is_used = np.zeros(self.count, np.bool_)
        self._is_used[:_META_COUNT] = True

    def _read_meta(self, number: int, *, at: int) -> tuple[Any, ...]:
        page = os.pread(self._fd, _PAGE_HEADER.size + _META.size, at)
        if len(page) < _PAGE_HEADER.size + _META.size:
            raise _DamageError(f"header {number} is cut off")
        own_number, _, flags, _ = _PAGE_HEADER.unpack_from(page)
        meta = _META.unpack_from(page, _PAGE_HEADER.size)
        if (own_number, *meta[:2]) != (number, *_META_KIND) or not flags & _META_PAGE:
            raise _DamageError(f"header {number} is none")
        # They are written in turn; 0 is that of an index to which nothing was ever written.
        if meta[-1] and meta[-1] % _META_COUNT != number:
            raise _DamageError(f"header {number} is of transaction {meta[-1]}")
        return meta

    def use(self, numbers: _Numbers, *, what: str) -> None:
        """Takes pages that nothing else may use."""
        if ((numbers < _META_COUNT) | (numbers >= self.count)).any():
            raise _DamageError(f"{what}: a page out of range")
        if self._is_used[numbers].any() or len(np.unique(numbers)) < len(numbers):
            raise _DamageError(f"{what}: a page that is used already")
        self._is_used[numbers] = True

    def check_all_used(self) -> None:
        unused = np.flatnonzero(~self._is_used)
        if len(unused):
            raise _DamageError(f"page {unused[0]}, and {len(unused) - 1} more, is neither used nor free")

    def read(self, numbers: _Numbers, *, flags: int) -> _Words:
        """Pages of a kind, a row for each."""
        pages = np.empty((len(numbers), self.page_bytes), np.uint8)
        for row, number in zip(pages, numbers.tolist(), strict=True):
            if os.preadv(self._fd, [row.data], number * self.page_bytes) != self.page_bytes:
                raise _DamageError(f"page {number} is cut off")
        words = pages.view("<u2")
        wrong = np.flatnonzero((pages.view("<i8")[:, 0] != numbers) | (words[:, _FLAGS_WORD] != flags))
        if len(wrong):
            raise _DamageError(f"page {numbers[wrong[0]]} is another one, or of another kind")
        return words

    def use_overflow(self, first: int, *, size_bytes: int, what: str) -> bytes:
        """What is in the pages that one value takes."""
        count = (_PAGE_HEADER.size - 1 + size_bytes) // self.page_bytes + 1
        if first + count > self.count:
            raise _DamageError(f"{what}: a value out of range")
        self.use(np.arange(first, first + count), what=what)
        content = os.pread(self._fd, count * self.page_bytes, first * self.page_bytes)
        if len(content) != count * self.page_bytes:
            raise _DamageError(f"page {first} is cut off")
        own_number, _, flags, own_count = _PAGE_HEADER.unpack_from(content)
        if (own_number, flags, own_count) != (first, _OVERFLOW, count):
            raise _DamageError(f"page {first} does not begin a value of {size_bytes} bytes")
        return content[_PAGE_HEADER.size : _PAGE_HEADER.size + size_bytes]


def _check(pages: _Pages) -> None:
    for key, value in _walk(pages, pages.free_list, what="free list", is_free_list=True):
        _use_free(pages, int.from_bytes(key, "little"), value)
    for name, record in _walk(pages, pages.main, what="main tree", has_trees=True):
        if len(record) != _TREE.size:
            raise _DamageError(f"the record of tree {name!r} has {len(record)} bytes")
        _walk(pages, _tree(record), what=f"tree {name!r}")
    pages.check_all_used()


def _use_free(pages: _Pages, transaction: int, value: bytes) -> None:
    """Of pages that were freed together: how many, and which, the last one first."""
    what = f"pages freed by transaction {transaction}"
    if not 1 <= transaction <= pages.transaction or not value or len(value) % _NUMBER_BYTES:
        raise _DamageError(f"{what}: {len(value)} bytes")
    count, *_ = numbers = np.frombuffer(value, "<u8")
    listed = numbers[1:]
    if count != len(listed) or (listed >= pages.count).any() or (listed[1:] >= listed[:-1]).any():
        raise _DamageError(f"{what}: no list of pages")
    pages.use(listed.astype(np.int64), what=what)


def _walk(
    pages: _Pages, tree: _Tree, *, what: str, is_free_list: bool = False, has_trees: bool = False
) -> list[tuple[bytes, bytes]]:
    """Checks a tree and uses its pages. Returns keys and values of a free list, or names and records of trees."""
    if (tree.padding, tree.flags) != (0, _FREE_LIST_FLAGS if is_free_list else 0):
        raise _DamageError(f"{what}: flags {tree.flags:#x} and padding {tree.padding}")
    claimed = tree.branch_pages, tree.leaf_pages, tree.overflow_pages, tree.entries
    if tree.root == _NO_PAGE:
        if any((tree.depth, *claimed)):
            raise _DamageError(f"{what}: no page, and counts above 0")
        return []
    if not 1 <= tree.depth <= _DEPTH_MAX or tree.root >= pages.count:
        raise _DamageError(f"{what}: depth {tree.depth} and root {tree.root}")
    level, branch_count = np.array([tree.root]), 0
    for _ in range(1, tree.depth):
        pages.use(level, what=what)
        branch_count += len(level)
        level = np.concatenate([_below(pages, numbers, what=what) for numbers in _parts(level)])
    pages.use(level, what=what)

    found: list[tuple[bytes, bytes]] = []
    overflow_count = entry_count = 0
    last: list[Any] = []
    for numbers in _parts(level):
        words = pages.read(numbers, flags=_LEAF)
        entries, content = _entries(words, numbers), words.tobytes()
        keys = _keys(entries, content)
        entry_count += len(keys)
        if is_free_list and set(map(len, keys)) != {_NUMBER_BYTES}:
            raise _DamageError(f"{what}: keys that are no numbers")
        ordered = last + ([int.from_bytes(key, "little") for key in keys] if is_free_list else keys)
        if not all(map(lt, ordered, ordered[1:])):
            raise _DamageError(f"{what}: keys out of order")
        last = ordered[-1:]
        for row in range(len(keys)) if is_free_list else np.flatnonzero(entries.flags).tolist():
            flags, size_bytes = int(entries.flags[row]), int(entries.low[row] | entries.high[row] << 16)
            start = int(entries.key_end[row])
            value = content[start : start + (_NUMBER_BYTES if flags == _IN_OVERFLOW else size_bytes)]
            if flags == _IN_OVERFLOW:
                value = pages.use_overflow(int.from_bytes(value, "little"), size_bytes=size_bytes, what=what)
                overflow_count += (_PAGE_HEADER.size - 1 + size_bytes) // pages.page_bytes + 1
            elif flags and not (has_trees and flags == _IS_TREE):
                raise _DamageError(f"{what}: an entry with flags {flags:#x}")
            if is_free_list or flags == _IS_TREE:
                found.append((keys[row], value))
    if claimed != (branch_count, len(level), overflow_count, entry_count):
        raise _DamageError(f"{what}: its counts are wrong")
    return found


def _below(pages: _Pages, numbers: _Numbers, *, what: str) -> _Numbers:
    """The pages that branches lead to."""
    words = pages.read(numbers, flags=_BRANCH)
    entries = _entries(words, numbers)
    keys = _keys(entries, words.tobytes())
    rows = entries.page.tolist()
    # But for the first of each page, whose key says nothing.
    for row, same_row, key, next_key in zip(rows, rows[2:], keys[1:], keys[2:], strict=False):
        if row == same_row and key and not key < next_key:
            raise _DamageError(f"{what}: branches out of order")
    return entries.low | entries.high << 16 | entries.flags << 32


def _entries(words: _Words, numbers: _Numbers) -> _Entries:
    """Those of these pages, which fill what their pages use without a gap."""
    page_bytes = words.shape[1] * 2
    lower, upper = words[:, _LOWER_WORD].astype(np.int64), words[:, _UPPER_WORD].astype(np.int64)
    is_odd = (lower % 2 != 0) | (lower <= _PAGE_HEADER.size) | (lower > upper) | (upper > page_bytes)
    if is_odd.any():
        raise _DamageError(f"page {numbers[is_odd][0]} begins or ends where it cannot")
    counts = (lower - _PAGE_HEADER.size) // 2
    # One row of these for each entry.
    page: _Numbers = np.repeat(np.arange(len(words)), counts)
    entry = np.arange(len(page)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = words[page, _POINTER_WORD + entry].astype(np.int64)
    is_outside = (start % 2 != 0) | (start < upper[page]) | (start + _NODE_HEADER_BYTES > page_bytes)
    if is_outside.any():
        raise _DamageError(f"an entry of page {numbers[page[is_outside]][0]} is where none can be")
    low, high, flags, key_bytes = (words[page, start // 2 + word].astype(np.int64) for word in range(4))
    data_bytes = np.where(flags & _IN_OVERFLOW, _NUMBER_BYTES, low | high << 16)
    is_branch = words[page, _FLAGS_WORD] == _BRANCH
    size = _NODE_HEADER_BYTES + key_bytes + np.where(is_branch, 0, data_bytes)

    order = np.lexsort((start, page))
    end = (start + size + (size & 1))[order]
    is_first = np.diff(page[order], prepend=-1) != 0
    next_start = np.where(np.roll(is_first, -1), page_bytes, np.roll(start[order], -1))
    is_loose = (end != next_start) | (is_first & (start[order] != upper[page[order]]))
    if is_loose.any():
        raise _DamageError(f"entries of page {numbers[page[order][is_loose]][0]} have wrong lengths")
    key_start = page * page_bytes + start + _NODE_HEADER_BYTES
    return _Entries(page, low, high, flags, key_start, key_start + key_bytes)


def _keys(entries: _Entries, content: bytes) -> list[bytes]:
    bounds = zip(entries.key_start.tolist(), entries.key_end.tolist(), strict=True)
    return [content[start:end] for start, end in bounds]


def _parts(numbers: _Numbers) -> Iterator[_Numbers]:
    for start in range(0, len(numbers), _PAGES_AT_ONCE):
        yield numbers[start : start + _PAGES_AT_ONCE]


def _tree(record: bytes) -> _Tree:
    return _Tree._make(_TREE.unpack(record))
