from __future__ import annotations

import errno
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import lmdb
import pytest
from lmdb import verify as lmdb_verify

from kvstore.keys import BlockHash
from kvstore_server.nvme.crash import CRASH_VARIABLE
from kvstore_server.nvme.index import (
    Index,
    IndexDamagedError,
    IndexFullError,
    IndexRecord,
    IndexVersionError,
    remove_index,
)
from kvstore_server.nvme.index_pages import find_damage

_MAP_BYTES = 4 << 20
_PAGE_BYTES = 4096
_ALICE = b"alice" + b"n" * 32
_NOBODY = b"n" * 32

_USE = """
import os, random, sys
from pathlib import Path
from kvstore_server.nvme.index import Index, IndexDamagedError, IndexFullError, IndexRecord
for folder in sys.stdin.read().splitlines():
    print(folder, flush=True)
    try:
        index = Index(Path(folder), map_bytes=4 << 20)
        records = index.records()
        for start in range(0, 400, 100):
            new = [record._replace(block_hash=os.urandom(32)) for record in records[start : start + 100]]
            index.apply(new, [(record.scoped_id, record.block_hash) for record in records[start : start + 100]])
        index.records()
        index.clear()
        index.close()
    except (IndexDamagedError, IndexFullError):
        pass
"""
"""Uses each of the folders as a daemon would; what it must not do is end by a signal or an unknown error."""


def _record(number: int, *, scoped_id: bytes = _NOBODY, parent_hash: BlockHash | None = None) -> IndexRecord:
    return IndexRecord(scoped_id, _hash(number), number * _PAGE_BYTES, number, 2 << 20, parent_hash)


def _hash(number: int) -> BlockHash:
    return BlockHash(random.Random(number).randbytes(32))


def _keys(records: Iterable[IndexRecord]) -> list[tuple[bytes, BlockHash]]:
    return [(record.scoped_id, record.block_hash) for record in records]


def _fill(folder: Path, *, count: int = 400) -> list[IndexRecord]:
    """An index that has been changed for a while: with free pages, and pages that are not full."""
    index = Index(folder, map_bytes=_MAP_BYTES)
    chosen, kept = random.Random(1), list[IndexRecord]()
    for start in range(0, 2 * count, 40):
        new = [_record(start + number) for number in range(40)]
        old = [kept.pop(chosen.randrange(len(kept))) for _ in range(20 if kept else 0)]
        index.apply(new, _keys(old))
        kept += new
    index.close()
    return kept


# --- what it keeps


def test_records_are_the_same_after_reopening(tmp_path: Path) -> None:
    records = [
        _record(1),
        _record(2, parent_hash=_hash(1)),
        _record(3, scoped_id=_ALICE, parent_hash=_hash(1)),
        IndexRecord(b"t" * 224 + _NOBODY, _hash(4), (1 << 64) - 1, (1 << 64) - 1, (1 << 64) - 1, None),
    ]
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    index.apply(records, [])
    assert sorted(index.records()) == sorted(records)
    assert index.count == 4
    index.close()
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    assert sorted(index.records(), key=lambda record: record.sequence) == sorted(records, key=lambda r: r.sequence)
    assert index.skipped_count == 0
    index.close()


def test_a_transaction_deletes_before_it_puts_and_missing_blocks_count_as_deleted(tmp_path: Path) -> None:
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    index.apply([_record(1), _record(2), _record(1, scoped_id=_ALICE)], [])
    moved = _record(1)._replace(place=0, sequence=9)
    index.apply([moved, _record(3)], _keys([_record(1), _record(2), _record(77)]))
    assert sorted(index.records()) == sorted([moved, _record(3), _record(1, scoped_id=_ALICE)])
    index.close()


def test_a_scoped_id_is_one_object_however_many_blocks_it_has(tmp_path: Path) -> None:
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    index.apply([_record(number) for number in range(100)], [])
    assert len({id(record.scoped_id) for record in index.records()}) == 1
    index.close()


def test_a_cleared_index_has_no_blocks_and_keeps_its_store_id(tmp_path: Path) -> None:
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    index.apply([_record(1)], [])
    store_id = index.store_id
    index.clear()
    assert (index.records(), index.count) == ([], 0)
    index.apply([_record(2)], [])
    index.close()
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    assert (index.records(), index.store_id) == ([_record(2)], store_id)
    index.close()


def test_every_new_index_belongs_to_a_new_store_unless_told_to_which(tmp_path: Path) -> None:
    first, second = (Index(tmp_path / name, map_bytes=_MAP_BYTES) for name in "ab")
    third = Index(tmp_path / "c", map_bytes=_MAP_BYTES, new_store_id=first.store_id)
    assert len(first.store_id) == 16
    assert first.store_id != second.store_id
    assert third.store_id == first.store_id
    for index in (first, second, third):
        index.close()
    again = Index(tmp_path / "c", map_bytes=_MAP_BYTES, new_store_id=second.store_id)
    assert again.store_id == first.store_id  # it was not made here
    again.close()


