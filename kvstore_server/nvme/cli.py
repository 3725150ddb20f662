"""`kvstore nvme`: what a folder of the NVMe tier holds, whether it verifies, and a new index for it."""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from kvstore.envelope import Buffer, Envelope, checksum
from kvstore.errors import CorruptBlockError, InvalidArgumentError, UnavailableError
from kvstore.keys import BlockHash
from kvstore_client.sizes import format_size
from kvstore_server.core.tenants import ScopedId, namespace_of, tenant_of
from kvstore_server.nvme.compression import decompress_into
from kvstore_server.nvme.device import FileDevice, aligned_buffer
from kvstore_server.nvme.format import (
    PAGE_BYTES,
    SEGMENT_HEADER_BYTES,
    DiskHeader,
    SegmentHeader,
    segment_offset,
)
from kvstore_server.nvme.index import (
    Index,
    IndexDamagedError,
    IndexFullError,
    IndexRecord,
    remove_index,
)
from kvstore_server.nvme.ownership import Owner, Ownership, read_owner
from kvstore_server.nvme.rebuild import Scan, scan
from kvstore_server.nvme.recovery import INDEX_FOLDER

EXIT_DAMAGED = 1
FINDINGS_MAX = 1000
"""How many findings are listed; counts have them all."""
_FINDINGS_SHOWN = 20
_INDEX_BYTES_MIN = 16 << 20
_ELEMENT_BYTES = (2, 1, 4)
"""Widths that a compressed plane's elements can have, likeliest first: the disk does not say, the checksum does."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def nvme() -> None:
    """Look into a folder of the NVMe tier, check it, or make its index anew.

    \b
    Examples:
      kvstore nvme status --path /var/cache/kvstore
      kvstore nvme verify --path /var/cache/kvstore --json | jq .findings
      kvstore nvme rebuild --path /var/cache/kvstore

    \b
    status works beside a running daemon; verify and rebuild need it stopped.
    The folder is what nvme.path, --nvme-path or $KVSTORE_NVME__PATH is for
    `kvstore serve`.
    """


def _folder_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--json", "is_json", is_flag=True, help="Print one JSON object, for scripts."),
        click.option("--path", "folder", type=click.Path(path_type=Path), required=True, metavar="DIR",
                     envvar="KVSTORE_NVME__PATH", show_envvar=True, help="The folder of the tier."),
    ):  # fmt: skip
        command = option(command)
    return command


@nvme.command(short_help="Show who owns the folder and what is in it.")
@_folder_options
def status(folder: Path, *, is_json: bool) -> None:
    """Show who owns the folder, what it takes on disk, and whose its segments are.

    Changes nothing, and works beside a running daemon, whose figures are in
    its /metrics.

    \b
    Fields of --json:
      path                  as given
      owner                 pid, host, epoch, started and is_running of the
                            daemon that has the folder, or had it last; null
      store_id              of the segments, in hex; null without any
      disk_bytes            of the whole folder
      index_bytes           of it, the index
      segment_bytes         of one segment; null without any
      segment_count         all of them; of these
      free_segment_count    hold nothing, and
      damaged_segment_count have a header that does not verify
      namespaces            tenant, namespace_id, segment_count, slot_count and
                            slot_bytes of each that has segments
      filesystem_bytes, filesystem_free_bytes

    \b
    Example:
      kvstore nvme status --path /var/cache/kvstore --json | jq .disk_bytes
    """
    figures = _status(folder)
    if is_json:
        click.echo(json.dumps(figures))
        return
    owner, namespaces = figures["owner"], figures["namespaces"]
    who = "nobody, ever"
    if owner is not None:
        who = f"process {owner['pid']} on {owner['host']}, since {owner['started']}"
        who = who if owner["is_running"] else f"nobody now; last {who}"
    of_filesystem = f"{format_size(figures['filesystem_free_bytes'])} of {format_size(figures['filesystem_bytes'])}"
    segments = (
        f"{figures['segment_count']:,} of {format_size(figures['segment_bytes'] or 0)}: "
        f"{figures['free_segment_count']:,} free, {figures['damaged_segment_count']:,} damaged"
    )
    rows = [
        ("owner", who),
        ("disk", f"{format_size(figures['disk_bytes'])}, {format_size(figures['index_bytes'])} of it index"),
        ("segments", segments),
        ("free", f"{of_filesystem} on the file system"),
    ]
    rows += [("namespace", _namespace_line(one)) for one in namespaces]
    click.echo("\n".join(f"{name:<10} {value}" for name, value in rows))


@nvme.command(short_help="Read every block and check it.")
@_folder_options
def verify(folder: Path, *, is_json: bool) -> None:
    """Read every block and check it against its checksum; changes no block.

    Needs the daemon stopped. Exits with 1 when something is damaged, 0 when
    not. A damaged block needs no repair: it is a miss when it is asked for.

    \b
    Fields of --json:
      path                   as given
      is_sound               whether nothing is damaged
      index                  ok, missing or damaged; if not ok, `kvstore nvme
                             rebuild` makes a new one
      block_count            blocks that can be found, and verify
      damaged_count          blocks that the index names and that do not; without
                             an index, slots that do not verify
      superseded_count       records of the index whose slot was written to
                             anew when a crash came; no damage
      unindexed_count        sound blocks that the index does not name: evicted,
                             or written just before a crash; no damage
      unchecked_count        blocks whose payload could not be checked
      damaged_slot_count     all slots that do not verify, those included that a
                             crash tore before the index named them
      unreadable_slot_count  slots that the device failed to read
      cut_off_slot_count     slots behind the end of a segment that is too short
      segment_count, damaged_segment_count
      disk_bytes, elapsed_s
      findings               segment, slot (null: all of it), block_hash (null:
                             none in particular) and reason, for up to 1000

    \b
    Examples:
      kvstore nvme verify --path /var/cache/kvstore
      kvstore nvme verify --path /var/cache/kvstore --json | jq .damaged_count
    """
    figures = _verify(folder)
    if is_json:
        click.echo(json.dumps(figures))
    else:
        _show_scan(figures, "verifies" if figures["is_sound"] else "is damaged")
        if figures["index"] != "ok":
            click.echo(f"index      {figures['index']}: make a new one with `kvstore nvme rebuild --path {folder}`")
    if not figures["is_sound"]:
        click.get_current_context().exit(EXIT_DAMAGED)


@nvme.command(short_help="Make a new index from the segments.")
@_folder_options
def rebuild(folder: Path, *, is_json: bool) -> None:
    """Make a new index from the segments; the old one is deleted.

    Needs the daemon stopped. Reads one page of each slot. For an index that
    was lost: a daemon that finds its own damaged does this by itself. Blocks
    that were evicted and not overwritten yet are back, too.

    \b
    Fields of --json:
      path                   as given
      block_count            blocks in the new index
      left_out_count         blocks that the index had no room for
      damaged_slot_count, unreadable_slot_count, cut_off_slot_count,
      segment_count, damaged_segment_count, disk_bytes, elapsed_s, findings
                             as for verify
      index_bytes            of the new index
      store_id               whose segments they are, in hex

    \b
    Example:
      kvstore nvme rebuild --path /var/cache/kvstore --json | jq .block_count
    """
    figures = _rebuild(folder)
    if is_json:
        click.echo(json.dumps(figures))
        return
    _show_scan(figures, "has a new index")
    if figures["left_out_count"]:
        click.echo(f"left out   {figures['left_out_count']:,} blocks, the oldest: the index has no room for more")


def _namespace_line(one: dict[str, Any]) -> str:
    whose = f"{one['namespace_id'][:16]}" + (f" of {one['tenant']}" if one["tenant"] else "")
    slots = f"{one['slot_count']:,} slots of {format_size(one['slot_bytes'])}"
    return f"{whose}: {one['segment_count']:,} segments, {slots}"


class _Survey(NamedTuple):
    """What the first page of each segment says."""

    headers: dict[int, SegmentHeader | None]
    """None: it does not verify."""
    segment_bytes: int
    """What most segments have; 0: there are none."""

    @property
    def slab_bytes(self) -> int:
        return max(self.segment_bytes - SEGMENT_HEADER_BYTES, PAGE_BYTES)


def _status(folder: Path) -> dict[str, Any]:
    with _explained(folder):
        _check_folder(folder)
        survey = _survey(folder)
        owner = read_owner(folder)
        filesystem = os.statvfs(folder)
        disk_bytes, index_bytes = _disk_bytes(folder), _disk_bytes(folder / INDEX_FOLDER)
    headers = [header for header in survey.headers.values() if header is not None]
    stores = Counter(header.store_id for header in headers if header.scoped_id)
    return {
        "path": str(folder),
        "owner": None if owner is None else _owner_fields(owner),
        "store_id": stores.most_common(1)[0][0].hex() if stores else None,
        "disk_bytes": disk_bytes,
        "index_bytes": index_bytes,
        "segment_bytes": survey.segment_bytes or None,
        "segment_count": len(survey.headers),
        "free_segment_count": sum(not header.scoped_id for header in headers),
        "damaged_segment_count": sum(header is None for header in survey.headers.values()),
        "namespaces": _namespaces([header for header in headers if header.scoped_id]),
        "filesystem_bytes": filesystem.f_blocks * filesystem.f_frsize,
        "filesystem_free_bytes": filesystem.f_bavail * filesystem.f_frsize,
    }


def _owner_fields(owner: Owner) -> dict[str, object]:
    return {
        "pid": owner.pid,
        "host": owner.host,
        "epoch": owner.epoch_hex,
        "started": owner.started,
        "is_running": owner.is_running,
    }


def _namespaces(headers: list[SegmentHeader]) -> list[dict[str, object]]:
    counts = Counter((header.scoped_id, header.slot_bytes, header.segment_bytes) for header in headers)
    return [
        {
            "tenant": tenant_of(ScopedId(scoped_id)),
            "namespace_id": namespace_of(ScopedId(scoped_id)).hex(),
            "segment_count": count,
            "slot_count": count * ((segment_bytes - SEGMENT_HEADER_BYTES) // slot_bytes),
            "slot_bytes": slot_bytes,
        }
        for (scoped_id, slot_bytes, segment_bytes), count in sorted(counts.items())
    ]


class _Compared(NamedTuple):
    """What has become of the blocks that the index names."""

    sound_count: int
    superseded_count: int
    damaged: list[IndexRecord]


def _verify(folder: Path) -> dict[str, Any]:
    started_s = time.perf_counter()
    with _opened(folder) as (device, survey):
        index, store_id, records = _read_index(folder)
        found = _scan(device, survey, label="verify", store_id=store_id, is_deep=True)
        compared = _compare(records, found, device=device, survey=survey)
        disk_bytes = device.used_bytes()
    damaged_count = len(compared.damaged)
    if index != "ok":
        damaged_count = found.damaged_count + found.unreadable_count + found.cut_off_count
    is_indexed = index == "ok" or (index == "missing" and not found.block_count)
    is_whole = not (found.dropped_segment_count or found.unreadable_count or found.cut_off_count)
    return {
        "path": str(folder),
        "is_sound": is_indexed and is_whole and not damaged_count,
        "index": index,
        "block_count": compared.sound_count if index == "ok" else found.block_count,
        "damaged_count": damaged_count,
        "superseded_count": compared.superseded_count,
        "unindexed_count": found.block_count - compared.sound_count if index == "ok" else 0,
        "unchecked_count": found.unchecked_count,
        **_scan_fields(found),
        "disk_bytes": disk_bytes,
        "elapsed_s": round(time.perf_counter() - started_s, 3),
        "findings": _findings(found, compared.damaged, survey=survey, is_indexed=index == "ok"),
    }


def _compare(records: list[IndexRecord], found: Scan, *, device: FileDevice, survey: _Survey) -> _Compared:
    sequences = {(one.scoped_id, one.block_hash): one.sequence for one in found.records}
    sequence_at = {one.place: one.sequence for one in found.records}
    sound_count = superseded_count = 0
    damaged: list[IndexRecord] = []
    for record in records:
        sequence = sequences.get((record.scoped_id, record.block_hash), -1)
        if sequence == record.sequence:
            sound_count += 1
        elif max(sequence, sequence_at.get(record.place, -1)) > record.sequence:
            superseded_count += 1
        elif _sequence_claimed(device, record.place, survey) > record.sequence:
            superseded_count += 1  # a newer block that a crash tore
        else:
            damaged.append(record)
    return _Compared(sound_count, superseded_count, damaged)


def _sequence_claimed(device: FileDevice, place: int, survey: _Survey) -> int:
    """What the header of a slot says that it holds, whatever became of the rest; -1: nothing."""
    page = aligned_buffer(PAGE_BYTES)
    try:
        device.read(*segment_offset(place, slab_bytes=survey.slab_bytes), [page])
        return DiskHeader.decode(page).sequence
    except (CorruptBlockError, OSError):
        return -1


def _findings(found: Scan, damaged: list[IndexRecord], *, survey: _Survey, is_indexed: bool) -> list[dict[str, object]]:
    # Whole segments first, since their blocks would crowd them out.
    findings = [_finding(one.segment, one.slot, None, one.reason) for one in found.dropped if one.slot is None]
    if not is_indexed:
        findings += [_finding(one.segment, one.slot, None, one.reason) for one in found.dropped if one.slot is not None]
    reasons = {(one.segment, one.slot): one.reason for one in found.dropped}
    for record in damaged[:FINDINGS_MAX]:
        segment, slot = _where(record, survey)
        reason = reasons.get((segment, slot)) or reasons.get((segment, None)) or "the block is not there"
        findings.append(_finding(segment, slot, record.block_hash, reason))
    return findings[:FINDINGS_MAX]


def _rebuild(folder: Path) -> dict[str, Any]:
    started_s = time.perf_counter()
    with _opened(folder) as (device, survey):
        if not survey.headers:
            raise InvalidArgumentError.of("--path", str(folder), "a folder with segments: there are none to read")
        found = _scan(device, survey, label="rebuild", store_id=None, is_deep=False)
        remove_index(folder / INDEX_FOLDER)
        index = Index(
            folder / INDEX_FOLDER,
            # At most what the daemon allows it, a 256th of the capacity, of which segments are the other 255.
            map_bytes=max(_INDEX_BYTES_MIN, sum(device.segments().values()) // 255),
            new_store_id=found.store_id,
        )
        try:
            kept_count = _fill(index, found.records)
            index_bytes, store_id = index.size_bytes, index.store_id
        finally:
            index.close()
        disk_bytes = device.used_bytes()
    return {
        "path": str(folder),
        "block_count": kept_count,
        "left_out_count": found.block_count - kept_count,
        **_scan_fields(found),
        "disk_bytes": disk_bytes,
        "index_bytes": index_bytes,
        "store_id": store_id.hex(),
        "elapsed_s": round(time.perf_counter() - started_s, 3),
        "findings": [_finding(one.segment, one.slot, None, one.reason) for one in found.dropped[:FINDINGS_MAX]],
    }


def _fill(index: Index, records: list[IndexRecord]) -> int:
    """Puts as many as there is room for, in one transaction, the newest first; returns how many."""
    newest_first = sorted(records, key=lambda record: -record.sequence)
    while True:
        try:
            index.apply(newest_first, ())
        except IndexFullError:
            newest_first = newest_first[: len(newest_first) * 3 // 4]
        else:
            return len(newest_first)


def _scan_fields(found: Scan) -> dict[str, object]:
    return {
        "segment_count": found.segment_count,
        "damaged_segment_count": found.dropped_segment_count,
        "damaged_slot_count": found.damaged_count,
        "unreadable_slot_count": found.unreadable_count,
        "cut_off_slot_count": found.cut_off_count,
    }


def _finding(segment: int, slot: int | None, block_hash: BlockHash | None, reason: str) -> dict[str, object]:
    shown = None if block_hash is None else block_hash.hex()
    return {"segment": segment, "slot": slot, "block_hash": shown, "reason": reason}


def _where(record: IndexRecord, survey: _Survey) -> tuple[int, int | None]:
    """Segment and slot of a record; None: its segment does not say how long slots are."""
    segment, offset = divmod(record.place, survey.slab_bytes)
    header = survey.headers.get(segment)
    return segment, None if header is None or not header.slot_bytes else offset // header.slot_bytes


def _show_scan(figures: dict[str, Any], outcome: str) -> None:
    size = format_size(figures["disk_bytes"])
    click.echo(f"{figures['path']} {outcome}: {figures['block_count']:,} blocks, {size}, {figures['elapsed_s']:.1f} s")
    rows = [
        ("damaged", figures.get("damaged_count", 0), "blocks"),
        ("torn", figures["damaged_slot_count"], "slots do not verify, those of damaged blocks included"),
        ("unreadable", figures["unreadable_slot_count"], "slots: see the kernel's log and the device's SMART figures"),
        ("cut off", figures["cut_off_slot_count"], "slots of segments that are too short"),
        ("segments", figures["damaged_segment_count"], f"of {figures['segment_count']:,} are of no use"),
        ("unchecked", figures.get("unchecked_count", 0), "blocks whose payload could not be checked"),
    ]
    for name, count, text in rows:
        if count:
            click.echo(f"{name:<10} {count:,} {text}")
    findings = figures["findings"]
    for one in findings[:_FINDINGS_SHOWN]:
        slot = "" if one["slot"] is None else f" slot {one['slot']}"
        block = "" if one["block_hash"] is None else f" block {one['block_hash'][:16]}"
        click.echo(f"finding    segment {one['segment']}{slot}{block}: {one['reason']}")
    if len(findings) > _FINDINGS_SHOWN:
        click.echo(f"           and {len(findings) - _FINDINGS_SHOWN:,} more: see --json")


# --- the folder


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """What the disk refuses, as an error that says which folder."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(f"--path {folder} cannot be used: {error}") from error


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[FileDevice, _Survey]]:
    """The folder, for as long as nobody else may have it."""
    with _explained(folder):
        _check_folder(folder)
        with Ownership.take(folder, epoch_hex=secrets.token_hex(16)):
            device = FileDevice(folder)
            try:
                yield device, _survey(folder)
            finally:
                device.close()


