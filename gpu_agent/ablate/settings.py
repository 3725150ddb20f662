"""What is measured, in which order, and what follows from it. Pure.

All tiers at 16 bit first; then one thing at a time is lowered, keys last; then what hurt is taken apart, by layers
and by how old a block must be before it is lowered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

from kvstore.errors import InvalidArgumentError

Plane: TypeAlias = Literal["K", "V"]

EXACT = "exact"
HARMLESS_PERCENT = 0.1
HARMLESS_AGREEMENT = 0.99
"""A harmless setting moves the perplexity by no more, standard error included, and keeps so many likeliest tokens."""

_SAME_SIZE = 0.05
"""Precisions of as many bits differ by what their scales take, which is no reason to prefer one."""


class Stage(StrEnum):
    """Which question a setting answers."""

    BASE = "base"
    PLANE = "plane"
    BOTH = "both"
    TIER = "tier"
    LAYERS = "layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Where blocks are once `age_tokens` tokens or more have come behind them; 0: as soon as they are full."""

    name: str
    age_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    name: str
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The precision of K and V in one tier and those below it, in all layers or in a group of them."""

    stage: Stage
    k: str
    v: str
    tier: Tier
    group: LayerGroup | None = None

    @property
    def lowered(self) -> tuple[tuple[Plane, str], ...]:
        """The planes that are not exact, with their precision."""
        planes: tuple[tuple[Plane, str], ...] = (("K", self.k), ("V", self.v))
        return tuple((plane, precision) for plane, precision in planes if precision != EXACT)

    @property
    def where(self) -> str:
        return self.tier.name if self.group is None else self.group.name

    def __str__(self) -> str:
        return f"K {self.k}, V {self.v}, {self.where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a setting did to the model; all but the recall over the same tokens for every setting."""

    perplexity: float
    change_percent: float
    """Of the perplexity, against exact."""
    change_error_percent: float
    """Standard error of that change: how far it may be off for want of text."""
    greedy_agreement: float
    """Share of tokens for which the most likely one is the same as with exact."""
    kl_mean: float
    kl_p99: float
    """Kullback-Leibler divergence of the next token's distribution from that with exact, in nats."""
    needle_recall: float | None
    """Share of hidden facts that are told right when asked for; None where none fits the window."""
    refused_count: int
    """Planes of blocks that the encoder could not keep to its bound, and that stayed exact."""


def first_settings(precisions: Sequence[str], *, tier: Tier) -> list[Setting]:
    """Exact; V in each precision; K in each; both in each."""
    return [
        Setting(stage=Stage.BASE, k=EXACT, v=EXACT, tier=tier),
        *(Setting(stage=Stage.PLANE, k=EXACT, v=precision, tier=tier) for precision in precisions),
        *(Setting(stage=Stage.PLANE, k=precision, v=EXACT, tier=tier) for precision in precisions),
        *(Setting(stage=Stage.BOTH, k=precision, v=precision, tier=tier) for precision in precisions),
    ]


def is_harmless(score: Score, exact: Score) -> bool:
    """Whether a setting may be used without a second look; too little text to tell is no reason to say yes.

    Perplexity alone would not do: it may stay as it was while many tokens come out differently.
    """
    if (
        score.needle_recall is not None
        and exact.needle_recall is not None
        and score.needle_recall < exact.needle_recall
    ):
        return False
    is_close = abs(score.change_percent) + score.change_error_percent <= HARMLESS_PERCENT
    return is_close and score.greedy_agreement >= HARMLESS_AGREEMENT


def tier_settings(scores: Mapping[Setting, Score], *, tiers: Sequence[Tier]) -> list[Setting]:
    """What hurt of one plane, in each of the lower tiers alone."""
    hurting = [setting for setting in _hurting(scores) if len(setting.lowered) == 1]
    return [Setting(stage=Stage.TIER, k=one.k, v=one.v, tier=tier) for tier in tiers[1:] for one in hurting]


