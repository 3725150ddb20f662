"""What the demo found, and whether it is what the store promises. Pure: no process, no model, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TTFT_RATIO_MAX = 0.25
REUSE_SHARE_MIN = 0.95
RATIO_DOCUMENT_TOKENS_MIN = 1_500
RATIO_COLD_S_MIN = 1.0
"""Shorter documents and tiny models are computed so fast that the ratio says little; it is shown, and not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One answer through the store, held against the same model without one."""

    name: str
    prompt_tokens: int
    tokens_reused: int
    ttft_s: float
    stored_blocks: int
    is_identical: bool
    max_abs_kv_error: float | None
    """None where nothing was restored to compare."""
    compared_blocks: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """What the agent's pool went through."""

    sequence_bytes: int
    vram_cap_bytes: int
    peak_vram_bytes: int
    evicted_blocks: int
    eviction_batches: int
    reloaded_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    model: str
    document: str
    document_tokens: int
    tokens_per_block: int
    cold: Stage
    warm: Stage
    pressured: Stage
    after_kill: Stage
    pressure: Pressure
    killed_at_blocks: int
    """Blocks that the killed process had stored by then, of `killed_block_count`."""
    killed_block_count: int

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.cold, self.warm, self.pressured, self.after_kill)

    @property
    def ttft_ratio(self) -> float:
        return self.warm.ttft_s / self.cold.ttft_s

    @property
    def is_identical(self) -> bool:
        return all(stage.is_identical for stage in self.stages)

    @property
    def max_abs_kv_error(self) -> float:
        return max(stage.max_abs_kv_error or 0.0 for stage in self.stages)

    @property
    def document_block_tokens(self) -> int:
        """Tokens of the document's full blocks: the most that another question can reuse, give or take a block."""
        return self.document_tokens // self.tokens_per_block * self.tokens_per_block

    def broken_promises(self) -> list[str]:
        """What is not as promised, one sentence each."""
        pressure = self.pressure
        broken = [
            f"{stage.name}: the answer differs from the model's own" for stage in self.stages if not stage.is_identical
        ]
        broken += [
            f"{stage.name}: no restored block to compare" for stage in self.stages[1:] if not stage.compared_blocks
        ]
        if self.max_abs_kv_error != 0.0:
            broken.append(f"restored K/V differ from those computed by up to {self.max_abs_kv_error}")
        is_long = self.document_tokens >= RATIO_DOCUMENT_TOKENS_MIN and self.cold.ttft_s >= RATIO_COLD_S_MIN
        if is_long and self.ttft_ratio > TTFT_RATIO_MAX:
            broken.append(f"time to first token warm/cold is {self.ttft_ratio:.2f}, above {TTFT_RATIO_MAX}")
        if self.warm.tokens_reused < REUSE_SHARE_MIN * self.document_block_tokens:
            broken.append(f"{self.warm.tokens_reused} of {self.document_block_tokens} document tokens were reused")
        if pressure.peak_vram_bytes > pressure.vram_cap_bytes:
            broken.append(f"the pool grew to {pressure.peak_vram_bytes} bytes, above {pressure.vram_cap_bytes}")
        if pressure.vram_cap_bytes >= pressure.sequence_bytes:
            broken.append(f"no pressure: the cap of {pressure.vram_cap_bytes} bytes holds the whole sequence")
        if not (pressure.evicted_blocks and pressure.reloaded_blocks):
            broken.append(
                f"no pressure: {pressure.evicted_blocks} blocks evicted, {pressure.reloaded_blocks} loaded back"
            )
        if not 0 < self.killed_at_blocks < self.killed_block_count:
            broken.append(
                f"not in mid-offload: killed with {self.killed_at_blocks} of {self.killed_block_count} blocks stored"
            )
        return broken

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt_tokens": self.warm.prompt_tokens,
            "cold_ttft_s": round(self.cold.ttft_s, 4),
            "warm_ttft_s": round(self.warm.ttft_s, 4),
            "ttft_ratio": round(self.ttft_ratio, 4),
            "tokens_reused": self.warm.tokens_reused,
            "identical_output": self.is_identical,
            "max_abs_kv_error": self.max_abs_kv_error,
            "evicted_blocks": self.pressure.evicted_blocks,
            "reloaded_blocks": self.pressure.reloaded_blocks,
            "peak_vram_bytes": self.pressure.peak_vram_bytes,
            "vram_cap_bytes": self.pressure.vram_cap_bytes,
            "document_tokens": self.document_tokens,
            "killed_at_blocks": self.killed_at_blocks,
            "killed_block_count": self.killed_block_count,
            "stages": [
                {
                    "name": stage.name,
                    "prompt_tokens": stage.prompt_tokens,
                    "tokens_reused": stage.tokens_reused,
                    "ttft_s": round(stage.ttft_s, 4),
                    "stored_blocks": stage.stored_blocks,
                    "identical_output": stage.is_identical,
                    "max_abs_kv_error": stage.max_abs_kv_error,
                    "compared_blocks": stage.compared_blocks,
                    "seconds": round(stage.seconds, 1),
                }
                for stage in self.stages
            ],
        }
