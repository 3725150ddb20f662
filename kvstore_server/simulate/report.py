"""Replays for people and for scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, NamedTuple

from kvstore_client.sizes import format_size
from kvstore_server.simulate.suite import BASE_LINE, About, Cell, Figures, Job, TierFigures, Verdict
from kvstore_server.simulate.traces import nearest_field

NEXT_BYTES = 100 << 30
_NEXT_TEXT = "100GiB"
_IGNORED_SHOWN_MAX = 10
_NAME_SHOWN_MAX = 64


class TierReplay(NamedTuple):
    """One replay through given tiers, beside what it is judged by."""

    about: About
    job: Job
    figures: Figures
    exclusive: Figures | None
    """The same policy, its blocks in one tier at a time, and none refused; None: that is what was asked for."""
    larger: Figures | None
    """With `NEXT_BYTES` more of `larger_tier`; None: nobody knows what a block has."""
    larger_tier: str = ""


# --- scripts


def about_json(about: About) -> dict[str, Any]:
    return {
        "name": about.name,
        "requests": about.request_count,
        "block_accesses": about.block_accesses,
        "unique_blocks": about.unique_blocks,
        "tokens_per_block": about.tokens_per_block,
        "block_bytes": about.block_bytes,
        "input_tokens": about.input_tokens,
        "duration_s": about.duration_s,
        "ignored_fields": about.ignored_fields,
        "infinite": {
            "token_hit_rate_percent": _rounded(about.infinite_percent),
            "written_blocks": about.infinite_written_blocks,
        },
    }


def cells_json(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """By trace, in their order."""
    traces: dict[str, dict[str, Any]] = {}
    for cell in cells:
        about = cell.about
        shown = traces.setdefault(about.name, about_json(about) | {"cells": []})
        shown["cells"].append(
            {
                "capacity": cell.capacity.text,
                "capacity_blocks": cell.capacity_blocks,
                "capacity_bytes": None if about.block_bytes is None else cell.capacity_blocks * about.block_bytes,
                "clairvoyant": {
                    "token_hit_rate_percent": _rounded(cell.clairvoyant_percent),
                    "written_blocks": about.clairvoyant_written_blocks[cell.capacity_blocks],
                },
                "policies": {
                    policy: figures_json(figures, about)
                    | ({"gap_closed": _maybe(cell.gap_closed(policy))} if BASE_LINE in cell.figures else {})
                    for policy, figures in cell.figures.items()
                },
            }
        )
    return list(traces.values())


def figures_json(figures: Figures, about: About) -> dict[str, Any]:
    return {
        "token_hit_rate_percent": _rounded(figures.token_hit_rate_percent),
        "saved_prefill_tokens": figures.saved_prefill_tokens,
        "written_blocks": figures.written_blocks,
        "written_blocks_per_request": _rounded(figures.written_blocks / about.request_count),
        "thrash_index": _rounded(figures.thrash_index),
        "accesses_per_s": round(about.block_accesses / figures.elapsed_s) if figures.elapsed_s else None,
        "tiers": [_tier_json(tier, about.block_bytes) for tier in figures.tiers],
    }


def _tier_json(tier: TierFigures, block_bytes: int | None) -> dict[str, Any]:
    shown = {
        "name": tier.name,
        "capacity": tier.capacity,
        "capacity_blocks": tier.capacity_blocks,
        "token_hit_rate_percent": _rounded(tier.token_hit_rate_percent),
        "thrash_index": _rounded(tier.counts.thrash_index),
        "written_blocks": tier.counts.written_blocks,
        **asdict(tier.counts),
    }
    if block_bytes is not None:
        for moved in ("written", "promoted", "demoted"):
            shown[f"{moved}_bytes"] = shown[f"{moved}_blocks"] * block_bytes
    return shown


def verdicts_json(verdicts: Mapping[str, Verdict]) -> dict[str, dict[str, float | None]]:
    """Each figure by policy."""
    return {
        name: {policy: _maybe(getattr(verdict, name)) for policy, verdict in verdicts.items()}
        for name in ("gap_closed", "worst_vs_lru", "mean_vs_lru", "writes_vs_lru")
    }


def tier_replays_json(replays: Iterable[TierReplay]) -> list[dict[str, Any]]:
    replays = list(replays)
    shown = []
    for one in replays:
        job, about, base = one.job, one.about, _base_of(one, replays)
        row: dict[str, Any] = {
            "trace": about.name,
            "policy": job.policy,
            "keep": job.keep.value,
            "tier_count": len(job.tiers),
            **figures_json(one.figures, about),
            "thrash_index_of_lru": None if base is None else _rounded(base.figures.thrash_index),
        }
        if one.exclusive is not None:
            row |= {
                "writes_vs_exclusive": _maybe(writes_vs_exclusive(one)),
                "points_lost_vs_exclusive": _rounded(points_lost(one)),
                "exclusive": figures_json(one.exclusive, about),
            }
        if one.larger is not None:
            row["next_100_gib_points"] = _rounded(_points_of_next(one.larger, one.figures))
        shown.append(row)
    return shown


def writes_vs_exclusive(one: TierReplay) -> float | None:
    assert one.exclusive is not None, "there is nothing to compare with"
    written = one.exclusive.written_blocks
    return one.figures.written_blocks / written if written else None


def points_lost(one: TierReplay) -> float:
    assert one.exclusive is not None, "there is nothing to compare with"
    return one.exclusive.token_hit_rate_percent - one.figures.token_hit_rate_percent


def _base_of(one: TierReplay, replays: Iterable[TierReplay]) -> TierReplay | None:
    """LRU's with the same tiers."""
    return next(
        (
            other
            for other in replays
            if other.job.policy == BASE_LINE
            and (other.about.name, other.job.tiers, other.job.keep) == (one.about.name, one.job.tiers, one.job.keep)
        ),
        None,
    )