def layer_settings(scores: Mapping[Setting, Score], *, groups: Sequence[LayerGroup]) -> list[Setting]:
    """Of each plane what hurt most when it was lowered alone, in groups of layers."""
    found: list[Setting] = []
    for plane in ("V", "K"):
        alone = [setting for setting in _hurting(scores) if [name for name, _ in setting.lowered] == [plane]]
        if alone:
            worst = max(alone, key=lambda setting: scores[setting].kl_mean)
            found += [
                Setting(stage=Stage.LAYERS, k=worst.k, v=worst.v, tier=worst.tier, group=group) for group in groups
            ]
    return found


def _hurting(scores: Mapping[Setting, Score]) -> list[Setting]:
    exact = scores[exact_of(scores)]
    return [setting for setting, score in scores.items() if setting.lowered and not is_harmless(score, exact)]


def exact_of(scores: Mapping[Setting, Score]) -> Setting:
    return next(setting for setting in scores if setting.stage is Stage.BASE)


def recommend(
    scores: Mapping[Setting, Score], *, tiers: Sequence[Tier], size_ratios: Mapping[str, float]
) -> dict[str, Setting]:
    """By tier: keys exact, values in the smallest precision that was harmless, of equally small ones the best.

    Keys stay exact whatever was measured: what they lose shows in texts far longer than those measured here.
    `size_ratios` are those of blocks, by the precision of V.
    """
    exact = exact_of(scores)
    chosen: dict[str, Setting] = {}
    for tier in tiers:
        harmless = [
            setting
            for setting, score in scores.items()
            # What is harmless in a tier is harmless in those below it, where fewer blocks are lowered.
            if setting.tier.age_tokens <= tier.age_tokens
            and setting.group is None
            and setting.k == EXACT
            and (setting is exact or is_harmless(score, scores[exact]))
        ]
        smallest = min(size_ratios[setting.v] for setting in harmless)
        as_small = [setting for setting in harmless if size_ratios[setting.v] <= smallest * (1 + _SAME_SIZE)]
        chosen[tier.name] = min(as_small, key=lambda setting: scores[setting].kl_mean)
    return chosen


def layer_groups(num_layers: int, *, count: int, layer_types: Sequence[str] | None) -> list[LayerGroup]:
    """The layers in `count` runs of neighbours, and, where the model mixes kinds of attention, by kind."""
    if not 0 <= count <= num_layers:
        raise InvalidArgumentError.of("--layer-groups", count, f"0 (none) to {num_layers}, the model's layers")
    groups = [_run(range(num_layers * part // count, num_layers * (part + 1) // count)) for part in range(count)]
    kinds = dict.fromkeys(layer_types or ())
    if count and len(kinds) > 1:
        groups += _by_kind(layer_types or (), kinds)
    return groups


def _run(layers: range) -> LayerGroup:
    last = layers[-1]
    return LayerGroup(name=f"layer {last}" if len(layers) == 1 else f"layers {layers[0]}-{last}", layers=tuple(layers))


def _by_kind(layer_types: Sequence[str], kinds: Mapping[str, None]) -> Iterator[LayerGroup]:
    for kind in kinds:
        layers = tuple(index for index, own in enumerate(layer_types) if own == kind)
        yield LayerGroup(name=f"{kind.replace('_', ' ')} layers", layers=layers)


def parse_tiers(text: str) -> tuple[Tier, ...]:
    """Of `memory=0,nvme=512`: names with the age in tokens, younger first, the first one of age 0."""
    allowed = "NAME=TOKENS,... with the ages rising from 0, such as memory=0,nvme=512"
    tiers = []
    for part in text.split(","):
        name, separator, age = (word.strip() for word in part.partition("="))
        if not (name and separator and age.isascii() and age.isdigit()):
            raise InvalidArgumentError.of("--tiers", text, allowed)
        tiers.append(Tier(name=name, age_tokens=int(age)))
    ages = [tier.age_tokens for tier in tiers]
    if ages[0] != 0 or ages != sorted(set(ages)) or len({tier.name for tier in tiers}) < len(tiers):
        raise InvalidArgumentError.of("--tiers", text, allowed)
    return tuple(tiers)
