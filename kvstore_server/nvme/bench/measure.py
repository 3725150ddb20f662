"""`kvstore bench nvme`: from memory to the disk and back, beside plain transfers of the same size."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from kvstore.envelope import ENVELOPE_BYTES
from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore_client.bench import blocks
from kvstore_client.bench.figures import gb_per_s, median, percentile, rounded
from kvstore_client.bench.plan import Progress
from kvstore_client.sizes import format_size
from kvstore_server.config import NvmeConfig
from kvstore_server.core.admission import Admission
from kvstore_server.core.space import Place, SlabId
from kvstore_server.nvme.bench.plain_disk import PlainDisk, make_files
from kvstore_server.nvme.bench.recovery_times import recovery_times_s
from kvstore_server.nvme.bench.subject import TierSubject, open_subject
from kvstore_server.nvme.format import SEGMENT_HEADER_BYTES, padded
from kvstore_server.nvme.opening import NvmeSettings
from kvstore_server.nvme.recovery import Geometry
from kvstore_server.shm.arenas import Arenas
from kvstore_server.shm.memory import find_candidates

RECORD_COUNT = 100_000
_RECOVERY_ROUNDS = 3
_LARGER = 4
"""How much larger the blocks of the second recovery are."""
_BATCHES_PER_SAMPLE = 8
"""Enough that what is asked for is a speed, and not how long the last batch takes to become durable."""
_FULL_SHARE = 0.9
_FREE_SHARE = 0.25
"""Of what is free on the file system, at most, for our files; the limit's are as large again."""
_LOAD_TIMEOUT_S = 60.0
_BATCH_REPEATS = 4
_BLOCK_REPEATS = 8
# Of the whole work, by what each took where it was written.
_PREPARED_AT, _FRESH_AT, _CHURNED_AT, _AGED_AT, _CHECKED_AT = 0.15, 0.4, 0.6, 0.9, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    config: NvmeConfig
    block_count: int
    """Blocks in a batch."""
    block_bytes: int
    slot_count: int
    """Blocks that the tier has room for."""
    round_count: int

    @property
    def sample_count(self) -> int:
        """Blocks in one sample of speed."""
        return _BATCHES_PER_SAMPLE * self.block_count

    @property
    def full_count(self) -> int:
        return int(_FULL_SHARE * self.slot_count)

    @property
    def fresh_round_count(self) -> int:
        """Rounds until the tier is full."""
        return min(self.round_count, self.full_count // self.sample_count)


@dataclass(slots=True)
class _Samples:
    """Seconds of each sample, by what was done."""

    ours: dict[str, list[float]] = field(default_factory=dict)
    disk: dict[str, list[float]] = field(default_factory=dict)

    async def take(
        self, name: str, *, ours: Callable[[int], Awaitable[float]], disk: Callable[[int], float], block_count: int
    ) -> None:
        """One of each; who is first takes turns."""
        our_times_s, disk_times_s = self.ours.setdefault(name, []), self.disk.setdefault(name, [])
        is_ours_first = len(our_times_s) % 2 == 0
        if is_ours_first:
            our_times_s.append(await ours(block_count))
        disk_times_s.append(disk(block_count))
        if not is_ours_first:
            our_times_s.append(await ours(block_count))

    def ratio(self, name: str) -> float:
        """Our speed over that of the disk."""
        return median(self.disk[name]) / median(self.ours[name])


def measure(
    *,
    folder: Path,
    capacity_bytes: int,
    block_count: int,
    block_bytes: int,
    round_count: int,
    progress: Progress,
    record_count: int = RECORD_COUNT,
) -> dict[str, object]:
    """Uses a temporary folder in `folder`, and as much of its disk as `capacity_bytes` twice."""
    if not folder.is_dir():
        raise InvalidArgumentError.of("--path", str(folder), "an existing folder, on the disk that is to be measured")
    try:
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-nvme-", dir=folder) as name:
            scratch = Path(name)
            plan = _plan(
                scratch,
                capacity_bytes=capacity_bytes,
                block_count=block_count,
                block_bytes=block_bytes,
                round_count=round_count,
            )
            figures = _measure_speeds(plan, scratch, progress=progress)
            recovery_s = {}
            for number, larger in enumerate((1, _LARGER)):
                place = scratch / f"recovery{number}"
                recovery_s[larger] = median(
                    recovery_times_s(
                        place,
                        geometry_of=lambda size_bytes: _geometry(_config(scratch, capacity_bytes=size_bytes)),
                        block_bytes=larger * block_bytes,
                        record_count=record_count,
                        round_count=_RECOVERY_ROUNDS,
                    )
                )
                shutil.rmtree(place)
                progress(_CHECKED_AT + (number + 1) / 2 * (1 - _CHECKED_AT))
    except OSError as error:
        raise UnavailableError(f"--path {folder} cannot be measured: {error}") from error
    return figures | {
        "recovery_s": rounded(recovery_s[1]),
        "recovery_large_s": rounded(recovery_s[_LARGER]),
        "recovery_block_count": record_count,
    }


def _plan(scratch: Path, *, capacity_bytes: int, block_count: int, block_bytes: int, round_count: int) -> _Plan:
    filesystem = os.statvfs(scratch)
    free_bytes = filesystem.f_bavail * filesystem.f_frsize
    used_bytes = min(capacity_bytes, int(free_bytes * _FREE_SHARE))
    try:
        config = _config(scratch / "tier", capacity_bytes=used_bytes, demote_batch=block_count)
        slots_per_segment = (config.segment_bytes - SEGMENT_HEADER_BYTES) // blocks.slot_bytes(block_bytes)
        slot_count = config.segment_count * slots_per_segment
    except ValueError:  # of a configuration that cannot be
        slot_count = 0
    plan_count = _BATCHES_PER_SAMPLE * block_count
    if int(_FULL_SHARE * slot_count) < plan_count:
        needed_bytes = int(plan_count * blocks.slot_bytes(block_bytes) / _FULL_SHARE)
        raise InvalidArgumentError.of(
            "--capacity",
            f"{capacity_bytes} bytes, of which {used_bytes} may be used with {free_bytes} free",
            f"room for {plan_count} blocks, {format_size(needed_bytes)}, beside an index of 16MiB or more, "
            "in at least two segments",
        )
    return _Plan(
        config=config, block_count=block_count, block_bytes=block_bytes, slot_count=slot_count, round_count=round_count
    )


def _config(folder: Path, *, capacity_bytes: int, **others: int) -> NvmeConfig:
    """As a daemon has it by default."""
    return NvmeConfig.model_validate({"path": folder, "capacity": capacity_bytes, **others})


def _geometry(config: NvmeConfig) -> Geometry:
    return Geometry(
        segment_bytes=config.segment_bytes,
        is_segment_bytes_given=False,
        room_bytes=config.segment_count * config.segment_bytes,
        index_map_bytes=config.index_map_bytes,
    )


def _settings(config: NvmeConfig) -> NvmeSettings:
    assert config.path is not None, "the folder is ours"
    return NvmeSettings(
        folder=config.path,
        capacity_bytes=int(config.capacity or 0),
        geometry=_geometry(config),
        free_reserve_bytes=lambda _: 0,
        admission=Admission(policy="all", write_budget_bytes_per_day=None),
        policy="phix",
        batch_count=config.demote_batch,
        io_threads=config.io_threads,
        is_synced=config.sync == "data",
        load_timeout_s=_LOAD_TIMEOUT_S,
        prefetch_bytes_max=0,
        codecs=(),
        forced_codec=None,
    )


def _measure_speeds(plan: _Plan, scratch: Path, *, progress: Progress) -> dict[str, object]:
    slab_bytes = blocks.slab_bytes(plan.block_bytes)
    slot_bytes = blocks.slot_bytes(plan.block_bytes)
    slab_count = -(-plan.sample_count * slot_bytes // slab_bytes)
    arenas = Arenas(
        sources=find_candidates(pages=None, huge_mount=None, must_be_sealed=False).sources,
        arena_count=1,
        arena_bytes=slab_count * slab_bytes,
        slab_bytes=slab_bytes,
    )
    with ExitStack() as stack:
        stack.callback(arenas.close)
        for slab in range(slab_count):
            arenas.prefault(SlabId(slab))
        # The limit moves its bytes from and to the very same memory, in which nothing is meanwhile.
        memory = [
            arenas.slot(Place(number * slot_bytes), padded(plan.block_bytes)) for number in range(plan.sample_count)
        ]
        for number, piece in enumerate(memory):
            piece[:] = _noise(len(piece), seed=number)
        sizes = {"file_count": plan.config.segment_count, "file_bytes": plan.config.segment_bytes}
        progress(0.0)
        make_files(scratch / "tier", **sizes, source=memory[0])
        progress(_PREPARED_AT / 2)
        files, is_direct = make_files(scratch / "disk", **sizes, source=memory[0])
        progress(_PREPARED_AT)
        disk = stack.enter_context(
            PlainDisk(
                files,
                memory=memory,
                batch_count=plan.block_count,
                thread_count=plan.config.io_threads,
                is_direct=is_direct,
            )
        )
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        figures = runner.run(_run(plan, arenas, disk, slab_count=slab_count, slab_bytes=slab_bytes, progress=progress))
        return figures | {"is_direct": is_direct, "page_bytes": arenas.page_bytes}


async def _run(
    plan: _Plan, arenas: Arenas, disk: PlainDisk, *, slab_count: int, slab_bytes: int, progress: Progress
) -> dict[str, object]:
    fresh, aged = _Samples(), _Samples()
    async with open_subject(
        _settings(plan.config),
        arenas=arenas,
        slab_count=slab_count,
        slab_bytes=slab_bytes,
        block_bytes=plan.block_bytes,
    ) as ours:
        for number in range(plan.fresh_round_count):
            await _take_speeds(fresh, ours, disk, block_count=plan.sample_count)
            progress(_between(_PREPARED_AT, _FRESH_AT, (number + 1) / plan.fresh_round_count))
        written_bytes = await _churn(
            plan, ours, progress=lambda share: progress(_between(_FRESH_AT, _CHURNED_AT, share))
        )
        for number in range(plan.round_count):
            await _take_speeds(aged, ours, disk, block_count=plan.sample_count)
            for name, repeat_count, block_count in (
                ("batch", _BATCH_REPEATS, plan.block_count),
                ("block", _BLOCK_REPEATS, 1),
            ):
                for _ in range(repeat_count):
                    await aged.take(f"read_{name}", ours=ours.read, disk=disk.read, block_count=block_count)
            for _ in range(_BATCH_REPEATS):
                await aged.take("write_batch", ours=ours.write, disk=disk.write, block_count=plan.block_count)
            progress(_between(_CHURNED_AT, _AGED_AT, (number + 1) / plan.round_count))
        await ours.read_all(
            block_count=plan.sample_count, progress=lambda share: progress(_between(_AGED_AT, _CHECKED_AT, share))
        )
        found = ours.figures()
    if found.corrupt_count or found.undemoted_count:
        raise UnavailableError(f"{found.corrupt_count} blocks did not verify, {found.undemoted_count} were not written")
    return {
        **_speeds(plan, fresh, aged),
        **_latencies(aged),
        "write_amplification": rounded(found.write_amplification),
        "write_amplification_with_index": None if written_bytes is None else rounded(written_bytes),
        "capacity_bytes": found.capacity_bytes,
        "segment_count": found.segment_count,
        "evicted_count": found.evicted_count,
        "fresh_rounds": plan.fresh_round_count,
    }


async def _take_speeds(samples: _Samples, ours: TierSubject, disk: PlainDisk, *, block_count: int) -> None:
    await samples.take("write", ours=ours.write, disk=disk.write, block_count=block_count)
    await samples.take("read", ours=ours.read, disk=disk.read, block_count=block_count)


async def _churn(plan: _Plan, ours: TierSubject, *, progress: Progress) -> float | None:
    """Fills the tier, uses its chains in a random order, and replaces all of it, which evicts in that order.

    Returns the bytes that this process gave to the device for each byte of a block meanwhile, those of the index
    included; None where nobody counts them.
    """
    missing_count = plan.full_count - plan.fresh_round_count * plan.sample_count
    before_bytes, written_count = _device_written_bytes(), 0
    for start in range(0, missing_count, plan.sample_count):
        written_count += await _write_some(ours, min(plan.sample_count, missing_count - start))
    await ours.read_all(block_count=plan.sample_count, progress=lambda share: progress(share / 3))
    for start in range(0, plan.slot_count, plan.sample_count):
        written_count += await _write_some(ours, min(plan.sample_count, plan.slot_count - start))
        progress(1 / 3 + 2 / 3 * start / plan.slot_count)
    after_bytes = _device_written_bytes()
    if before_bytes is None or after_bytes is None or after_bytes == before_bytes:
        return None
    return (after_bytes - before_bytes) / (written_count * (ENVELOPE_BYTES + plan.block_bytes))


async def _write_some(ours: TierSubject, block_count: int) -> int:
    await ours.write(block_count)
    return block_count


def _device_written_bytes() -> int | None:
    """By this process to devices, since its start."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes:")), None)


def _speeds(plan: _Plan, fresh: _Samples, aged: _Samples) -> dict[str, float]:
    sample_bytes = plan.sample_count * plan.block_bytes
    figures = {
        "write_vs_disk": fresh.ratio("write"),
        "read_vs_disk": fresh.ratio("read"),
        "churn_vs_fresh": aged.ratio("write") / fresh.ratio("write"),
        "read_churn_vs_fresh": aged.ratio("read") / fresh.ratio("read"),
        "write_churned_vs_disk": aged.ratio("write"),
        "read_churned_vs_disk": aged.ratio("read"),
    }
    for action in ("write", "read"):
        figures |= {
            f"{action}_gb_per_s": gb_per_s(sample_bytes, fresh.ours[action]),
            f"disk_{action}_gb_per_s": gb_per_s(sample_bytes, fresh.disk[action]),
            f"{action}_churned_gb_per_s": gb_per_s(sample_bytes, aged.ours[action]),
            f"disk_{action}_churned_gb_per_s": gb_per_s(sample_bytes, aged.disk[action]),
        }
    return {name: rounded(value) for name, value in figures.items()}


def _latencies(aged: _Samples) -> dict[str, float]:
    figures = {}
    for prefix, times_s in (("", aged.ours), ("disk_", aged.disk)):
        for name, sample, percent in (
            ("write_p50_ms", "write_batch", 50),
            ("write_p99_ms", "write_batch", 99),
            ("read_p50_ms", "read_batch", 50),
            ("read_p99_ms", "read_batch", 99),
            ("read_block_p50_ms", "read_block", 50),
            ("read_block_p99_ms", "read_block", 99),
        ):
            figures[prefix + name] = rounded(percentile(times_s[sample], percent) * 1e3)
    return figures


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * min(share, 1.0)


def _noise(size_bytes: int, *, seed: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)
