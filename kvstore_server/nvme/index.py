"""What lies where on disk: the LMDB environment that maps blocks to places. It holds no bytes of blocks.

Records are hints: whoever reads a block verifies it. So one that is out of date costs a miss and nothing more, and the
file needs no checksum of its records. What it needs is a sound structure, since LMDB maps the file into memory and
walks it without doubting it: a damaged file could end the process. Each is therefore checked before LMDB sees it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore.envelope import RunningChecksum, checksum
from kvstore.errors import CapacityError, UnavailableError
from kvstore.keys import HASH_BYTES, BlockHash
from kvstore_server.nvme.crash import crash_point
from kvstore_server.nvme.index_pages import find_damage

STORE_ID_BYTES = 16
FORMAT_VERSION = 1
_DATA_NAME = "data.mdb"
_SEAL_NAME = "sealed"
_FILE_NAMES = (_DATA_NAME, "lock.mdb", _SEAL_NAME)
_SEAL = struct.Struct("<4sHHQQ")
"""Magic, format version, zero, bytes of the data file and their XXH3-64: as it was closed."""
_SEAL_MAGIC = b"KVNL"
_HASHED_AT_ONCE_BYTES = 4 << 20

_BLOCKS = b"blocks"
_META = b"meta"
_STORE_KEY = b"store"
_STORE = struct.Struct(f"<4sHH{STORE_ID_BYTES}s")
"""Magic, format version, zero, store id; the XXH3-64 of these bytes follows."""
_STORE_CHECKSUM = struct.Struct("<Q")
_STORE_MAGIC = b"KVNI"
_RECORD = struct.Struct(f"<QQQ{HASH_BYTES}s")
_RECORD_COLUMNS = np.dtype(
    [("place", "<u8"), ("sequence", "<u8"), ("stored_bytes", "<u8"), ("parent_hash", f"V{HASH_BYTES}")]
)
_NO_PARENT = bytes(HASH_BYTES)
_KEY_BYTES_MIN = 2 * HASH_BYTES


class IndexFullError(CapacityError):
    """The index's map has no room for the transaction, of which nothing was applied."""


class IndexDamagedError(UnavailableError):
    """The index cannot be used, and must be rebuilt from the segments or begun anew."""


class IndexVersionError(UnavailableError):
    """The index was written by another version; there is nothing wrong with it."""


class IndexRecord(NamedTuple):
    scoped_id: bytes
    block_hash: BlockHash
    place: int
    sequence: int
    stored_bytes: int
    parent_hash: BlockHash | None


_Numbers = npt.NDArray[np.uint64]


class IndexColumns(NamedTuple):
    """Records, each of whose fields is in a column of its own, in the order of their sequences."""

    scoped_ids: list[bytes]
    block_hashes: list[BlockHash]
    places: _Numbers
    sequences: _Numbers
    stored_bytes: _Numbers
    parent_hashes: list[BlockHash | None]


