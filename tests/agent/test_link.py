"""A busy link is relieved one measure at a time, and nothing flaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_agent.core.link import (
    BUSY_ABOVE,
    FREE_BELOW,
    STEP_SHARE,
    WINDOW_S,
    Direction,
    LinkController,
    LinkDecision,
    LinkReason,
    LinkSample,
    Relief,
    Traffic,
)
from gpu_agent.device.cpu import CpuDevice
from gpu_agent.metrics import LinkFigures
from tests.agent.conftest import MakeAgent
from tests.agent.fakes import BLOCK_BYTES as AGENT_BLOCK_BYTES
from tests.agent.fakes import chain, content

BLOCK_BYTES = 1 << 20
RATE = 100 * BLOCK_BYTES  # bytes per second while the link moves something
TICK_S = WINDOW_S / 8  # whole in binary


class _Link:
    """A link that is as busy as it is told to be, looked at every tick."""

    def __init__(self, *, may_lower_precision: bool = True, batch_count_max: int = 16) -> None:
        self.controller = LinkController(
            block_bytes=BLOCK_BYTES, batch_count_max=batch_count_max, may_lower_precision=may_lower_precision
        )
        self.now_s = 0.0
        self._h2d = Traffic()
        self._d2h = Traffic()
        self.controller.note(LinkSample(), now_s=0.0)

    def run(self, *, up: float, down: float = 0.0, for_s: float = TICK_S, queued_bytes: int = 0) -> list[LinkDecision]:
        decisions = []
        for _ in range(round(for_s / TICK_S)):
            self.now_s += TICK_S
            self._h2d = _moved(self._h2d, up * TICK_S)
            self._d2h = _moved(self._d2h, down * TICK_S)._replace(queued_bytes=queued_bytes)
            self.controller.note(LinkSample(self._h2d, self._d2h), now_s=self.now_s)
            decisions.append(self.controller.decide())
        return decisions


def _moved(before: Traffic, busy_s: float) -> Traffic:
    return Traffic(before.moved_bytes + int(RATE * busy_s), before.busy_s + busy_s)


def test_until_a_window_is_known_nothing_is_decided() -> None:
    link = _Link()
    early = link.run(up=1.0, for_s=WINDOW_S - TICK_S)
    assert {decision.reason for decision in early} == {LinkReason.UNMEASURED}
    assert {decision.relief for decision in early} == {Relief.NONE}
    assert early[-1].batch_count == 16


def test_a_busy_link_gets_larger_batches_then_lower_precision_then_calm_and_all_is_taken_back_in_reverse() -> None:
    link = _Link()
    link.controller.note_step(BLOCK_BYTES / RATE)  # one block beside half a step would be none
    assert _reliefs(link.run(up=0.9, for_s=6 * WINDOW_S)) == [*Relief]
    last = link.controller.decide()
    assert last.is_calm
    assert last.lowers_precision
    assert last.reason is LinkReason.EXHAUSTED
    assert _reliefs(link.run(up=0.1, for_s=6 * WINDOW_S)) == [*reversed(Relief)]
    assert link.controller.decide().reason is LinkReason.FREE


def test_precision_stays_where_it_may_not_be_lowered() -> None:
    link = _Link(may_lower_precision=False)
    decisions = link.run(up=0.9, for_s=6 * WINDOW_S)
    assert _reliefs(decisions) == [Relief.NONE, Relief.LARGER_BATCHES, Relief.CALMER_EVICTION]
    assert not any(decision.lowers_precision for decision in decisions)


def test_between_the_thresholds_everything_stays_as_it_is() -> None:
    between = (BUSY_ABOVE + FREE_BELOW) / 2
    fresh = _Link()
    assert _reliefs(fresh.run(up=between, for_s=5 * WINDOW_S)) == [Relief.NONE]
    relieved = _Link()
    relieved.run(up=0.9, for_s=WINDOW_S)
    after = relieved.run(up=between, for_s=5 * WINDOW_S)
    assert after[-1].reason is LinkReason.BETWEEN
    assert len(_reliefs(after)) == 1
    assert after[0].relief is Relief.LARGER_BATCHES


@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=100), may_lower_precision=st.booleans())
def test_changes_are_a_window_apart_and_one_step_each(shares: list[float], may_lower_precision: bool) -> None:
    link = _Link(may_lower_precision=may_lower_precision)
    allowed = [one for one in Relief if may_lower_precision or one is not Relief.LOWER_PRECISION]
    level, changed_tick = 0, 0
    for tick, share in enumerate(shares, start=1):
        (decision,) = link.run(up=share)
        now = allowed.index(decision.relief)
        if now != level:
            assert abs(now - level) == 1
            assert (tick - changed_tick) * TICK_S >= WINDOW_S
            level, changed_tick = now, tick
        assert 8 <= decision.batch_count <= 16
        assert decision.prefetch_budget_bytes is None
        assert 0.0 <= link.controller.utilisation <= 1.0


@given(shares=st.tuples(st.floats(0, 1), st.floats(0, 1)), step_s=st.floats(1e-4, 10.0))
def test_a_busier_link_is_asked_for_less(shares: tuple[float, float], step_s: float) -> None:
    decisions = []
    for share in sorted(shares):
        link = _Link()
        link.controller.note_step(step_s)
        decisions.append(link.run(up=share / 2, down=share / 2, for_s=5 * WINDOW_S)[-1])
    free, busy = decisions
    assert busy.relief >= free.relief
    if free.relief >= Relief.LARGER_BATCHES:
        assert busy.batch_count >= free.batch_count
    if free.prefetch_budget_bytes is not None and busy.prefetch_budget_bytes is not None:
        assert busy.prefetch_budget_bytes <= free.prefetch_budget_bytes * 1.001 + 1


@given(step_s=st.floats(1e-5, 100.0), batch_count_max=st.integers(1, 64))
def test_a_batch_fits_beside_a_step_within_its_bounds(step_s: float, batch_count_max: int) -> None:
    link = _Link(batch_count_max=batch_count_max)
    link.controller.note_step(step_s)
    decision = link.run(up=0.0, down=0.2, for_s=2 * WINDOW_S)[-1]
    rate = link.controller.bytes_per_s(Direction.D2H)
    assert rate is not None
    fitting_count = int(step_s * rate * STEP_SHARE / BLOCK_BYTES)
    assert -(-batch_count_max // 2) <= decision.batch_count <= batch_count_max
    if -(-batch_count_max // 2) <= fitting_count <= batch_count_max:
        assert decision.batch_count == fitting_count


def test_what_goes_out_leaves_less_for_what_is_brought_ahead_but_always_a_block() -> None:
    step_s = 0.5
    budgets = []
    for down in (0.0, 0.3, 0.69, 1.0):
        link = _Link()
        link.controller.note_step(step_s)
        budgets.append(link.run(up=0.1, down=down, for_s=WINDOW_S)[-1].prefetch_budget_bytes)
    assert budgets == sorted(budgets, reverse=True)  # type: ignore[type-var]
    assert abs((budgets[0] or 0) - BUSY_ABOVE * step_s * RATE) < RATE / 100
    assert budgets[-1] == BLOCK_BYTES


def test_a_link_that_moves_nothing_of_a_long_queue_is_busy() -> None:
    link = _Link()
    link.run(up=0.2, down=0.2, for_s=2 * WINDOW_S)
    decisions = link.run(up=0.0, down=0.0, for_s=3 * WINDOW_S, queued_bytes=int(RATE * WINDOW_S))
    assert decisions[-1].relief > Relief.NONE
    assert link.controller.queue_s > BUSY_ABOVE * WINDOW_S


def test_the_measured_rate_is_that_of_the_link_while_it_moves() -> None:
    link = _Link()
    link.run(up=0.15, for_s=2 * WINDOW_S)
    rate = link.controller.bytes_per_s(Direction.H2D)
    assert rate is not None
    assert abs(rate - RATE) < RATE / 100
    assert link.controller.bytes_per_s(Direction.D2H) is None
    assert abs(link.controller.utilisation - 0.15) < 0.01


def test_an_agent_whose_link_is_busy_asks_less_of_it_until_it_is_free_again(make_agent: MakeAgent) -> None:
    now_s = 0.0
    link_s = 0.0005  # per block
    agent = make_agent(16, device=CpuDevice(link_bytes_per_s=AGENT_BLOCK_BYTES / link_s), clock=lambda: now_s)

    def keep_busy(seeds: range) -> LinkFigures:
        nonlocal now_s
        for seed in seeds:
            hashes = chain(8, seed=seed)
            agent.store(hashes, content(hashes))
            assert agent.flush(10.0)
            now_s += 8 * link_s / 0.9
            agent.step()
        return agent.snapshot().link

    early = keep_busy(range(80))
    assert early.decision is not None
    assert early.decision.reason is LinkReason.UNMEASURED
    busy = keep_busy(range(80, 240))
    assert 0.85 < busy.utilisation < 0.95
    assert busy.decision is not None
    assert busy.decision.relief is Relief.LARGER_BATCHES
    assert busy.bytes_per_s["d2h"] == pytest.approx(AGENT_BLOCK_BYTES / link_s)
    for _ in range(30):
        now_s += WINDOW_S / 10
        agent.step()
    free = agent.snapshot().link
    assert free.decision is not None
    assert (free.decision.relief, free.decision.reason) == (Relief.NONE, LinkReason.FREE)


def _reliefs(decisions: list[LinkDecision]) -> list[Relief]:
    """Without repetitions."""
    reliefs: list[Relief] = []
    for decision in decisions:
        if reliefs[-1:] != [decision.relief]:
            reliefs.append(decision.relief)
    return reliefs