def _check_folder(folder: Path) -> None:
    """Commands must not begin a tier in a folder that is none."""
    if not (folder / "segments").is_dir():
        raise InvalidArgumentError.of("--path", str(folder), "a folder of the NVMe tier, which has `segments` in it")


def _survey(folder: Path) -> _Survey:
    headers: dict[int, SegmentHeader | None] = {}
    sizes: Counter[int] = Counter()
    for path in sorted((folder / "segments").glob("*.seg")):
        if not path.stem.isdecimal():
            continue
        with path.open("rb", buffering=0) as file:
            page = file.read(PAGE_BYTES)
            file_bytes = os.fstat(file.fileno()).st_size
        index = int(path.stem)
        try:
            headers[index] = SegmentHeader.decode(page) if any(page) else _unused(index, file_bytes)
        except CorruptBlockError:
            headers[index] = None
        header = headers[index]
        sizes[file_bytes if header is None else header.segment_bytes] += 1
    return _Survey(headers, sizes.most_common(1)[0][0] if sizes else 0)


def _unused(index: int, file_bytes: int) -> SegmentHeader:
    """Of a segment that was made and not given to anybody yet."""
    return SegmentHeader(
        store_id=bytes(16), index=index, segment_bytes=file_bytes, slot_bytes=0, assignment=0, scoped_id=b""
    )


