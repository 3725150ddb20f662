"""Whether blocks will be used again soon: a small logistic regression that learns as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt

_RATE = 0.08
_FLOOR = 1e-6


class ReturnModel:
    """P(reuse) of what has a set of features, given as indices of weights; trained with Adagrad (Duchi 2011)."""

    def __init__(self, size: int) -> None:
        self._weights = [0.0] * size
        self._weight_of = self._weights.__getitem__
        self._squares = [_FLOOR] * size

    def set_prior(self, feature: int, weight: float) -> None:
        self._weights[feature] = weight

    def score(self, features: Sequence[int]) -> float:
        """Log odds; those of disjoint sets of features add up."""
        return sum(map(self._weight_of, features))

    def learn(self, features: Sequence[int], *, error: float) -> None:
        """One step against an error: what was predicted less what came, times the weight of the example."""
        weights, squares, square = self._weights, self._squares, error * error
        step = _RATE * error
        for feature in features:
            squares[feature] = total = squares[feature] + square
            weights[feature] -= step / sqrt(total)


def probability(score: float) -> float:
    return 1.0 / (1.0 + exp(-score)) if score > -500.0 else 0.0