def test_a_removed_index_is_begun_anew(tmp_path: Path) -> None:
    _fill(tmp_path / "index")
    (tmp_path / "index" / "data.mdb").write_bytes(b"damaged" * 4000)
    remove_index(tmp_path / "index")
    remove_index(tmp_path / "index")
    remove_index(tmp_path / "never")
    index = Index(tmp_path / "index", map_bytes=_MAP_BYTES)
    assert index.records() == []
    index.close()


def test_threads_read_whole_transactions_while_another_writes(tmp_path: Path) -> None:
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    index.apply([_record(number) for number in range(50)], [])
    seen: list[set[int]] = []

    def read() -> None:
        for _ in range(20):
            sequences = {record.sequence for record in index.records()}
            seen.append(sequences)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(20):
        index.apply([_record(number)._replace(sequence=1000 + turn) for number in range(50)], [])
    for thread in threads:
        thread.join()
    assert all(sequences == set(range(50)) or len(sequences) == 1 for sequences in seen)
    assert len(seen) == 60
    index.close()


def test_records_of_another_length_are_skipped_and_counted(tmp_path: Path) -> None:
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    index.apply([_record(1)], [])
    index.close()
    with lmdb.open(str(tmp_path), max_dbs=2) as env, env.begin(write=True, db=env.open_db(b"blocks")) as txn:
        txn.put(_NOBODY + _hash(2), bytes(55))
        txn.put(_NOBODY + _hash(3), bytes(57))
        txn.put(b"short key", bytes(56))
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    assert index.records() == [_record(1)]
    assert index.skipped_count == 3
    index.close()


# --- all or nothing


def test_a_full_index_applies_nothing_and_goes_on(tmp_path: Path) -> None:
    index = Index(tmp_path, map_bytes=256 << 10)
    index.apply([_record(number) for number in range(100)], [])
    with pytest.raises(IndexFullError, match="full"):
        index.apply([_record(number) for number in range(100, 10_000)], _keys([_record(1)]))
    assert sorted(index.records()) == sorted(_record(number) for number in range(100))
    index.apply([_record(200)], _keys([_record(1)]))
    assert index.count == 100
    assert index.size_bytes <= 256 << 10
    index.close()
    index = Index(tmp_path, map_bytes=256 << 10)
    assert index.count == 100
    index.close()