# --- people


def cells_lines(cells: Sequence[Cell]) -> Iterator[str]:
    """A table for each trace: token hit rates in %, policies by capacities."""
    names = dict.fromkeys(cell.about.name for cell in cells)
    for name in names:
        row = [cell for cell in cells if cell.about.name == name]
        yield from about_lines(row[0].about)
        yield ""
        head = ["hit rate in %, at", *(_capacity_text(cell) for cell in row)]
        body = [
            [policy, *(f"{cell.figures[policy].token_hit_rate_percent:.2f}" for cell in row)]
            for policy in row[0].figures
        ]
        body.append(["clairvoyant", *(f"{cell.clairvoyant_percent:.2f}" for cell in row)])
        body.append(["infinite cache", *(f"{cell.about.infinite_percent:.2f}" for cell in row)])
        yield from _table(head, body)
        yield ""
        head = ["blocks written per request", *head[1:]]
        body = [
            [policy, *(f"{cell.figures[policy].written_blocks / cell.about.request_count:.2f}" for cell in row)]
            for policy in row[0].figures
        ]
        yield from _table(head, body)
        if row[0].about.block_bytes is not None:
            yield ""
            for cell in row:
                yield next_sentence(cell, row)
        yield ""


def about_lines(about: About) -> Iterator[str]:
    size = "" if about.block_bytes is None else f" ({format_size(about.unique_blocks * about.block_bytes)})"
    yield (
        f"{about.name}: {_number(about.request_count, 'request')} in {about.duration_s:,.0f} s, "
        f"{_number(about.input_tokens, 'token')}, {_number(about.unique_blocks, 'unique block')} of "
        f"{_number(about.tokens_per_block, 'token')}{size}"
    )


def next_sentence(cell: Cell, row: Sequence[Cell]) -> str:
    """What 100 GiB more buy, read off between the capacities that were replayed."""
    policy = next(iter(cell.figures))
    points = points_of_next(cell, row, policy)
    held = _capacity_text(cell)
    return f"At {held} the next {_NEXT_TEXT} {_bought(points)} with {policy}."


def points_of_next(cell: Cell, row: Sequence[Cell], policy: str) -> float:
    """Between capacities the hit rate is taken for a straight line, and behind the last it ends at the infinite one."""
    curve = sorted((one.capacity_blocks, one.figures[policy].token_hit_rate_percent) for one in row)
    assert cell.about.block_bytes is not None, "nobody knows what a block has"
    curve.append((max(cell.about.unique_blocks, curve[-1][0] + 1), cell.about.infinite_percent))
    goal = cell.capacity_blocks + NEXT_BYTES // cell.about.block_bytes
    here = cell.figures[policy].token_hit_rate_percent
    for (low, low_rate), (high, high_rate) in pairwise(curve):
        if low <= goal <= high:
            return low_rate + (high_rate - low_rate) * (goal - low) / (high - low) - here
    return curve[-1][1] - here


def verdict_lines(verdicts: Mapping[str, Verdict]) -> Iterator[str]:
    head = ["all traces", "gap closed", "worst vs LRU", "mean vs LRU", "writes vs LRU"]
    body = [
        [
            policy,
            _share_text(verdict.gap_closed),
            f"{verdict.worst_vs_lru:+.2f}",
            f"{verdict.mean_vs_lru:+.2f}",
            _share_text(verdict.writes_vs_lru),
        ]
        for policy, verdict in verdicts.items()
    ]
    yield from _table(head, body)


