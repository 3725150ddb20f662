"""What PHIX learns from all blocks, here or gone: who comes back, and when."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from math import log

import numpy as np
from numpy.typing import NDArray

from kvstore.eviction.phix import features
from kvstore.eviction.phix.ages import BIN_COUNT, WIDTHS_S, Floats, bin_of, bins_of
from kvstore.eviction.phix.features import Past, Setting
from kvstore.eviction.phix.gittins import gittins_index
from kvstore.eviction.phix.hazards import Hazards
from kvstore.eviction.phix.returns import ReturnModel, probability
from kvstore.eviction.phix.visits import Cohort, Visit
from kvstore.eviction.use import NO_HINT

_BANDS = (0.05, 0.12, 0.25, 0.4, 0.6, 0.8, 0.93)
_BAND_SCORES = tuple(log(chance / (1 - chance)) for chance in _BANDS)
_BAND_COUNT = len(_BANDS) + 1
CLASS_COUNT = features.FINISH_COUNT * features.HINT_COUNT * _BAND_COUNT * 4

_LABEL_AFTER_S = 400.0
"""What has come back by then has come back "soon": nearly all of agents' pauses, three quarters of chats'."""
_AWAITED_MAX = 1024
"""Requests that wait for their label (0.5 MB). Above 2.5 per second, some teach nothing."""
_FADE_PER_REQUEST = 0.993 ** (1 / 50)
"""What is older than 7000 requests has lost two thirds of its weight."""
_REFRESH_REQUESTS_MIN, _REFRESH_REQUESTS_MAX = 10, 200
_COHORTS_PER_REQUEST = 20
"""Refreshing goes over all cohorts: so many, at most, per request."""


class Learner:
    """Places cohorts in classes, and knows what a block of a class is worth at an age."""

    def __init__(self) -> None:
        self._model = ReturnModel(features.FEATURE_COUNT)
        for feature, weight in features.PRIORS.items():
            self._model.set_prior(feature, weight)
        self._settings: dict[Setting, Setting] = {}  # one object for all visits that have the same
        self._made: dict[tuple[Past, Setting], tuple[int, ...]] = {}
        pools = [_pool_of(number) for number in range(CLASS_COUNT)]
        scales = [features.HAZARD_SCALES[pool // 4 % features.HINT_COUNT] for pool in range(max(pools) + 1)]
        self._hazards = Hazards(pools, pool_scales=scales)
        self._is_live = np.zeros(CLASS_COUNT, dtype=bool)
        self._table: list[list[float] | None] = [None] * CLASS_COUNT
        self._array: Floats = np.zeros((CLASS_COUNT, BIN_COUNT))
        # Of each cohort that has blocks waiting, by its slot.
        self._born_s = array("d")
        self._class_of = array("q")
        self._waiting = array("d")
        self._cohorts: list[Cohort | None] = []
        self._free: list[int] = []
        self._reuses: list[tuple[int, float, float, float]] = []  # class, born, reused, count: since the last refresh
        self._awaited: deque[Visit] = deque()
        self._request_count = 0
        self.returned_count = 0
        """Blocks that were used again, by another request."""
        self._refreshed_at = 0
        self._next_refresh = 0
        self._refreshed_s = float("-inf")

    # --- requests

    def begin(self, visit: Visit) -> None:
        """A request comes, and time passes."""
        self._request_count += 1
        awaited, due_s = self._awaited, visit.now_s - _LABEL_AFTER_S
        while awaited and awaited[0].now_s <= due_s:
            self._learn(awaited.popleft())
        if self._request_count >= self._next_refresh:
            self._refresh(visit.now_s)

    def place(self, visit: Visit) -> None:
        """All is known of a request that ever will, or more than before: its cohorts get their classes."""
        request = visit.request
        is_new = not visit.is_placed
        setting = Setting(features.turn_band(visit.turn), features.FINISHES[request.finish], features.hint_of(request))
        visit.setting = self._settings.setdefault(setting, setting)
        visit.score = self._model.score(visit.features)
        visit.class_of_new = self._class(visit, features.NEW)
        for cohort in visit.cohorts:
            if cohort.slot >= 0:
                self._class_of[cohort.slot] = self._class(cohort.visit, cohort.past)
        if is_new and len(self._awaited) < _AWAITED_MAX:
            visit.is_awaited = True
            self._awaited.append(visit)
        visit.is_placed = True
        if not visit.is_awaited:
            visit.features = ()

    # --- blocks

    def wait(self, cohort: Cohort, count: int) -> None:
        """So many more blocks of a cohort wait to be used again."""
        slot = cohort.slot
        if slot < 0:
            slot = cohort.slot = self._take_slot()
            self._cohorts[slot] = cohort
            self._born_s[slot] = cohort.visit.now_s
            self._class_of[slot] = self._class(cohort.visit, cohort.past) if cohort.visit.is_placed else 0
        cohort.waiting_count += count
        self._waiting[slot] = cohort.waiting_count

    def reuse(self, cohort: Cohort, count: int, *, now_s: float) -> None:
        """So many have been used again."""
        slot = cohort.slot
        self._reuses.append((self._class_of[slot], self._born_s[slot], now_s, count))
        cohort.reused_count += count
        self.returned_count += count
        self._take_out(cohort, count)

    def change(self, cohort: Cohort, count: int) -> None:
        """So many more of a cohort wait, or fewer, as others stand for them."""
        if count > 0:
            self.wait(cohort, count)
        elif count < 0:
            self._take_out(cohort, -count)

    def forget(self, cohort: Cohort, count: int) -> None:
        """Of so many it will never be known whether they would have been used again."""
        self._take_out(cohort, count)

    def cohort_at(self, slot: int) -> Cohort:
        cohort = self._cohorts[slot]
        assert cohort is not None, f"nobody waits in {slot}"
        return cohort

    # --- worth

    def worth(self, cohort: Cohort, *, now_s: float) -> float:
        number = self._class_of[cohort.slot]
        row = self._table[number] or self._row(number)
        return row[bin_of(now_s - cohort.visit.now_s)]

    def worths(self, slots: NDArray[np.intp], *, now_s: float) -> Floats:
        classes = np.frombuffer(self._class_of, dtype=np.int64)[slots]
        ages_s = now_s - np.frombuffer(self._born_s)[slots]
        if not self._is_live[classes].all():
            for number in set(classes.tolist()):
                self._row(number)
        worths: Floats = self._array[classes, bins_of(ages_s)]
        return worths

    def worth_of_new(self, visit: Visit, *, now_s: float) -> float:
        """Of a block that this request brings for the first time."""
        return self._row(visit.class_of_new)[bin_of(now_s - visit.now_s)]

    def worth_of_return(self, visit: Visit, past: Past, *, now_s: float) -> float:
        """Of a block that this request brings back."""
        row = self._row(self._class(visit, past))
        return row[bin_of(now_s - visit.now_s)]

    @property
    def class_count(self) -> int:
        return int(self._is_live.sum())

    @property
    def cohort_count(self) -> int:
        return len(self._born_s) - len(self._free)

    # --- inside

    def _class(self, visit: Visit, past: Past) -> int:
        score = visit.score + self._model.score(self._features_of(past, visit.setting))
        band = bisect_left(_BAND_SCORES, score)
        _, finish, hint = visit.setting
        group = finish * features.HINT_COUNT + hint
        return (group * _BAND_COUNT + band) * 4 + past.is_shared * 2 + past.is_partial

    def _features_of(self, past: Past, setting: Setting) -> tuple[int, ...]:
        """There are few of them, so each is made once."""
        made = self._made.get((past, setting))
        if made is None:
            made = self._made[past, setting] = features.of_blocks(past, setting)
        return made

    def _learn(self, visit: Visit) -> None:
        """By now it is known which of its blocks have come back."""
        whole = sum([cohort.waiting_count + cohort.reused_count for cohort in visit.cohorts])
        if not whole:
            return
        score, error_of_request = self._model.score(visit.features), 0.0
        for cohort in visit.cohorts:
            count = cohort.waiting_count + cohort.reused_count
            if not count:
                continue
            of_blocks = self._features_of(cohort.past, visit.setting)
            error = probability(score + self._model.score(of_blocks)) - cohort.reused_count / count
            # The root: a long chain tells more than a short one, but it comes back or not as one.
            error *= (count / whole) ** 0.5
            error_of_request += error
            self._model.learn(of_blocks, error=error)
        self._model.learn(visit.features, error=error_of_request)
        visit.features, visit.cohorts, visit.request = (), (), NO_HINT
        visit.is_awaited = False

    def _refresh(self, now_s: float) -> None:
        """Books what has happened since the last time, and reckons the worth of all classes anew."""
        if self._refreshed_s == float("-inf"):
            self._refreshed_s = now_s
        classes = np.frombuffer(self._class_of, dtype=np.int64)
        born_s, waiting = np.frombuffer(self._born_s), np.frombuffer(self._waiting)
        active = np.flatnonzero(waiting > 0)
        self._count_time(classes[active], born_s[active], np.full(len(active), now_s), waiting[active])
        if self._reuses:
            table = np.array(self._reuses)
            classes, born_s, reused_s, counts = table[:, 0].astype(np.intp), table[:, 1], table[:, 2], table[:, 3]
            self._count_time(classes, born_s, reused_s, counts)
            self._hazards.count_events(classes, reused_s - born_s, counts)
            self._reuses.clear()
        self._hazards.fade(_FADE_PER_REQUEST ** (self._request_count - self._refreshed_at))
        self._refreshed_s, self._refreshed_at = now_s, self._request_count
        live = np.flatnonzero(self._is_live)
        if len(live):
            self._reckon(live)
        pause = min(max(self._request_count // 4, _REFRESH_REQUESTS_MIN), _REFRESH_REQUESTS_MAX)
        self._next_refresh = self._request_count + max(pause, len(active) // _COHORTS_PER_REQUEST)

    def _count_time(self, classes: NDArray[np.int64], born_s: Floats, until_s: Floats, counts: Floats) -> None:
        since_s = np.maximum(self._refreshed_s - born_s, 0.0)
        self._hazards.count_time(classes, since_s, until_s - born_s, counts)

    def _reckon(self, classes: NDArray[np.intp]) -> None:
        index = gittins_index(self._hazards.of(classes), WIDTHS_S)
        self._array[classes] = index
        for number, row in zip(classes.tolist(), index.tolist(), strict=True):
            self._table[number] = row

    def _row(self, number: int) -> list[float]:
        row = self._table[number]
        if row is None:
            self._is_live[number] = True
            self._reckon(np.array([number]))
            row = self._table[number]
            assert row is not None, f"class {number} is worth nothing"
        return row

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._born_s.append(0.0)
        self._class_of.append(0)
        self._waiting.append(0.0)
        self._cohorts.append(None)
        return len(self._born_s) - 1

    def _take_out(self, cohort: Cohort, count: int) -> None:
        cohort.waiting_count = left = cohort.waiting_count - count
        assert left >= 0, f"{-left} blocks more than there were"
        self._waiting[cohort.slot] = left
        if not left:
            self._free.append(cohort.slot)
            self._cohorts[cohort.slot] = None
            cohort.slot = -1


def _pool_of(number: int) -> int:
    """Its class without the band."""
    group, kind = divmod(number, _BAND_COUNT * 4)
    return group * 4 + kind % 4