def test_a_disk_that_is_full_is_an_error_and_applies_nothing(tmp_path: Path) -> None:
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    index.apply([_record(1)], [])
    # A limit on the size of files takes the place of a full disk: the system gives EFBIG instead of ENOSPC.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with pytest.raises(OSError, match="index") as failed:
            index.apply([_record(number) for number in range(5000)], [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert failed.value.errno in (errno.EFBIG, errno.EIO)
    index.close()
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    assert index.records() == [_record(1)]
    index.apply([_record(2)], [])
    index.close()


def test_killed_inside_a_transaction_the_index_is_as_before_it(tmp_path: Path) -> None:
    kept = _fill(tmp_path)
    code = (
        "import sys; from pathlib import Path; from kvstore_server.nvme.index import Index\n"
        "index = Index(Path(sys.argv[1]), map_bytes=4 << 20); records = index.records()\n"
        "index.apply([r._replace(sequence=0) for r in records], [])\n"
    )
    environment = os.environ | {CRASH_VARIABLE: "nvme.in_index"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    assert sorted(index.records()) == sorted(kept)
    index.close()


def test_killed_at_any_moment_the_index_opens_with_whole_transactions(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from kvstore_server.nvme.index import Index, IndexRecord\n"
        "index = Index(Path(sys.argv[1]), map_bytes=4 << 20); old = index.records()\n"
        "while True:\n"
        "    new = [IndexRecord(bytes(32), os.urandom(32), 0, 0, 0, None) for _ in range(len(old) or 64)]\n"
        "    index.apply(new, [(r.scoped_id, r.block_hash) for r in old])\n"
        "    old = new\n"
        "    print('applied', flush=True)\n"
    )
    for turn in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(1 + 7 * turn):
                assert process.stdout.readline() == "applied\n"
            process.kill()
        index = Index(tmp_path, map_bytes=_MAP_BYTES)
        assert index.count == 64
        index.close()


# --- damage


def test_an_index_that_was_being_made_when_the_process_ended_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").touch()
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    index.apply([_record(1)], [])
    assert index.count == 1
    index.close()


def test_a_damaged_lock_file_is_no_harm(tmp_path: Path) -> None:
    kept = _fill(tmp_path)
    for damage in (b"x", b"\xff" * 8192, bytes(100)):
        (tmp_path / "lock.mdb").write_bytes(damage)
        index = Index(tmp_path, map_bytes=_MAP_BYTES)
        assert index.count == len(kept)
        index.apply([kept[0]], [])
        index.close()


def test_bytes_that_are_no_index_are_refused(tmp_path: Path) -> None:
    for damage in (b"x", bytes(_PAGE_BYTES), b"\xff" * 3 * _PAGE_BYTES, random.Random(1).randbytes(40_000)):
        (tmp_path / "data.mdb").write_bytes(damage)
        with pytest.raises(IndexDamagedError, match=r"data\.mdb"):
            Index(tmp_path, map_bytes=_MAP_BYTES)


def test_an_index_cut_off_in_its_pages_is_refused(tmp_path: Path) -> None:
    _fill(tmp_path / "whole")
    data = (tmp_path / "whole" / "data.mdb").read_bytes()
    # The last pages may be free ones, of which nothing is missed.
    for share in (0.001, 0.02, 0.25, 0.5, 0.75):
        cut = tmp_path / f"cut{share}"
        cut.mkdir()
        (cut / "data.mdb").write_bytes(data[: int(len(data) * share)])
        with pytest.raises(IndexDamagedError):
            Index(cut, map_bytes=_MAP_BYTES)


@pytest.mark.parametrize(("field", "length"), [(0, 58), (0, 120), (0, 54), (6, 62), (6, 66)])
def test_an_entry_that_claims_a_wrong_length_is_damage(tmp_path: Path, field: int, length: int) -> None:
    """It reaches into its neighbour; changed by LMDB, the page would be written over its end."""
    index = Index(tmp_path, map_bytes=_MAP_BYTES)
    index.apply([_record(number) for number in range(10)], [])
    index.close()
    data = bytearray((tmp_path / "data.mdb").read_bytes())
    header = struct.pack("<HHHH", 56, 0, 0, 64)  # value bytes, flags, key bytes
    assert data.count(header) == 10  # nothing is in free pages
    data[data.find(header) + field] = length
    (tmp_path / "data.mdb").write_bytes(data)
    with pytest.raises(IndexDamagedError):
        Index(tmp_path, map_bytes=_MAP_BYTES)


@pytest.mark.parametrize("name", [None, b"blocks", b"meta"])
def test_a_tree_that_claims_to_be_of_another_kind_is_damage(tmp_path: Path, name: bytes | None) -> None:
    """LMDB ends the process for some of them."""
    _fill(tmp_path)
    data = (tmp_path / "data.mdb").read_bytes()
    if name is None:  # the main tree, in the header
        flags_at = [page * _PAGE_BYTES + 16 + 24 + 48 + 4 for page in range(2)]
    else:
        flags_at = [found.end() + 4 for found in re.finditer(struct.pack("<H", len(name)) + name, data)]
    assert flags_at
    for kind in (0x02, 0x04, 0x08):
        damaged = bytearray(data)
        for at in flags_at:
            damaged[at] ^= kind
        (tmp_path / "data.mdb").write_bytes(damaged)
        with pytest.raises(IndexDamagedError):
            Index(tmp_path, map_bytes=_MAP_BYTES)


def _damaged(data: bytes, *, seed: int) -> list[bytes]:
    """Truncation, flipped bits in each part of the first pages and anywhere else, and whole pages replaced."""
    page_count, chosen = len(data) // _PAGE_BYTES, random.Random(seed)
    damaged: list[bytes] = [data[: chosen.randrange(1, len(data))] for _ in range(40)]
    for page in range(2):
        for bit in range(0, 160 * 8, 11):
            at = page * _PAGE_BYTES + bit // 8
            damaged.append(data[:at] + bytes([data[at] ^ 1 << bit % 8]) + data[at + 1 :])
    for number in range(200):
        flipped = bytearray(data)
        for _ in range(1 + number % 8):
            flipped[chosen.randrange(2 * _PAGE_BYTES, len(data))] ^= 1 << chosen.randrange(8)
        damaged.append(bytes(flipped))
    for number in range(2, page_count, 3):
        page_bytes = bytes(_PAGE_BYTES) if number % 2 else chosen.randbytes(_PAGE_BYTES)
        damaged.append(data[: number * _PAGE_BYTES] + page_bytes + data[(number + 1) * _PAGE_BYTES :])
    return damaged


def _is_damaged_to_lmdb(path: Path) -> bool:
    try:
        return bool(lmdb_verify.verify(str(path), subdir=False))  # type: ignore[no-untyped-call]
    except (lmdb_verify.VerifyError, struct.error, LookupError, ValueError, RecursionError):
        return True


def test_whatever_damage_the_verifier_of_lmdb_finds_is_found(tmp_path: Path) -> None:
    _fill(tmp_path)
    path = tmp_path / "data.mdb"
    data = path.read_bytes()
    words = random.Random(1)
    for content in [*_damaged(data, seed=1), *(_with_a_wrong_word(data, words) for _ in range(400))]:
        path.write_bytes(content)
        assert find_damage(path) is not None or not _is_damaged_to_lmdb(path)


def _with_a_wrong_word(data: bytes, chosen: random.Random) -> bytes:
    """Near the start of a page or at its entries' headers, where numbers are that LMDB goes by."""
    page = chosen.randrange(len(data) // _PAGE_BYTES) * _PAGE_BYTES
    at = page + 2 * chosen.randrange(80)
    if chosen.random() < 0.5:
        at = page + int.from_bytes(data[page + 16 : page + 18], "little") % (_PAGE_BYTES - 8) + 2 * chosen.randrange(4)
    value = chosen.choice([0, 1, 2, 4, 0x10, 56, 64, 0x0FFF, 0xFFFF, chosen.randrange(1 << 16)])
    return data[:at] + struct.pack("<H", value) + data[at + 2 :]


def test_nothing_is_found_in_a_sound_index_whatever_has_been_done_with_it(tmp_path: Path) -> None:
    chosen = random.Random(3)
    tenants = [_NOBODY, *(bytes([letter]) * length + _NOBODY for letter, length in ((97, 1), (98, 7), (99, 224)))]
    kept: list[IndexRecord] = []
    path = tmp_path / "data.mdb"
    for turn, count in enumerate([0, 1, 30, 3000, 20, 4000, 1, 0, 500]):
        index = Index(tmp_path, map_bytes=16 << 20)
        old = [kept.pop(chosen.randrange(len(kept))) for _ in range(len(kept) * turn // 9)]
        new = [_record(10_000 * turn + number, scoped_id=chosen.choice(tenants)) for number in range(count)]
        index.apply(new, _keys(old))
        kept += new
        index.close()
        assert (find_damage(path), _is_damaged_to_lmdb(path)) == (None, False)
    index = Index(tmp_path, map_bytes=16 << 20)
    index.clear()
    index.close()
    assert (find_damage(path), _is_damaged_to_lmdb(path)) == (None, False)
    # What other versions might keep.
    with lmdb.open(str(tmp_path), max_dbs=2) as env, env.begin(write=True, db=env.open_db(b"blocks")) as txn:
        txn.put(_NOBODY + _hash(2), bytes(50_000))
    assert (find_damage(path), _is_damaged_to_lmdb(path)) == (None, False)


def test_no_damage_ends_the_process(tmp_path: Path) -> None:
    _fill(tmp_path / "whole")
    damaged = _damaged((tmp_path / "whole" / "data.mdb").read_bytes(), seed=4)
    folders = [tmp_path / str(number) for number in range(len(damaged))]
    for folder, content in zip(folders, damaged, strict=True):
        folder.mkdir()
        (folder / "data.mdb").write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", _USE],
        input="\n".join(map(str, folders)),
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, f"ended with {done.returncode} at {done.stdout.splitlines()[-1]}: {done.stderr}"
    assert len(done.stdout.splitlines()) == len(folders)
    shutil.rmtree(tmp_path)


def test_a_store_id_that_does_not_match_its_checksum_is_damage(tmp_path: Path) -> None:
    Index(tmp_path, map_bytes=_MAP_BYTES).close()
    with lmdb.open(str(tmp_path), max_dbs=2) as env, env.begin(write=True, db=env.open_db(b"meta")) as txn:
        stored = bytearray(txn.get(b"store") or b"")
        stored[10] ^= 1
        txn.put(b"store", bytes(stored))
    with pytest.raises(IndexDamagedError, match="store record"):
        Index(tmp_path, map_bytes=_MAP_BYTES)


def test_another_format_version_is_named_and_is_no_damage(tmp_path: Path) -> None:
    Index(tmp_path, map_bytes=_MAP_BYTES).close()
    with lmdb.open(str(tmp_path), max_dbs=2) as env, env.begin(write=True, db=env.open_db(b"meta")) as txn:
        stored = bytearray(txn.get(b"store") or b"")
        stored[4:6] = struct.pack("<H", 7)
        txn.put(b"store", bytes(stored) + b"more")
    with pytest.raises(IndexVersionError, match="has format version 7, this daemon reads 1"):
        Index(tmp_path, map_bytes=_MAP_BYTES)
    assert not issubclass(IndexVersionError, IndexDamagedError)


def test_an_index_below_a_file_or_a_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        Index(tmp_path / "file", map_bytes=_MAP_BYTES)
    with pytest.raises(FileNotFoundError):
        Index(tmp_path / "missing" / "index", map_bytes=_MAP_BYTES)
