"""Telling the store how answers ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kvstore.keys import BlockHash
from kvstore.messages import FinishReason
from kvstore_client.hints import Hint
from kvstore_client.integrations.transformers.generate import GenerateSettings, without_padding_behind
from kvstore_client.integrations.transformers.prompts import Prompts


def tell_ends(
    prompts: Prompts,
    sequences: torch.Tensor,
    settings: GenerateSettings,
    *,
    hint: Hint | None,
    hash_blocks: Callable[[torch.Tensor], Sequence[BlockHash]],
    tell: Callable[[Sequence[BlockHash], Hint], None],
) -> None:
    """Of the blocks of each prompt and its answer: whether that has come to its end, or became too long."""
    for prompt, sequence in zip(prompts.rows, sequences, strict=True):
        answer = without_padding_behind(sequence[prompts.column_count :], settings.eos_token_ids)
        hashes = hash_blocks(torch.cat([prompt.cpu(), answer.cpu()]))
        if not hashes:
            continue
        has_ended = len(answer) > 0 and int(answer[-1]) in settings.eos_token_ids
        ended = replace(
            hint or Hint(),
            input_tokens=len(prompt),
            output_tokens=len(answer),
            finish=FinishReason.END_TURN if has_ended else FinishReason.OTHER,
        )
        tell(hashes, ended)