class Index:
    """A durable map from blocks to places, changed in transactions that apply as a whole or not at all.

    Threads may share one; `close` comes after everything else. One process at a time may open a folder: see
    `kvstore_server.nvme.ownership`. After an `OSError` or `IndexDamagedError` it may refuse everything until it is
    closed and opened again, which finds the last transaction that succeeded.
    """

    def __init__(self, folder: Path, *, map_bytes: int, new_store_id: bytes | None = None) -> None:
        """Opens an index, or makes one; raises `IndexDamagedError`, `IndexVersionError` or `OSError`.

        `map_bytes` is the most that its file may take, up to 1 KiB per record: a page is two thirds full when keys
        come in random order, and a transaction needs new pages before it can free the old. An index that is made here
        belongs to the store `new_store_id`, by default to a new one.
        """
        self.skipped_count = 0
        """Records that `records` left out the last time, because they have another length."""
        self._data_path = folder / _DATA_NAME
        self._seal_path = folder / _SEAL_NAME
        self._is_sound = True
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _break_seal(self._seal_path, self._data_path):
            _check_structure(self._data_path)
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        with _translated():
            self._env = lmdb.open(
                str(folder),
                map_size=-(-map_bytes // page_bytes) * page_bytes,
                max_dbs=2,
                mode=0o600,
                # A commit returns when it is on the device: it is what makes blocks that follow from it visible.
                sync=True,
                metasync=True,
                # A full disk is an error of a write then, and not a SIGBUS; stray pointers cannot spoil it either.
                writemap=False,
                # Pages are wanted in random order; the check above has just read all of them in order.
                readahead=False,
                # Without it, whatever this process had in memory would be written into unused parts of pages.
                meminit=True,
                # Threads read beside the one that writes. Costs nothing that can be measured beside the sync.
                lock=True,
                # The format that the check knows, and that every release of the library can read.
                lib_version=0,
            )
        try:
            with _translated():
                self._blocks = self._env.open_db(_BLOCKS)
                self._meta = self._env.open_db(_META)
                self.store_id = self._read_or_make_store_id(new_store_id)
            # LMDB syncs its file, not the folders that lead to it.
            _sync_folder(folder)
            _sync_folder(folder.parent)
        except BaseException:
            self._env.close()
            raise

    def records(self) -> list[IndexRecord]:
        """All of them, in the order of their sequences."""
        columns = self.columns()
        numbers = (column.tolist() for column in (columns.places, columns.sequences, columns.stored_bytes))
        return list(
            map(
                IndexRecord._make,
                zip(columns.scoped_ids, columns.block_hashes, *numbers, columns.parent_hashes, strict=True),
            )
        )

    def columns(self) -> IndexColumns:
        """What `records` has, side by side: for whoever goes through all of them while others wait for him."""
        with _translated(), self._env.begin(db=self._blocks) as txn, txn.cursor() as cursor:
            keys = list(cursor.iternext(keys=True, values=False))
            values = list(cursor.iternext(keys=False, values=True))
        is_ours = [
            len(value) == _RECORD.size and len(key) >= _KEY_BYTES_MIN for key, value in zip(keys, values, strict=True)
        ]
        self.skipped_count = is_ours.count(False)
        rows = np.frombuffer(b"".join(compress(values, is_ours)), _RECORD_COLUMNS)
        keys = list(compress(keys, is_ours))
        del values  # as with the keys below: room for the objects that come, which would be new memory otherwise
        hashes = np.frombuffer(b"".join([key[-HASH_BYTES:] for key in keys]), f"V{HASH_BYTES}")
        one_of: dict[bytes, bytes] = {}  # one object per namespace, not one per block
        scoped_ids = np.array([one_of.setdefault(one := key[:-HASH_BYTES], one) for key in keys], np.object_)
        del keys
        # Objects are made in the order in which they will be gone through: what lies side by side in memory is gone
        # through several times as fast.
        order = rows["sequence"].argsort(kind="stable")
        rows = rows[order]
        return IndexColumns(
            scoped_ids=scoped_ids[order].tolist(),
            block_hashes=hashes[order].tolist(),
            places=rows["place"],
            sequences=rows["sequence"],
            stored_bytes=rows["stored_bytes"],
            parent_hashes=[None if one == _NO_PARENT else one for one in rows["parent_hash"].tolist()],
        )

    def apply(self, puts: Sequence[IndexRecord], deletes: Sequence[tuple[bytes, BlockHash]]) -> None:
        """Deletes, then puts, in one transaction that is on the device when this returns; blocks for the sync.

        What is not there is as good as deleted. Raises `IndexFullError`, `IndexDamagedError` or `OSError`; nothing is
        applied then.
        """
        pack = _RECORD.pack
        is_sound, self._is_sound = self._is_sound, False
        with _translated(), self._env.begin(write=True, db=self._blocks) as txn:
            for scoped_id, block_hash in deletes:
                txn.delete(scoped_id + block_hash)
            for scoped_id, block_hash, place, sequence, stored_bytes, parent_hash in puts:
                txn.put(scoped_id + block_hash, pack(place, sequence, stored_bytes, parent_hash or _NO_PARENT))
            crash_point("nvme.in_index")
        self._is_sound = is_sound

    def clear(self) -> None:
        """Forgets all blocks, durably; the store keeps its id."""
        with _translated(), self._env.begin(write=True) as txn:
            txn.drop(self._blocks, delete=False)

    @property
    def count(self) -> int:
        with _translated(), self._env.begin(db=self._blocks) as txn:
            return int(txn.stat(self._blocks)["entries"])

    @property
    def fill_share(self) -> float:
        """Of the map, in pages that records have, full or not; a transaction needs some of the others for a while."""
        with _translated(), self._env.begin(db=self._blocks) as txn:
            stat, map_bytes = txn.stat(self._blocks), self._env.info()["map_size"]
        return float((stat["branch_pages"] + stat["leaf_pages"]) * stat["psize"] / map_bytes)

    @property
    def size_bytes(self) -> int:
        """What its data takes on disk."""
        return self._data_path.stat().st_blocks * 512

    def close(self) -> None:
        """May be called again. Unless something went wrong, the next opening need not check what it finds unchanged."""
        self._env.close()
        if self._is_sound:
            self._is_sound = False
            with contextlib.suppress(OSError):  # then it is checked
                _seal(self._seal_path, self._data_path)

    def _read_or_make_store_id(self, new_store_id: bytes | None) -> bytes:
        with self._env.begin(write=True, db=self._meta) as txn:
            stored = txn.get(_STORE_KEY)
            if stored is not None:
                return _decode_store(stored)
            if txn.stat(self._blocks)["entries"]:
                raise IndexDamagedError("the index has blocks, but no store id")
            store_id = os.urandom(STORE_ID_BYTES) if new_store_id is None else new_store_id
            assert len(store_id) == STORE_ID_BYTES, f"a store id has {STORE_ID_BYTES} bytes, not {len(store_id)}"
            head = _STORE.pack(_STORE_MAGIC, FORMAT_VERSION, 0, store_id)
            txn.put(_STORE_KEY, head + _STORE_CHECKSUM.pack(checksum(head)))
            return store_id


def remove_index(folder: Path) -> None:
    """Deletes a closed index, damaged or not, durably; what the segments hold stays. Raises `OSError`."""
    for name in _FILE_NAMES:
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir():
        _sync_folder(folder)


def _seal(path: Path, data_path: Path) -> None:
    size_bytes, digest = _digest(data_path)
    head = _SEAL.pack(_SEAL_MAGIC, FORMAT_VERSION, 0, size_bytes, digest)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(head)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    _sync_folder(path.parent)


def _break_seal(path: Path, data_path: Path) -> bool:
    """Whether the data file is as it was when it was closed; whatever comes now is not sealed any more, durably."""
    try:
        sealed = path.read_bytes()
    except OSError:
        return False
    path.unlink()
    _sync_folder(path.parent)
    try:
        return sealed == _SEAL.pack(_SEAL_MAGIC, FORMAT_VERSION, 0, *_digest(data_path))
    except OSError:
        return False


def _digest(path: Path) -> tuple[int, int]:
    """Bytes of a file and their checksum, read and never mapped."""
    running, size_bytes = RunningChecksum(), 0
    buffer = memoryview(bytearray(_HASHED_AT_ONCE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            running.add(buffer[:count])
            size_bytes += count
    return size_bytes, running.value()


def _check_structure(path: Path) -> None:
    """Reads the whole file, never through a mapping, and checks every page that LMDB could come to.

    Takes a few microseconds per record, after a crash. What it does not see are changed bytes inside keys and values.
    """
    try:
        if not path.stat().st_size:
            return  # was being made when the process ended; LMDB begins it anew
    except FileNotFoundError:
        return
    problem = find_damage(path)
    if problem is not None:
        raise IndexDamagedError(f"{path} is damaged: {problem}")


def _decode_store(stored: bytes) -> bytes:
    if len(stored) >= _STORE.size:
        magic, version, _, store_id = _STORE.unpack_from(stored)
        # Before the checksum: what other versions keep here may be longer.
        if magic == _STORE_MAGIC and version != FORMAT_VERSION:
            raise IndexVersionError(
                f"the index has format version {version}, this daemon reads {FORMAT_VERSION}; run the version that "
                "wrote it, or move the folder's index away and rebuild it from the segments"
            )
        if magic == _STORE_MAGIC and stored[_STORE.size :] == _STORE_CHECKSUM.pack(checksum(stored[: _STORE.size])):
            return bytes(store_id)
    raise IndexDamagedError("the index's store record does not match its checksum")


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """LMDB's errors as ours; what only a bug can cause stays as it is."""
    try:
        yield
    except (lmdb.MapFullError, lmdb.TxnFullError) as error:
        raise IndexFullError(f"the index is full: {error}") from error
    except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError) as error:
        raise IndexDamagedError(f"the index is damaged: {error}") from error
    except lmdb.PanicError as error:  # a commit failed half-way before
        raise OSError(errno.EIO, f"the index must be closed and opened again: {error}") from error
    except lmdb.Error as error:
        if error.code > 0:
            raise OSError(error.code, f"{os.strerror(error.code)} (index: {error})") from error
        raise


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
