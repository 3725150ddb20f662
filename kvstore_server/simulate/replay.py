"""A trace through tiers, request by request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore_server.simulate.tiers import COOL_DOWN_REQUESTS, Keep, TierCounts, TierPlan, Tiers
from kvstore_server.simulate.trace import Trace

_TOLD_EVERY = 64
"""Requests between two reports of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierResult:
    plan: TierPlan
    counts: TierCounts
    hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a replay came to."""

    trace: Trace
    tiers: tuple[TierResult, ...]
    """From the top down."""

    @property
    def hit_tokens(self) -> int:
        """Tokens that need no prefill."""
        return sum(tier.hit_tokens for tier in self.tiers)

    @property
    def token_hit_rate(self) -> float:
        return self.share(self.hit_tokens)

    def share(self, tokens: int) -> float:
        """Of all tokens of prompts."""
        return tokens / self.trace.input_tokens if self.trace.input_tokens else 0.0


def replay(
    trace: Trace,
    plans: Sequence[TierPlan],
    *,
    keep: Keep = Keep.RETAIN,
    cool_down_requests: int = COOL_DOWN_REQUESTS,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Result:
    """Each request finds what is there when it comes, and its blocks are there when the next one comes.

    `on_progress` is told, now and then, how many requests have been replayed since it was told last.
    """
    tiers = Tiers(plans, parents=trace.parents, keep=keep, cool_down_requests=cool_down_requests)
    hit_tokens = [0] * len(plans)
    for index, request in enumerate(trace.requests, 1):
        hint = request.hint(tokens_per_block=trace.tokens_per_block)
        ends = tiers.use(trace.chain(request), request.spans, hint, now_s=request.time_s)
        tokens_above = 0
        for tier, end in enumerate(ends):
            tokens = trace.tokens_of(request, end)
            hit_tokens[tier] += tokens - tokens_above
            tokens_above = tokens
        if index % _TOLD_EVERY == 0:
            on_progress(_TOLD_EVERY)
    on_progress(len(trace.requests) % _TOLD_EVERY)
    return Result(
        trace=trace,
        tiers=tuple(
            TierResult(plan=plan, counts=counts, hit_tokens=tokens)
            for plan, counts, tokens in zip(plans, tiers.counts, hit_tokens, strict=True)
        ),
    )
