"""A small engine: continuous batching of long sequences, greedy, with its K and V in whatever pool it is given."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pool_cache import Row, pool_cache

from gpu_agent.bench.pools import Pool
from gpu_agent.bench.serving import Step
from kvstore.keys import BlockHash, hash_blocks
from kvstore.layout import BlockLayout
from kvstore.slots import SlotId
from kvstore_client.integrations.transformers.identity import cache_argument


@dataclass(slots=True)
class Running:
    ids: list[int]
    """Prompt, and what was generated behind it."""
    held_count: int = 0
    """Tokens whose K and V are in the pool or were."""
    blocks: list[BlockHash] = field(default_factory=list)
    slots: list[SlotId] = field(default_factory=list)
    """Of full blocks, while the sequence runs."""
    open_slots: list[SlotId] = field(default_factory=list)
    generated_count: int = 0
    first_token_s: float | None = None


@dataclass(slots=True)
class Served:
    """What a run took, and what it said."""

    answers: dict[str, list[int]]
    logits_digest: str
    """Of the logits of every token of every sequence."""
    wall_s: float
    stall_s: float
    ttft_s: float
    """Mean time from the start of all to a sequence's first token."""
    peak_bytes: int
    recomputed_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers.values())) / self.wall_s


class Engine:
    def __init__(self, model: Any, pool: Pool, layout: BlockLayout) -> None:
        self._model = model
        self._pool = pool
        self._layout = layout
        self._digest = hashlib.sha256()
        self._stall_s = 0.0
        self._recomputed_tokens = 0

    def serve(
        self, prompts: dict[str, list[int]], steps: Sequence[Step], *, progress: Callable[[float], None]
    ) -> Served:
        sequences = {name: Running(list(ids)) for name, ids in prompts.items()}
        started_s = time.perf_counter()
        for done_count, step in enumerate(steps, start=1):
            self._step(step, sequences, started_s=started_s)
            progress(done_count / len(steps))
        first_tokens_s = [one.first_token_s for one in sequences.values() if one.first_token_s is not None]
        return Served(
            answers={name: one.ids[len(prompts[name]) :] for name, one in sequences.items()},
            logits_digest=self._digest.hexdigest(),
            wall_s=time.perf_counter() - started_s,
            stall_s=self._stall_s,
            ttft_s=sum(first_tokens_s) / len(first_tokens_s),
            peak_bytes=self._pool.peak_count * self._layout.payload_bytes,
            recomputed_tokens=self._recomputed_tokens,
        )

    def _step(self, step: Step, sequences: dict[str, Running], *, started_s: float) -> None:
        before_s = time.perf_counter()
        self._pool.step(step.queue)
        for name in step.starts:
            self._start(name, sequences[name])
        for work in step.works:
            self._open(sequences[work.sequence], work.new_count)
        self._stall_s += time.perf_counter() - before_s

        for work in step.works:
            if work.is_prefill:
                self._compute({work.sequence: sequences[work.sequence]}, work.new_count)
        self._compute({work.sequence: sequences[work.sequence] for work in step.works if not work.is_prefill}, 1)
        for work in step.works:
            one = sequences[work.sequence]
            if one.generated_count and one.first_token_s is None:
                one.first_token_s = time.perf_counter() - started_s

        before_s = time.perf_counter()
        for name in step.ends:
            self._pool.stop(name)
        self._stall_s += time.perf_counter() - before_s

    def _start(self, name: str, one: Running) -> None:
        """All of its K and V have to be in the pool; what is lost is computed again."""
        one.slots = self._pool.start(name, one.blocks)
        lost_count = len(one.blocks) - len(one.slots)
        if lost_count:
            self._pool.discard(one.open_slots)
            target_count, one.held_count, one.open_slots = one.held_count, len(one.slots) * self._tokens, []
            del one.blocks[len(one.slots) :]
            count = target_count - one.held_count
            self._recomputed_tokens += count
            self._open(one, count)
            self._forward([(name, one)], count)

    @property
    def _tokens(self) -> int:
        return self._layout.tokens_per_block

    def _open(self, one: Running, new_count: int) -> None:
        """Slots for the blocks that the next tokens go to."""
        block_count = -(-(one.held_count + new_count) // self._tokens)
        missing_count = block_count - len(one.blocks) - len(one.open_slots)
        if missing_count:
            one.open_slots += self._pool.reserve(missing_count)

    def _compute(self, batch: dict[str, Running], new_count: int) -> None:
        """Appends tokens to sequences, and generates the next ones of those whose prompts are through."""
        if not batch:
            return
        logits = self._forward(list(batch.items()), new_count)
        for one, row in zip(batch.values(), logits, strict=True):
            if one.held_count == len(one.ids):
                self._digest.update(row.float().cpu().numpy().tobytes())
                one.ids.append(int(row.argmax()))
                one.generated_count += 1

    def _forward(self, batch: list[tuple[str, Running]], new_count: int) -> torch.Tensor:
        rows = [Row([*one.slots, *one.open_slots], one.held_count) for _, one in batch]
        past_count = max(row.token_count for row in rows)
        device = self._model.device
        ids = [one.ids[one.held_count : one.held_count + new_count] for _, one in batch]
        positions = [range(row.token_count, row.token_count + new_count) for row in rows]
        mask = torch.zeros((len(rows), past_count + new_count), dtype=torch.long, device=device)
        for row, row_mask in zip(rows, mask, strict=True):
            row_mask[past_count - row.token_count :] = 1
        with torch.no_grad():
            output = self._model(
                input_ids=torch.tensor(ids, device=device),
                attention_mask=mask,
                position_ids=torch.tensor([list(one) for one in positions], device=device),
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(self._model): pool_cache(self._pool.memory, self._layout, self._model.dtype, rows)},
            )
        for name, one in batch:
            one.held_count += new_count
            self._seal(name, one)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _seal(self, name: str, one: Running) -> None:
        """Blocks that are full now can be found, and moved, from here on."""
        new_count = one.held_count // self._tokens - len(one.blocks)
        if new_count:
            slots, one.open_slots = one.open_slots[:new_count], one.open_slots[new_count:]
            full = one.ids[: one.held_count // self._tokens * self._tokens]
            one.blocks = list(hash_blocks(full, tokens_per_block=self._tokens))
            one.slots = self._pool.seal(name, slots, one.blocks)
