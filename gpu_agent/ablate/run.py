"""Runs a model over the same text once for every setting, all of them in step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_agent.ablate.past import Past
from gpu_agent.ablate.scoring import Reference, Tally
from gpu_agent.ablate.settings import Score, Setting, Stage
from gpu_agent.ablate.texts import Passage
from kvstore.errors import InvalidArgumentError
from kvstore.layout import BlockLayout, LayoutOrder
from kvstore.precision import LOSSY_DTYPES
from kvstore_client.integrations.transformers.blocks import CacheShape
from kvstore_client.integrations.transformers.identity import cache_argument, forward_arguments, probe

LANES_MAX = 8
"""Settings in one forward. Eight blocks of 32 tokens fill a CPU's matrix units; more only take more memory."""

OnForward = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model that is measured; it computes in float32, and what is stored has the dtype its weights came in."""

    model: Any
    shape: CacheShape
    stored_dtype: torch.dtype
    layer_types: tuple[str, ...] | None
    tokens_max: int | None

    @classmethod
    def of(cls, model: Any, *, stored_dtype: torch.dtype) -> Subject:
        """Raises `InvalidArgumentError` for a model whose cache is not K and V of every token in every layer."""
        name = str(stored_dtype).removeprefix("torch.")
        if name not in LOSSY_DTYPES:
            raise InvalidArgumentError.of("--model", f"one in {name}", f"one in {', '.join(LOSSY_DTYPES)}")
        shape = probe(model)
        config = model.config.get_text_config(decoder=True)
        return cls(
            model=model,
            shape=shape,
            stored_dtype=stored_dtype,
            layer_types=tuple(getattr(config, "layer_types", None) or ()) or None,
            tokens_max=getattr(config, "max_position_embeddings", None),
        )

    def layout(self, *, tokens_per_block: int) -> BlockLayout:
        return BlockLayout(
            order=LayoutOrder.HND,
            num_layers=self.shape.num_layers,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            v_head_dim=self.shape.v_head_dim,
            tokens_per_block=tokens_per_block,
            dtype=str(self.stored_dtype).removeprefix("torch."),
        )


def forward_count(passages: Sequence[Passage], *, setting_count: int, tokens_per_block: int) -> int:
    """How often `measure` will call `on_forward`."""
    lanes = len(_lanes(list(range(setting_count))))
    return lanes * sum(-(-len(passage.ids) // tokens_per_block) for passage in passages)


def measure(
    subject: Subject,
    settings: Sequence[Setting],
    passages: Sequence[Passage],
    *,
    tokens_per_block: int,
    on_forward: OnForward,
) -> dict[Setting, Score]:
    """The scores of all settings, the first of which is exact."""
    assert settings[0].stage is Stage.BASE, settings[0]
    run = _Run(subject, settings, tokens_per_block=tokens_per_block, on_forward=on_forward)
    with torch.no_grad():
        for passage in passages:
            run.read(passage)
    tallies = run.tallies
    return {setting: tally.score(tallies[0]) for setting, tally in zip(settings, tallies, strict=True)}


class _Run:
    def __init__(
        self, subject: Subject, settings: Sequence[Setting], *, tokens_per_block: int, on_forward: OnForward
    ) -> None:
        self.tallies = [Tally() for _ in settings]
        self._subject = subject
        self._settings = settings
        self._tokens_per_block = tokens_per_block
        self._on_forward = on_forward
        self._limits_logits = "logits_to_keep" in forward_arguments(subject.model)
        self._cache_argument = cache_argument(subject.model)

    def read(self, passage: Passage) -> None:
        lanes = [(rows, self._past(rows)) for rows in _lanes(list(range(len(self._settings))))]
        ids = torch.tensor(passage.ids, device=self._subject.model.device)
        right: list[set[int]] = [set() for _ in self._settings]
        for start in range(0, len(ids), self._tokens_per_block):
            stop = min(start + self._tokens_per_block, len(ids))
            # Where a token is the last, there is none that it could have told.
            kept = range(max(start, passage.first_looked_at - 1), min(stop, len(ids) - 1))
            reference: Reference | None = None
            for rows, past in lanes:
                logits = self._forward(ids[start:stop], past, row_count=len(rows), keep_count=stop - kept.start)
                if kept:
                    reference = reference or Reference.of(logits[0, : len(kept)])
                    targets = ids[kept.start + 1 : kept.stop + 1]
                    for row, own in zip(rows, logits[:, : len(kept)], strict=True):
                        if passage.scored:
                            self.tallies[row].add(own, targets, reference)
                        else:
                            right[row] |= {kept.start + 1 + int(at) for at in (own.argmax(-1) == targets).nonzero()}
                if stop - start == self._tokens_per_block:
                    past.block_filled()
                self._on_forward()
        for rows, past in lanes:
            for row, refused_count in zip(rows, past.refused_counts, strict=True):
                tally = self.tallies[row]
                tally.refused_count += refused_count
                tally.recalled += [right[row].issuperset(answer) for answer in passage.answers]

    def _past(self, rows: Sequence[int]) -> Past:
        return Past(
            [self._settings[row] for row in rows],
            tokens_per_block=self._tokens_per_block,
            stored_dtype=self._subject.stored_dtype,
        )

    def _forward(self, ids: Tensor, past: Past, *, row_count: int, keep_count: int) -> Tensor:
        """Logits [rows, tokens, vocabulary] of the last `keep_count` tokens, of one at least."""
        keep_count = max(keep_count, 1)
        limit: dict[str, Any] = {"logits_to_keep": keep_count} if self._limits_logits else {}
        output = self._subject.model(
            input_ids=ids.expand(row_count, -1), use_cache=True, **{self._cache_argument: past.cache}, **limit
        )
        logits: Tensor = output.logits
        return logits[:, -keep_count:]


def _lanes(rows: list[int]) -> list[list[int]]:
    """The rows in as few forwards as memory allows, about equally many in each."""
    count = -(-len(rows) // LANES_MAX)
    return [rows[len(rows) * part // count : len(rows) * (part + 1) // count] for part in range(count)]
