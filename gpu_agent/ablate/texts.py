"""What the model reads: windows of the text, and the same windows with facts hidden in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_agent.demo.prompts import split_special
from kvstore.errors import InvalidArgumentError

BUNDLED = Path(__file__).with_name("text.txt")
WINDOW_COUNT_MIN = 2
"""One window would tell nothing of how much chance there is in a figure."""

_PLACES = ("harbour", "library", "bakery", "station", "museum", "garden", "theatre", "castle")
_NEEDLE_SHARE = 0.25
"""The most that facts and questions take of a window; the rest is what they are hidden in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Tokens that the model reads, and which of them are looked at."""

    ids: tuple[int, ...]
    scored: range
    """Tokens whose probability is measured."""
    answers: tuple[range, ...]
    """Tokens that are right only together."""

    @property
    def first_looked_at(self) -> int:
        return min([self.scored.start] if self.scored else [answer.start for answer in self.answers])


def read_texts(paths: Sequence[Path]) -> str:
    """The files one after the other, or the text that comes with this package."""
    parts = []
    for path in paths or (BUNDLED,):
        try:
            parts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError.of(
                "--text", str(path), f"files of UTF-8 text that can be read ({error})"
            ) from error
    return "\n\n".join(parts)


def cut_windows(
    tokenizer: Any, text: str, *, window_tokens: int, window_count_max: int, first_scored: int
) -> list[Passage]:
    """Neighbouring parts of the text, each behind what the tokenizer puts before a text.

    Their first `first_scored` tokens are not scored: nothing before them could have been stored.
    """
    prefix, body = split_special(tokenizer, text)
    room = window_tokens - len(prefix)
    count = min(window_count_max, len(body) // room)
    if count < WINDOW_COUNT_MIN:
        needed = WINDOW_COUNT_MIN * room
        raise InvalidArgumentError.of(
            "--text", f"{len(body)} tokens", f"at least {needed}, for two windows of {window_tokens} (--window-tokens)"
        )
    return [
        Passage(ids=(*prefix, *body[start : start + room]), scored=range(first_scored, window_tokens), answers=())
        for start in range(0, count * room, room)
    ]


def hide_needles(tokenizer: Any, windows: Sequence[Passage], *, tokens_per_block: int, seed: int) -> list[Passage]:
    """Each window with facts in it at even distances, and at its end what asks for them; nothing if none fits."""
    return [
        hidden
        for index, window in enumerate(windows)
        if (hidden := _hide(tokenizer, window, tokens_per_block, random.Random(f"{seed}/{index}"))) is not None
    ]


def _hide(tokenizer: Any, window: Passage, tokens_per_block: int, chance: random.Random) -> Passage | None:
    def ids_of(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return found

    places = list(_PLACES)
    chance.shuffle(places)
    needles, questions, answers = [], [], []
    used = 0
    for place in places:
        question = ids_of(f"\n\nThe secret number of the {place} is")
        answer = ids_of(f" {chance.randrange(1000, 10000)}")
        used += 2 * len(question) + 2 * len(answer)
        if used > _NEEDLE_SHARE * len(window.ids):
            break
        needles.append([*question, *answer, *ids_of(".\n\n")])
        questions.append(question)
        answers.append(answer)
    if not needles:
        return None
    tail: list[int] = []
    spans = []
    for question, answer in zip(questions, answers, strict=True):
        tail += question
        spans.append(range(len(tail), len(tail) + len(answer)))
        tail += answer
    # No fact in the last block before the questions: there it might not have been stored yet.
    filler = window.ids[: len(window.ids) - len(tail) - sum(map(len, needles)) - tokens_per_block]
    ids: list[int] = []
    for index, needle in enumerate(needles):
        start, stop = (len(filler) * part // len(needles) for part in (index, index + 1))
        ids += [*filler[start : (start + stop) // 2], *needle, *filler[(start + stop) // 2 : stop]]
    ids += window.ids[len(filler) : len(filler) + tokens_per_block]
    start = len(ids)
    return Passage(
        ids=(*ids, *tail),
        scored=range(0),
        answers=tuple(range(start + span.start, start + span.stop) for span in spans),
    )
