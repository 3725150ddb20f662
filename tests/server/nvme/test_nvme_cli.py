"""`kvstore nvme` on real folders: what it shows, what it finds, and what it refuses to touch."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.envelope import ENVELOPE_BYTES
from kvstore.keys import NamespaceId
from kvstore_client import cli
from kvstore_server.core.tenants import DEFAULT_TENANT, scoped
from kvstore_server.nvme.compression import compress
from kvstore_server.nvme.device import FileDevice, aligned_buffer
from kvstore_server.nvme.format import (
    DISK_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    DiskHeader,
    SegmentHeader,
    StoredCodec,
    padded,
)
from kvstore_server.nvme.index import Index, IndexRecord
from kvstore_server.nvme.ownership import Ownership
from tests.server.builders import MIDDLE, block_hash, envelope_of, payload_of

BLOCK_BYTES = ENVELOPE_BYTES + len(payload_of(0, MIDDLE))
SLOT_BYTES = padded(DISK_HEADER_BYTES + BLOCK_BYTES)
SLOTS = 4
SEGMENT_BYTES = SEGMENT_HEADER_BYTES + SLOTS * SLOT_BYTES
STORE_ID = bytes(range(16))
SCOPED_ID = scoped(DEFAULT_TENANT, NamespaceId(MIDDLE.id))

Run = Callable[..., tuple[int, Any]]


class Folder:
    """A folder of the tier with one segment in use, and one that was made only; block `n` is in slot `n`."""

    def __init__(self, path: Path, *, block_count: int = 3) -> None:
        self.path = path
        path.mkdir()
        device = FileDevice(path)
        device.create(0, SEGMENT_BYTES)
        device.create(1, SEGMENT_BYTES)
        header = SegmentHeader(
            store_id=STORE_ID,
            index=0,
            segment_bytes=SEGMENT_BYTES,
            slot_bytes=SLOT_BYTES,
            assignment=1,
            scoped_id=SCOPED_ID,
        )
        self._write(device, 0, header.encode())
        device.close()
        index = Index(path / "index", map_bytes=16 << 20, new_store_id=STORE_ID)
        index.apply([self.put(number, slot=number, sequence=number + 1) for number in range(block_count)], ())
        index.close()

    def put(self, number: int, *, slot: int, sequence: int, element_bytes: int = 0) -> IndexRecord:
        """Writes a block, compressed if its elements have a width, and returns what the index would say of it."""
        stored: bytes | None = payload_of(number, MIDDLE)
        assert stored is not None
        codec = StoredCodec.ZSTD if element_bytes else StoredCodec.RAW
        if element_bytes:
            stored = compress(memoryview(stored), codec=codec, element_bytes=element_bytes)
            assert stored is not None
        stored_bytes = ENVELOPE_BYTES + len(stored)
        head = DiskHeader(sequence=sequence, stored_bytes=stored_bytes, codec=codec, parent_hash=None).encode()
        device = FileDevice(self.path)
        self._write(device, self.offset(slot), head + envelope_of(number, MIDDLE).encode() + stored)
        device.close()
        return IndexRecord(SCOPED_ID, block_hash(number), slot * SLOT_BYTES, sequence, stored_bytes, None)

    @staticmethod
    def offset(slot: int) -> int:
        return SEGMENT_HEADER_BYTES + slot * SLOT_BYTES

    def flip(self, at: int, *, segment: int = 0) -> None:
        with (self.path / "segments" / f"{segment:08}.seg").open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    def _write(self, device: FileDevice, offset: int, content: bytes) -> None:
        buffer = aligned_buffer(padded(len(content)))
        buffer[: len(content)] = content
        device.write(0, offset, [buffer])
        device.sync([0])


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "tier")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `kvstore nvme` with --json: its exit code, and the object or what stderr says."""

    def run(command: str, path: Path) -> tuple[int, Any]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["nvme", command, "--path", str(path), "--json"])
        shown = capsys.readouterr()
        return int(ended.value.code or 0), json.loads(shown.out) if shown.out else shown.err

    return run


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[str, Path], str]:
    def show(command: str, path: Path) -> str:
        with pytest.raises(SystemExit):
            cli.main(["nvme", command, "--path", str(path)])
        return capsys.readouterr().out

    return show


def test_every_command_teaches_with_examples_and_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["status"], ["verify"], ["rebuild"]):
        with pytest.raises(SystemExit):
            cli.main(["nvme", *command, "--help"])
        shown = capsys.readouterr().out
        assert "Example" in shown
        assert "kvstore nvme" in shown
        assert not command or "Fields of --json" in shown


# --- status