def _disk_bytes(path: Path) -> int:
    """What a file or folder takes on disk, as `du` has it; what goes meanwhile is not counted."""
    try:
        about = path.lstat()
        entries = list(path.iterdir()) if stat.S_ISDIR(about.st_mode) else []
    except FileNotFoundError:
        return 0
    return about.st_blocks * 512 + sum(map(_disk_bytes, entries))


def _read_index(folder: Path) -> tuple[str, bytes | None, list[IndexRecord]]:
    """Whether the index is ok, missing or damaged; whose it is; and its records."""
    data = folder / INDEX_FOLDER / "data.mdb"
    if not data.exists():
        return "missing", None, []
    try:
        index = Index(folder / INDEX_FOLDER, map_bytes=max(_INDEX_BYTES_MIN, data.stat().st_size))
        try:
            return "ok", index.store_id, index.records()
        finally:
            index.close()
    except IndexDamagedError:
        return "damaged", None, []


def _scan(device: FileDevice, survey: _Survey, *, label: str, store_id: bytes | None, is_deep: bool) -> Scan:
    with _progress(label) as on_progress:
        return scan(
            device,
            segment_bytes=survey.segment_bytes,
            store_id=store_id,
            is_deep=is_deep,
            decode=_decode,
            on_progress=on_progress,
        )


def _decode(header: DiskHeader, envelope: Envelope, stored: memoryview) -> Buffer:
    """The payload of a compressed block, by whichever width of elements makes it match its checksum."""
    payload = memoryview(bytearray(envelope.payload_bytes))
    for element_bytes in _ELEMENT_BYTES:
        decompress_into(stored, payload, codec=header.codec, element_bytes=element_bytes)
        if checksum(payload) == envelope.payload_checksum:
            return payload
    raise CorruptBlockError("payload checksum does not match")


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label=label, file=sys.stderr, width=40) as bar:

        def tell(done_bytes: int, total_bytes: int) -> None:
            bar.length = total_bytes
            bar.update(done_bytes - bar.pos)

        yield tell
