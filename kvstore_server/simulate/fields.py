"""Lines of a trace, field by field; what is wrong is told with the file and the line. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import Any

from kvstore.errors import InvalidArgumentError
from kvstore.eviction.use import Finish

TOKENS_MAX = 1 << 31
USED_BLOCKS_MAX = 1 << 26
"""Of all prompts together, where each is told by itself: until they are numbered they take 100 bytes each."""
COUNT_MAX = 1 << 53
"""Beyond it a JSON reader may not keep numbers apart."""
COMMON_FIELDS = frozenset({"session_id", "turn", "expected_return_s", "done", "priority", "ttl_s"})
"""Of a request in any format."""
_FINISH = {
    "tool_use": Finish.TOOL_USE,
    "tool_calls": Finish.TOOL_USE,
    "function_call": Finish.TOOL_USE,
    "end_turn": Finish.END_TURN,
    "stop": Finish.END_TURN,
    "stop_sequence": Finish.END_TURN,
}
"""As this format, OpenAI's and Anthropic's say it; whatever else is `other`."""

_SIMILAR_FROM = 0.8
"""Share of letters in common: `sesion_id` and `sessionId` are meant for `session_id`, and `user_id` is not."""
_NAMES_MAX = 100
"""Different unknown names that are told apart: a file may have any number of them."""


class Ignored:
    """Counts the lines that have a field which means nothing to us."""

    def __init__(self, known: Iterable[str]) -> None:
        self._known = frozenset(known)
        self.counts: dict[str, int] = {}

    def add(self, line: Line) -> None:
        for name in line.fields:
            if name not in self._known and (name in self.counts or len(self.counts) < _NAMES_MAX):
                self.counts[name] = self.counts.get(name, 0) + 1


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known field that is probably meant by another one, however it is joined; None: none is."""
    spelled = {_letters(one): one for one in known}
    found = get_close_matches(_letters(name), spelled, n=1, cutoff=_SIMILAR_FROM)
    return spelled[found[0]] if found else None


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


@dataclass(frozen=True, slots=True)
class Line:
    """One JSON object of a file, and where it is."""

    path: str
    number: int
    fields: Mapping[str, Any]

    @classmethod
    def parse(cls, path: str, number: int, text: str) -> Line:
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError: of a number with thousands of digits, too
            raise InvalidArgumentError(f"{path}, line {number} is no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise InvalidArgumentError.of(f"{path}, line {number}", fields, "a JSON object")
        return cls(path, number, fields)

    def check_used_blocks(self, count: int) -> None:
        """Raises where so many, up to this line, are more than can be numbered."""
        if count > USED_BLOCKS_MAX:
            where = f"{self.path}, up to line {self.number}"
            raise InvalidArgumentError.of(where, f"{count} blocks of prompts", f"{USED_BLOCKS_MAX} in a trace")

    def wrong(self, field: str, allowed: str) -> InvalidArgumentError:
        return InvalidArgumentError.of(f"{self.path}, line {self.number}: {field}", self.fields.get(field), allowed)

    def has(self, field: str) -> bool:
        return self.fields.get(field) is not None

    def first_of(self, *names: str) -> str | None:
        """The first of these fields that is there."""
        return next((name for name in names if self.has(name)), None)

    def integer(self, field: str, *, low: int = 0, high: int = COUNT_MAX) -> int:
        value = self.fields.get(field)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(field, f"a whole number from {low} to {high}")
        return value

    def optional_integer(self, field: str, *, low: int = 0, high: int = COUNT_MAX) -> int | None:
        return self.integer(field, low=low, high=high) if self.has(field) else None

    def number_of(self, field: str) -> float:
        """A number of 0 or more."""
        value = self.fields.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            raise self.wrong(field, "a number of 0 or more")
        return float(value)

    def flag(self, field: str) -> bool:
        value = self.fields.get(field, False)
        if not isinstance(value, bool) and value not in (0, 1, None):
            raise self.wrong(field, "true or false")
        return bool(value)

    def time_s(self, field: str, *, unit_s: float) -> float:
        """A number in this unit, or a date and time of ISO 8601."""
        value = self.fields.get(field)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError as error:
                raise self.wrong(field, "a number, or a time such as 2026-11-30T12:00:00Z") from error
        return self.number_of(field) * unit_s

    def integers(self, field: str, *, high: int) -> Sequence[int]:
        value = self.fields.get(field)
        if not isinstance(value, list) or any(type(one) is not int or not 0 <= one <= high for one in value):
            raise self.wrong(field, f"a list of whole numbers from 0 to {high}")
        return value

    def finish(self, *names: str) -> Finish:
        name = self.first_of(*names)
        if name is None:
            return Finish.UNKNOWN
        value = self.fields[name]
        if not isinstance(value, str):
            raise self.wrong(name, "tool_use, end_turn or other")
        return _FINISH.get(value.lower(), Finish.OTHER)