def test_status_tells_whose_the_segments_are_and_what_they_take(folder: Folder, run: Run) -> None:
    code, figures = run("status", folder.path)
    assert code == 0
    du = subprocess.run(["du", "-s", "-B1", folder.path], capture_output=True, text=True, check=True).stdout
    assert figures["disk_bytes"] == int(du.split()[0])
    assert 0 < figures["index_bytes"] < figures["disk_bytes"]
    assert figures["filesystem_free_bytes"] < figures["filesystem_bytes"]
    del figures["disk_bytes"], figures["index_bytes"], figures["filesystem_bytes"], figures["filesystem_free_bytes"]
    assert figures == {
        "path": str(folder.path),
        "owner": None,
        "store_id": STORE_ID.hex(),
        "segment_bytes": SEGMENT_BYTES,
        "segment_count": 2,
        "free_segment_count": 1,
        "damaged_segment_count": 0,
        "namespaces": [
            {
                "tenant": "",
                "namespace_id": MIDDLE.id.hex(),
                "segment_count": 1,
                "slot_count": SLOTS,
                "slot_bytes": SLOT_BYTES,
            }
        ],
    }


def test_status_works_while_the_folder_is_owned_and_after(folder: Folder, run: Run) -> None:
    ownership = Ownership.take(folder.path, epoch_hex="ab" * 16)
    owner = run("status", folder.path)[1]["owner"]
    assert (owner["pid"], owner["epoch"], owner["is_running"]) == (os.getpid(), "ab" * 16, True)
    ownership.release()
    owner = run("status", folder.path)[1]["owner"]
    assert (owner["pid"], owner["is_running"]) == (os.getpid(), False)


def test_status_changes_nothing(folder: Folder, run: Run) -> None:
    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.path.rglob("*")}

    before = state()
    run("status", folder.path)
    assert state() == before


def test_status_counts_segments_whose_header_does_not_verify(folder: Folder, run: Run) -> None:
    folder.flip(100)
    figures = run("status", folder.path)[1]
    assert (figures["segment_count"], figures["damaged_segment_count"], figures["namespaces"]) == (2, 1, [])


def test_people_see_the_same(folder: Folder, show: Callable[[str, Path], str]) -> None:
    shown = show("status", folder.path)
    assert f"{MIDDLE.id.hex()[:16]}: 1 segments, {SLOTS} slots of" in shown
    assert "2 of " in shown
    assert "1 free, 0 damaged" in shown
    assert "verifies: 3 blocks" in show("verify", folder.path)
    assert "has a new index: 3 blocks" in show("rebuild", folder.path)


@pytest.mark.parametrize("command", ["status", "verify", "rebuild"])
def test_a_folder_that_is_none_of_the_tier_is_refused_and_left_as_it_was(
    command: str, tmp_path: Path, run: Run
) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        code, error = run(command, path)
        assert code == 2
        assert f"--path is '{path}'; allowed: a folder of the NVMe tier" in error
    assert list(tmp_path.iterdir()) == []


# --- verify


def test_verify_finds_sound_blocks_sound(folder: Folder, run: Run) -> None:
    code, figures = run("verify", folder.path)
    assert code == 0
    del figures["disk_bytes"], figures["elapsed_s"]
    assert figures == {
        "path": str(folder.path),
        "is_sound": True,
        "index": "ok",
        "block_count": 3,
        "damaged_count": 0,
        "superseded_count": 0,
        "unindexed_count": 0,
        "unchecked_count": 0,
        "segment_count": 2,
        "damaged_segment_count": 0,
        "damaged_slot_count": 0,
        "unreadable_slot_count": 0,
        "cut_off_slot_count": 0,
        "findings": [],
    }


@pytest.mark.parametrize("at", [8, DISK_HEADER_BYTES + 50, DISK_HEADER_BYTES + ENVELOPE_BYTES, BLOCK_BYTES])
def test_a_flipped_bit_of_a_block_is_found_wherever_it_is(folder: Folder, run: Run, at: int) -> None:
    folder.flip(folder.offset(1) + at)
    code, figures = run("verify", folder.path)
    assert code == 1
    assert (figures["is_sound"], figures["block_count"], figures["damaged_count"]) == (False, 2, 1)
    (finding,) = figures["findings"]
    assert (finding["segment"], finding["slot"], finding["block_hash"]) == (0, 1, block_hash(1).hex())
    assert finding["reason"]


def test_a_damaged_segment_costs_all_its_blocks(folder: Folder, run: Run) -> None:
    folder.flip(100)
    code, figures = run("verify", folder.path)
    assert code == 1
    assert (figures["block_count"], figures["damaged_count"], figures["damaged_segment_count"]) == (0, 3, 1)
    assert {finding["reason"] for finding in figures["findings"]} == {"segment header: checksum does not match"}


