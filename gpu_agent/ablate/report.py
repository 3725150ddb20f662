"""What came out, for people and for scripts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpu_agent.ablate.settings import (
    EXACT,
    HARMLESS_AGREEMENT,
    HARMLESS_PERCENT,
    Score,
    Setting,
    Stage,
    Tier,
    exact_of,
    is_harmless,
    recommend,
)
from kvstore.layout import BlockLayout
from kvstore.precision import encoded_layout

HEADINGS = (
    *("K", "V", "where", "size"),
    *("perplexity", "change", "same token", "KL mean", "KL p99", "needles", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    model: str
    texts: tuple[str, ...]
    layout: BlockLayout
    tiers: tuple[Tier, ...]
    window_tokens: int
    window_count: int
    scored_tokens: int
    needle_count: int
    seed: int
    thread_count: int
    elapsed_s: float
    scores: Mapping[Setting, Score]

    @property
    def recommended(self) -> dict[str, Setting]:
        precisions = dict.fromkeys(setting.v for setting in self.scores)
        ratios = {precision: self._size_ratio(k=EXACT, v=precision) for precision in precisions}
        return recommend(self.scores, tiers=self.tiers, size_ratios=ratios)

    def is_harmless(self, setting: Setting) -> bool:
        return is_harmless(self.scores[setting], self.scores[exact_of(self.scores)])

    def size_ratio(self, setting: Setting) -> float:
        """Bytes of a block in this precision, with its scales, to those of an exact one."""
        return self._size_ratio(k=setting.k, v=setting.v)

    def rows(self) -> Iterator[tuple[Setting, tuple[str, ...]]]:
        """What the table shows of each setting, under `HEADINGS`."""
        for setting, score in self.scores.items():
            is_base = setting.stage is Stage.BASE
            # A group of layers is no way to store blocks, only a question.
            size = "" if setting.group else f"{self.size_ratio(setting):.2f}"
            recall = "-" if score.needle_recall is None else f"{score.needle_recall:.0%}"
            yield (
                setting,
                (
                    setting.k,
                    setting.v,
                    "" if is_base else setting.where,
                    size,
                    # On half of the text, so that it would be held against the wrong one.
                    "" if setting.group else f"{score.perplexity:.3f}",
                    "" if is_base else f"{score.change_percent:+.3f} ± {score.change_error_percent:.3f} %",
                    "" if is_base else f"{score.greedy_agreement:.2%}",
                    "" if is_base else f"{score.kl_mean:.2g}",
                    "" if is_base else f"{score.kl_p99:.2g}",
                    recall,
                    "" if is_base else "harmless" if self.is_harmless(setting) else "",
                ),
            )

    def title(self) -> str:
        return (
            f"{self.model}: {self.scored_tokens:,} tokens scored in {self.window_count} windows of "
            f"{self.window_tokens:,}, {self.needle_count} needles, blocks of {self.layout.tokens_per_block}"
        )

    def notes(self) -> list[str]:
        tiers = "; ".join(
            f"{tier.name}: "
            + ("every full block" if tier.age_tokens == 0 else f"blocks {tier.age_tokens:,} tokens back")
            for tier in self.tiers
        )
        advice = ", ".join(f"{tier}: K {setting.k}, V {setting.v}" for tier, setting in self.recommended.items())
        harmless = (
            f"Harmless: perplexity within {HARMLESS_PERCENT} %, standard error included, "
            f"{HARMLESS_AGREEMENT:.0%} of tokens the same, and no needle less than exact."
        )
        notes = [
            f"Where: {tiers}. Size: bytes of a block with its scales, exact = 1.",
            harmless,
            f"Recommended: {advice}. Keys stay exact: what they lose shows in texts longer than these.",
        ]
        refused_count = sum(score.refused_count for score in self.scores.values())
        if refused_count:
            notes.append(
                f"{refused_count:,} planes of blocks could not be encoded within their bound and stayed exact."
            )
        return notes

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "texts": list(self.texts),
            "dtype": self.layout.dtype,
            "tokens_per_block": self.layout.tokens_per_block,
            "tiers": {tier.name: tier.age_tokens for tier in self.tiers},
            "window_tokens": self.window_tokens,
            "window_count": self.window_count,
            "scored_tokens": self.scored_tokens,
            "needle_count": self.needle_count,
            "seed": self.seed,
            "thread_count": self.thread_count,
            "elapsed_s": round(self.elapsed_s, 1),
            "settings": [
                {
                    "stage": setting.stage.value,
                    "k": setting.k,
                    "v": setting.v,
                    "tier": setting.tier.name,
                    "where": setting.where,
                    "layers": None if setting.group is None else list(setting.group.layers),
                    "size_ratio": None if setting.group else self.size_ratio(setting),
                    **asdict(score),
                    "is_harmless": self.is_harmless(setting),
                }
                for setting, score in self.scores.items()
            ],
            "recommended": {tier: {"k": setting.k, "v": setting.v} for tier, setting in self.recommended.items()},
        }

    def _size_ratio(self, *, k: str, v: str) -> float:
        stored = encoded_layout(self.layout, k_precision=k, v_precision=v)
        return stored.payload_bytes / self.layout.payload_bytes
