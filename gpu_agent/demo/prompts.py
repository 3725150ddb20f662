"""Long real text that is on every machine, cut into the prompts of the demo."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidArgumentError

TOKENS_PER_BLOCK = 16
QUESTIONS = (
    "\n\nQuestion: What does this document say about copies?\nAnswer:",
    "\n\nQuestion: Who wrote it, and for whom?\nAnswer: It",
)
_TEXTS = (
    "/usr/share/common-licenses/GPL-3",
    "/usr/share/common-licenses/GPL-2",
    f"{sysconfig.get_path('stdlib')}/LICENSE.txt",
    f"{sys.base_prefix}/LICENSE.txt",
    f"{sys.base_prefix}/LICENSE",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Token ids of one document with two questions."""

    document_tokens: int
    first: tuple[int, ...]
    second: tuple[int, ...]


def find_document(path: str | None) -> tuple[str, str]:
    """Name and text of the document: the one given, else a license text, else Python's own help topics."""
    if path is not None:
        return path, Path(path).read_text(encoding="utf-8", errors="replace")
    for candidate in _TEXTS:
        if Path(candidate).is_file():
            return candidate, Path(candidate).read_text(encoding="utf-8", errors="replace")
    from pydoc_data.topics import topics

    return "Python's help topics", "\n\n".join(topics.values())


def build_prompts(
    tokenizer: Any, text: str, *, token_count: int, part: int, part_count: int, tokens_per_block: int
) -> Prompts:
    """Two prompts of about `token_count` tokens on part `part` of the text; parts begin at different places.

    Each part is the text turned to begin elsewhere, so that no two parts share a block however short it is.
    """
    prefix, body = split_special(tokenizer, text)
    questions = [tokenizer(question, add_special_tokens=False).input_ids for question in QUESTIONS]
    start = len(body) * part // part_count
    turned = [*body[start:], *body[:start]]
    room = token_count - max(len(question) for question in questions) - len(prefix)
    document = [*prefix, *turned[: max(room, 0)]]
    if len(document) < 4 * tokens_per_block:
        raise InvalidArgumentError.of(
            "document", f"{len(document)} tokens", f"at least {4 * tokens_per_block} tokens (4 blocks)"
        )
    first, second = ((*document, *question) for question in questions)
    return Prompts(document_tokens=len(document), first=first, second=second)


def split_special(tokenizer: Any, text: str) -> tuple[list[int], Sequence[int]]:
    """What the tokenizer puts before a text (such as `<bos>`), and the text's own ids."""
    plain: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    whole: list[int] = tokenizer(text, verbose=False).input_ids
    lead_count = next((n for n in range(len(whole) - len(plain) + 1) if whole[n : n + len(plain)] == plain), 0)
    return whole[:lead_count], plain