def test_a_segment_that_was_cut_off_is_found(folder: Folder, run: Run) -> None:
    os.truncate(folder.path / "segments" / "00000000.seg", folder.offset(2))
    code, figures = run("verify", folder.path)
    assert code == 1
    assert (figures["block_count"], figures["damaged_count"], figures["cut_off_slot_count"]) == (2, 1, SLOTS - 2)


def test_what_a_crash_left_behind_is_no_damage(folder: Folder, run: Run) -> None:
    folder.put(7, slot=1, sequence=9)  # in the place of block 1, which was evicted; the index was not told yet
    folder.put(8, slot=2, sequence=10)  # the same, and torn
    folder.flip(folder.offset(2) + BLOCK_BYTES)
    folder.put(9, slot=3, sequence=11)  # written, and torn, in a slot that was free
    folder.flip(folder.offset(3) + BLOCK_BYTES)
    code, figures = run("verify", folder.path)
    assert code == 0, figures
    assert (figures["block_count"], figures["superseded_count"], figures["unindexed_count"]) == (1, 2, 1)
    assert figures["damaged_slot_count"] == 2


def test_a_lost_index_is_found(folder: Folder, run: Run) -> None:
    (folder.path / "index" / "data.mdb").unlink()
    code, figures = run("verify", folder.path)
    assert (code, figures["index"], figures["block_count"]) == (1, "missing", 3)
    assert not (folder.path / "index" / "data.mdb").exists()


def test_a_damaged_index_is_found(folder: Folder, run: Run) -> None:
    data = folder.path / "index" / "data.mdb"
    data.write_bytes(b"\xff" * data.stat().st_size)
    code, figures = run("verify", folder.path)
    assert (code, figures["index"], figures["block_count"]) == (1, "damaged", 3)


def test_a_folder_that_was_made_only_is_sound(tmp_path: Path, run: Run) -> None:
    FileDevice(tmp_path).close()
    code, figures = run("verify", tmp_path)
    assert (code, figures["is_sound"], figures["segment_count"]) == (0, True, 0)


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_compressed_blocks_are_checked_whatever_their_elements_are(
    folder: Folder, run: Run, element_bytes: int
) -> None:
    index = Index(folder.path / "index", map_bytes=16 << 20)
    compressible = folder.put(3, slot=3, sequence=9, element_bytes=element_bytes)
    index.apply([compressible], ())
    index.close()
    assert run("verify", folder.path)[1]["block_count"] == 4
    folder.flip(folder.offset(3) + DISK_HEADER_BYTES + compressible.stored_bytes - 1)
    code, figures = run("verify", folder.path)
    assert (code, figures["damaged_count"], figures["unchecked_count"]) == (1, 1, 0)


@pytest.mark.parametrize("command", ["verify", "rebuild"])
def test_a_folder_that_somebody_owns_is_refused_with_the_owners_pid(command: str, folder: Folder, run: Run) -> None:
    with Ownership.take(folder.path, epoch_hex="ab" * 16):
        code, error = run(command, folder.path)
    assert code == 1
    assert f"is owned by process {os.getpid()}" in error
    assert run("verify", folder.path)[1]["block_count"] == 3


# --- rebuild


def test_rebuild_finds_all_blocks_without_the_index(folder: Folder, run: Run) -> None:
    before = Index(folder.path / "index", map_bytes=16 << 20)
    records = before.records()
    before.close()
    (folder.path / "index" / "data.mdb").write_bytes(b"\xff" * 8192)
    code, figures = run("rebuild", folder.path)
    assert (code, figures["block_count"], figures["left_out_count"]) == (0, 3, 0)
    assert figures["store_id"] == STORE_ID.hex()
    after = Index(folder.path / "index", map_bytes=16 << 20)
    assert (after.store_id, after.records()) == (STORE_ID, records)
    after.close()
    assert run("verify", folder.path)[0] == 0


def test_rebuild_leaves_out_what_does_not_verify_and_says_so(folder: Folder, run: Run) -> None:
    folder.flip(folder.offset(1) + DISK_HEADER_BYTES + 50)
    code, figures = run("rebuild", folder.path)
    assert (code, figures["block_count"], figures["damaged_slot_count"]) == (0, 2, 1)
    assert [(one["segment"], one["slot"]) for one in figures["findings"]] == [(0, 1)]


def test_rebuild_deletes_no_index_where_there_are_no_segments(folder: Folder, run: Run) -> None:
    for path in (folder.path / "segments").iterdir():
        path.unlink()
    code, error = run("rebuild", folder.path)
    assert code == 2
    assert "allowed: a folder with segments" in error
    index = Index(folder.path / "index", map_bytes=16 << 20)
    assert index.count == 3
    index.close()
