"""From logits to what is told of a setting."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gpu_agent.ablate.settings import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the exact model says of some tokens."""

    log_probabilities: Tensor
    probabilities: Tensor
    best: Tensor
    scratch: Tensor
    """For one more such tensor: fresh memory of that size costs more than what is computed in it."""

    @classmethod
    def of(cls, logits: Tensor) -> Reference:
        log_probabilities = logits.float().log_softmax(-1)
        return cls(
            log_probabilities=log_probabilities,
            probabilities=log_probabilities.exp(),
            best=logits.argmax(-1),
            scratch=torch.empty_like(log_probabilities),
        )


@dataclass(slots=True, kw_only=True)
class Tally:
    """What has been seen of one setting: a number per scored token, in the same order for every setting."""

    losses: list[Tensor] = field(default_factory=list)
    divergences: list[Tensor] = field(default_factory=list)
    agreements: list[Tensor] = field(default_factory=list)
    recalled: list[bool] = field(default_factory=list)
    refused_count: int = 0

    def add(self, logits: Tensor, targets: Tensor, reference: Reference) -> None:
        """Logits [tokens, vocabulary], and the tokens that came."""
        log_probabilities = torch.log_softmax(logits.float(), -1, out=reference.scratch)
        self.losses.append(-log_probabilities.gather(-1, targets[:, None])[:, 0].cpu())
        self.agreements.append((logits.argmax(-1) == reference.best).cpu())
        gap = torch.sub(reference.log_probabilities, log_probabilities, out=reference.scratch)
        self.divergences.append(gap.mul_(reference.probabilities).sum(-1).clamp(min=0.0).cpu())

    def score(self, exact: Tally) -> Score:
        losses, exact_losses = _as_array(self.losses), _as_array(exact.losses)
        divergences = _as_array(self.divergences)
        changes = losses - exact_losses
        return Score(
            perplexity=math.exp(losses.mean()),
            change_percent=100 * math.expm1(changes.mean()),
            change_error_percent=100 * float(changes.std()) / math.sqrt(len(changes)),
            greedy_agreement=float(_as_array(self.agreements).mean()),
            kl_mean=float(divergences.mean()),
            kl_p99=float(np.quantile(divergences, 0.99)),
            needle_recall=sum(self.recalled) / len(self.recalled) if self.recalled else None,
            refused_count=self.refused_count,
        )


def _as_array(parts: list[Tensor]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return torch.cat(parts).double().numpy()
