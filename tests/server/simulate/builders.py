"""Small traces, by hand and at random."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from kvstore_server.simulate.trace import Numbering, Trace, TraceRequest

TOKENS_PER_BLOCK = 10
SMOKE = Path(__file__).parent / "data" / "smoke_mooncake_conv_300.jsonl.gz"


def trace_of(*prompts: str, sessions: Sequence[int] | None = None, step_s: float = 1.0) -> Trace:
    """A letter is a block of `TOKENS_PER_BLOCK` tokens; a request every `step_s`."""
    numbering = Numbering()
    requests = tuple(
        TraceRequest(
            time_s=index * step_s,
            input_tokens=TOKENS_PER_BLOCK * len(prompt),
            session_id=None if sessions is None else sessions[index],
            spans=numbering.spans(prompt),
        )
        for index, prompt in enumerate(prompts)
    )
    return Trace(name="made", tokens_per_block=TOKENS_PER_BLOCK, requests=requests, unique_blocks=len(numbering))


PROMPTS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=12)
"""Trees with branches, used again and again."""
