"""A model small enough for tests, in a folder like a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from tests.transformers.conftest import build_model


def save_tiny_model(path: Path, family: str = "gemma3", **changes: Any) -> Path:
    """Random weights and a byte-level tokenizer with a token before every text."""
    save_byte_tokenizer(path)
    build_model(family, **changes).save_pretrained(path)
    return path


def save_byte_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>").save_pretrained(path)