def tier_replays_lines(replays: Sequence[TierReplay]) -> Iterator[str]:
    """A line for each tier of each replay."""
    for name in dict.fromkeys(one.about.name for one in replays):
        row = [one for one in replays if one.about.name == name]
        about = row[0].about
        yield from about_lines(about)
        yield ""
        head = ["policy", "tier", "capacity", "hit rate in %", "written", "promoted", "demoted", "evicted", "thrash"]
        body: list[list[str]] = []
        for one in row:
            for tier in one.figures.tiers:
                counts = tier.counts
                moved = (counts.written_blocks, counts.promoted_blocks, counts.demoted_blocks, counts.evicted_blocks)
                body.append(
                    [
                        one.job.policy if tier is one.figures.tiers[0] else "",
                        tier.name,
                        tier.capacity,
                        f"{tier.token_hit_rate_percent:.2f}",
                        *(_amount(count, about.block_bytes) for count in moved),
                        f"{counts.thrash_index:.3f}",
                    ]
                )
            body.append(["", "all", "", f"{one.figures.token_hit_rate_percent:.2f}", "", "", "", "", ""])
        yield from _table(head, body, text_columns=3)
        yield f"An infinite cache reaches {about.infinite_percent:.2f} %."
        for one in row:
            yield from _notes(one)
        yield ""


def _notes(one: TierReplay) -> Iterator[str]:
    who = f"{one.job.policy}, {_number(len(one.job.tiers), 'tier')}"
    if one.exclusive is not None:
        lost = round(points_lost(one), 2)
        hits = (
            "the same hit rate"
            if not lost
            else f"a hit rate {abs(lost):.2f} points {'lower' if lost > 0 else 'higher'}"
        )
        yield f"{who}: {_writes_text(one)}, for {hits}."
    if one.larger is not None:
        points = _points_of_next(one.larger, one.figures)
        yield f"{who}: the next {_NEXT_TEXT} of {_shown_name(one.larger_tier)} {_bought(points)}."


def _writes_text(one: TierReplay) -> str:
    """What the lowest tier is written, beside exclusive demotion."""
    name, share = _shown_name(one.figures.tiers[-1].name), writes_vs_exclusive(one)
    if share is not None:
        return f"{name} is written {share:.2f} times as much as with exclusive demotion"
    if not one.figures.written_blocks:
        return f"{name} is not written, as with exclusive demotion"
    return f"{name} is written {_number(one.figures.written_blocks, 'block')}, and none with exclusive demotion"


def _bought(points: float) -> str:
    shown = round(points, 2)
    if not shown:
        return "buy no hits"
    return f"{'buy' if shown > 0 else 'cost'} {_number(abs(shown), 'point', '.2f')} of hit rate"


def _shown_name(tier: str) -> str:
    return {"vram": "VRAM", "nvme": "NVMe"}.get(tier, tier)


def _number(count: float, noun: str, form: str = ",") -> str:
    return f"{count:{form}} {noun}{'' if count == 1 else 's'}"


def ignored_text(ignored_fields: Mapping[str, int]) -> str:
    """Names the fields that mean nothing to us, and what may be meant by them; empty: there are none."""
    if not ignored_fields:
        return ""
    parts = []
    for name, count in sorted(ignored_fields.items(), key=lambda one: -one[1])[:_IGNORED_SHOWN_MAX]:
        meant = nearest_field(name)
        parts.append(
            f"`{name[:_NAME_SHOWN_MAX]}` ({_number(count, 'line')}{'' if meant is None else f'; is `{meant}` meant?'})"
        )
    more = len(ignored_fields) - len(parts)
    return f"ignored, as they mean nothing here: {', '.join(parts)}{f' and {more} more' if more else ''}"


def _points_of_next(larger: Figures, figures: Figures) -> float:
    return larger.token_hit_rate_percent - figures.token_hit_rate_percent


def _capacity_text(cell: Cell) -> str:
    block_bytes = cell.about.block_bytes
    return cell.capacity.text if block_bytes is None else format_size(cell.capacity_blocks * block_bytes)


def _amount(blocks: int, block_bytes: int | None) -> str:
    return f"{blocks:,}" if block_bytes is None else format_size(blocks * block_bytes)


def _share_text(share: float | None) -> str:
    return "-" if share is None else f"{share:.3f}"


def _table(head: Sequence[str], body: Sequence[Sequence[str]], *, text_columns: int = 1) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    for line in (head, *body):
        cells = (
            cell.ljust(width) if index < text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _maybe(value: float | None) -> float | None:
    return None if value is None else _rounded(value)


def _rounded(value: float) -> float:
    """More digits than a trace of an hour can tell."""
    return round(value, 4)
