"""`kvstore simulate`."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.eviction import POLICIES, Watermarks
from kvstore_client.sizes import format_size, parse_size
from kvstore_server.plan.dtypes import element_bytes
from kvstore_server.plan.models import find_model
from kvstore_server.plan.shape import CacheShape
from kvstore_server.simulate import report
from kvstore_server.simulate.capacity import Capacity
from kvstore_server.simulate.plot import check_that_it_can_draw, draw
from kvstore_server.simulate.report import NEXT_BYTES, TierReplay
from kvstore_server.simulate.suite import (
    BASE_LINE,
    NO_BYPASS,
    About,
    Cell,
    Figures,
    Job,
    Look,
    Source,
    check_policies,
    judge,
    look_at,
    run_all,
    run_job,
)
from kvstore_server.simulate.tiers import COOL_DOWN_REQUESTS, Keep

_CAPACITIES = "1%,2%,5%,10%,20%"
"""Above 20 % all policies look alike."""
_TIERS = (("5%", "20%"), ("1%", "5%", "20%"))
"""Memory and NVMe; VRAM, memory and NVMe."""
_BLOCK_BYTES_MAX = 1 << 40
_TIER_NAMES = ("vram", "memory", "nvme")
_TRACE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")

_Command = Callable[..., None]
_OnDone = Callable[[object], None]
_Task = TypeVar("_Task")
_Outcome = TypeVar("_Outcome")


def reading_options(command: _Command) -> _Command:
    """What a trace may not say of itself."""
    for option in (
        click.option("--tokenizer", metavar="NAME_OR_PATH",
                     help="For request logs of text: a model's name or folder, or a tokenizer.json."),
        click.option("--block-tokens", type=click.IntRange(min=1), metavar="COUNT",
                     help="Tokens of a block, where the trace does not say.  [default: 512 for Mooncake's, else 16]"),
    ):  # fmt: skip
        command = option(command)
    return command


def say_ignored(name: str, ignored_fields: Mapping[str, int]) -> None:
    """Once for a trace, what of it was not understood."""
    text = report.ignored_text(ignored_fields)
    if text:
        click.echo(f"{name}: {text}", err=True)


def default_policies() -> tuple[str, ...]:
    """All of them; the first also without bypass."""
    return (POLICIES[0], f"{POLICIES[0]}{NO_BYPASS}", *POLICIES[1:]) if POLICIES[0] != BASE_LINE else POLICIES


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("traces", metavar="[TRACE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--suite", metavar="DIR", type=click.Path(path_type=Path), help="All traces of a folder.")
@click.option("--policy", "policies", metavar="LIST", help="Policies, the one to judge first.  [default: all]")
@click.option("--capacity", "capacities", metavar="LIST", help=f"Sizes of one tier.  [default: {_CAPACITIES}]")
@click.option("--vram", metavar="SIZE", help="Size of a VRAM tier, instead of --capacity.")
@click.option("--memory", metavar="SIZE", help="Size of a memory tier, likewise.")
@click.option("--nvme", metavar="SIZE", help="Size of an NVMe tier, likewise.")
@click.option("--tiers", "with_tiers", is_flag=True, help="Also two and three tiers of 1 %, 5 % and 20 %.")
@click.option("--keep", type=click.Choice([keep.value for keep in Keep]), default=Keep.RETAIN.value,
              show_default=True, help="What becomes of lower copies.")  # fmt: skip
@click.option("--watermarks", metavar="HIGH,LOW", help="Of a single tier, or all but the lowest, such as 0.95,0.9.")
@click.option("--cool-down", type=click.IntRange(min=1), default=COOL_DOWN_REQUESTS, show_default=True,
              metavar="REQUESTS", help="An evicted block that is back by then was evicted in vain.")  # fmt: skip
@click.option("--block-bytes", metavar="SIZE", help="What a block has, for sizes in bytes.")
@click.option("--model", metavar="NAME", help="The same by a model that `kvstore plan` knows.")
@reading_options
@click.option("--hint-accuracy", type=click.FloatRange(0, 1), metavar="SHARE",
              help="Clients tell whether they come back, and so many are right.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Which of them are right.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="COUNT", help="Processes.  [default: one per core]")
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Draw hit rate over capacity, as SVG, PNG or PDF.")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object, for scripts.")
def simulate(traces: tuple[Path, ...], *, suite: Path | None, plot: Path | None, is_json: bool, **given: Any) -> None:
    """Replay recorded requests through the store's own rules.

    Says what hit rate each policy has at each size of the store, beside LRU's,
    a clairvoyant policy's and that of a store without end. Needs no daemon.
    A TRACE is a file of kvtrace-1, of Mooncake's JSON lines or a request log
    with token_ids, text, prompt or messages; gzip or not.

    A size is a share of the trace's unique blocks (5%), a number of blocks, or
    bytes (64GiB) with --block-bytes or --model. The lowest tier may refuse
    blocks that are worth less than what it has, where its policy can tell;
    with :no-bypass behind the policy it takes them all.

    \b
    Fields of --json:
      traces         name, requests, unique_blocks, input_tokens, infinite,
                     ignored_fields with the lines that have them, and
                     cells: for each capacity clairvoyant and policies, each
                     with token_hit_rate_percent, written_blocks, gap_closed,
                     thrash_index, saved_prefill_tokens, accesses_per_s, tiers
      gap_closed     by policy: mean share of the way from LRU to the
                     clairvoyant bound, of cells where that is a point or more
      worst_vs_lru   by policy: points over LRU in the worst cell
      mean_vs_lru    by policy: points over LRU, mean of all cells
      writes_vs_lru  by policy: blocks written in all cells over LRU's
      tier_replays   with --tiers, --vram, --memory or --nvme: policy, keep,
                     tiers, thrash_index, writes_vs_exclusive,
                     points_lost_vs_exclusive
      accesses_per_s block accesses of all replays by their time

    \b
    Examples:
      kvstore simulate trace.jsonl.gz
      kvstore simulate log.jsonl --tokenizer ./model --capacity 1%,5% --policy lru
      kvstore simulate trace.jsonl.gz --memory 64GiB --nvme 1TiB --model llama-3-8b
      kvstore simulate --suite traces/ --json | jq .gap_closed
    """
    run = _Run(traces, suite, given)
    if plot is not None:
        if run.has_own_tiers:
            raise InvalidArgumentError.of("--plot", str(plot), "with --capacity, not with --vram, --memory or --nvme")
        check_that_it_can_draw()
    with _Progress(run.task_count) as on_done:
        abouts = run.look(on_done)
        for about in abouts:
            say_ignored(about.name, about.ignored_fields)
        cells = [] if run.has_own_tiers else run.cells(abouts, on_done)
        replays = run.tier_replays(abouts, on_done)
    if plot is not None:
        try:
            draw(cells, plot)
        except (OSError, ValueError) as error:
            raise UnavailableError(f"--plot {plot} cannot be written: {error}") from error
    verdicts = {policy: judge(cells, policy) for policy in run.policies} if cells and BASE_LINE in run.policies else {}
    if is_json:
        shown: dict[str, Any] = {"traces": report.cells_json(cells) or [report.about_json(one) for one in abouts]}
        shown |= report.verdicts_json(verdicts)
        shown |= {"tier_replays": report.tier_replays_json(replays), "accesses_per_s": run.accesses_per_s()}
        click.echo(json.dumps(shown))
        return
    lines = [*report.cells_lines(cells)]
    lines += report.verdict_lines(verdicts) if verdicts and len(abouts) > 1 else ()
    lines += ["", *report.tier_replays_lines(replays)] if replays and lines else report.tier_replays_lines(replays)
    click.echo("\n".join(lines).strip())


class _Run:
    """What was asked for, and what has been found."""

    def __init__(self, traces: Sequence[Path], suite: Path | None, given: dict[str, Any]) -> None:
        self._given = given
        policies = given["policies"]
        self.policies = check_policies(default_policies() if policies is None else _words(policies, field="--policy"))
        self.sources = [self._source(path) for path in [*traces, *_traces_in(suite)]]
        if not self.sources:
            raise InvalidArgumentError("no trace: name one or more, or a folder of them with --suite")
        self._tiers = tuple(
            (name, Capacity.parse(given[name], field=f"--{name}")) for name in _TIER_NAMES if given[name] is not None
        )
        if self._tiers and given["capacities"] is not None:
            raise InvalidArgumentError.of("--capacity", given["capacities"], "not with --vram, --memory or --nvme")
        capacities = _CAPACITIES if given["capacities"] is None else given["capacities"]
        self._capacities = tuple(
            Capacity.parse(text, field="--capacity") for text in _words(capacities, field="--capacity")
        )
        self._watermarks = _watermarks(given["watermarks"])
        self._process_count: int = given["jobs"] or os.cpu_count() or 1
        self._accesses = 0
        self._elapsed_s = 0.0

    @property
    def has_own_tiers(self) -> bool:
        return bool(self._tiers)

    @property
    def task_count(self) -> int:
        """Of looks and replays; where one serves two comparisons, it is counted twice."""
        cell_count = 0 if self._tiers else len(self._capacities) * len(self.policies)
        is_compared = self._given["keep"] != Keep.EXCLUSIVE.value
        is_sized = self._given["model"] is not None or self._given["block_bytes"] is not None
        tier_count = sum(1 + (is_compared and len(tiers) > 1) + is_sized for tiers in self._tier_sets())
        return len(self.sources) * (1 + cell_count + tier_count * len(self._tier_policies()))

    def look(self, on_done: _OnDone) -> list[About]:
        capacities = () if self._tiers else self._capacities
        abouts = self._run_all(
            look_at, [Look(source=source, capacities=capacities) for source in self.sources], on_done
        )
        names = Counter(about.name for about in abouts)
        return [
            about if names[about.name] == 1 else replace(about, name=str(source.path))
            for about, source in zip(abouts, self.sources, strict=True)
        ]

    def cells(self, abouts: Sequence[About], on_done: _OnDone) -> list[Cell]:
        jobs = [
            self._job(source, policy, (("memory", capacity),))
            for source in self.sources
            for capacity in self._capacities
            for policy in self.policies
        ]
        figures = iter(self._run_all(run_job, jobs, on_done))
        cells = []
        for about in abouts:
            for capacity in self._capacities:
                found = {policy: next(figures) for policy in self.policies}
                self._note(about, found.values())
                blocks = capacity.in_blocks(unique_blocks=about.unique_blocks, block_bytes=about.block_bytes)
                cells.append(Cell(about=about, capacity=capacity, capacity_blocks=blocks, figures=found))
        return cells

    def tier_replays(self, abouts: Sequence[About], on_done: _OnDone) -> list[TierReplay]:
        trios = [
            (about, self._trio(about, self._job(source, policy, tiers)))
            for about, source in zip(abouts, self.sources, strict=True)
            for tiers in self._tier_sets()
            for policy in self._tier_policies()
        ]
        jobs = list(dict.fromkeys(job for _, trio in trios for job in trio if job is not None))
        figures = dict(zip(jobs, self._run_all(run_job, jobs, on_done), strict=True))
        replays = []
        for about, (job, exclusive, larger) in trios:
            self._note(about, [figures[job]])
            replays.append(
                TierReplay(
                    about=about,
                    job=job,
                    figures=figures[job],
                    exclusive=None if exclusive is None else figures[exclusive],
                    larger=None if larger is None else figures[larger],
                    larger_tier=self._larger_tier(job),
                )
            )
        return replays

    def accesses_per_s(self) -> int | None:
        """Of one process."""
        return round(self._accesses / self._elapsed_s) if self._elapsed_s else None

    def _trio(self, about: About, job: Job) -> tuple[Job, Job | None, Job | None]:
        """A job, and what it is compared with, where that makes sense."""
        exclusive = larger = None
        if len(job.tiers) > 1 and job.keep is not Keep.EXCLUSIVE:
            policy = job.policy if job.policy in (BASE_LINE, f"{BASE_LINE}{NO_BYPASS}") else _without_bypass(job.policy)
            exclusive = replace(job, keep=Keep.EXCLUSIVE, policy=policy)
        if about.block_bytes is not None:
            grown = self._larger_tier(job)
            larger = replace(
                job,
                tiers=tuple(
                    (
                        name,
                        capacity.plus(NEXT_BYTES, unique_blocks=about.unique_blocks, block_bytes=about.block_bytes)
                        if name == grown
                        else capacity,
                    )
                    for name, capacity in job.tiers
                ),
            )
        return job, exclusive, larger

    @staticmethod
    def _larger_tier(job: Job) -> str:
        """Memory is what is bought; without it, the top."""
        names = [name for name, _ in job.tiers]
        return "memory" if "memory" in names else names[0]

    def _tier_sets(self) -> list[tuple[tuple[str, Capacity], ...]]:
        if self._tiers:
            return [self._tiers]
        if not self._given["with_tiers"]:
            return []
        return [
            tuple(
                (name, Capacity.parse(size, field=f"--{name}"))
                for name, size in zip(_TIER_NAMES[-len(sizes) :], sizes, strict=True)
            )
            for sizes in _TIERS
        ]

    def _tier_policies(self) -> tuple[str, ...]:
        """In a suite only the one that is judged, and LRU: each costs six replays."""
        if self._tiers:
            return self.policies
        return tuple(dict.fromkeys((self.policies[0], *(one for one in self.policies if one == BASE_LINE))))

    def _job(self, source: Source, policy: str, tiers: tuple[tuple[str, Capacity], ...]) -> Job:
        return Job(
            source=source,
            policy=policy,
            tiers=tiers,
            keep=Keep(self._given["keep"]),
            cool_down_requests=self._given["cool_down"],
            watermarks=self._watermarks,
        )

    def _source(self, path: Path) -> Source:
        given = self._given
        block_bytes = token_bytes = None
        if given["model"] is not None:
            if given["block_bytes"] is not None:
                raise InvalidArgumentError.of("--model", given["model"], "not with --block-bytes")
            model = find_model(given["model"])
            token_bytes = CacheShape(layers=model.layers, element_bytes=element_bytes(model.dtype)).token_bytes
        elif given["block_bytes"] is not None:
            block_bytes = parse_size(given["block_bytes"], field="--block-bytes")
            if not 1 <= block_bytes <= _BLOCK_BYTES_MAX:
                allowed = f"1 byte to {format_size(_BLOCK_BYTES_MAX)}"
                raise InvalidArgumentError.of("--block-bytes", given["block_bytes"], allowed)
        return Source(
            path=path,
            tokens_per_block=given["block_tokens"],
            tokenizer=given["tokenizer"],
            block_bytes=block_bytes,
            token_bytes=token_bytes,
            hint_accuracy=given["hint_accuracy"],
            seed=given["seed"],
        )

    def _run_all(
        self, function: Callable[[_Task], _Outcome], tasks: Sequence[_Task], on_done: _OnDone
    ) -> list[_Outcome]:
        return run_all(function, tasks, process_count=self._process_count, on_done=on_done)

    def _note(self, about: About, figures: Iterable[Figures]) -> None:
        for one in figures:
            self._accesses += about.block_accesses
            self._elapsed_s += one.elapsed_s


class _Progress:
    """A bar on stderr, where that is a terminal."""

    def __init__(self, task_count: int) -> None:
        self._bar = (
            click.progressbar(length=task_count, label="replaying", file=sys.stderr, width=40, show_pos=True)
            if sys.stderr.isatty()
            else None
        )

    def __enter__(self) -> Callable[[object], None]:
        """What is to be called with each task that is done."""
        if self._bar is not None:
            self._bar.__enter__()
        return self._step

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.render_finish()

    def _step(self, _: object) -> None:
        if self._bar is not None:
            self._bar.update(1)


def _without_bypass(policy: str) -> str:
    return policy if policy.endswith(NO_BYPASS) else f"{policy}{NO_BYPASS}"


def _words(text: str, *, field: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise InvalidArgumentError.of(field, text, "one value or more, with commas between them")
    return words


def _traces_in(folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    if not folder.is_dir():
        raise InvalidArgumentError.of("--suite", str(folder), "a folder")
    found = sorted(path for path in folder.iterdir() if path.name.endswith(_TRACE_SUFFIXES))
    if not found:
        raise InvalidArgumentError.of("--suite", str(folder), f"a folder with files {', '.join(_TRACE_SUFFIXES)}")
    return found


def _watermarks(text: str | None) -> Watermarks | None:
    if text is None:
        return None
    try:
        high, low = map(float, text.split(","))
    except ValueError as error:
        raise InvalidArgumentError.of("--watermarks", text, "two shares such as 0.95,0.9") from error
    return Watermarks(high=high, low=low)
