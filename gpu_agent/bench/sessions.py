"""Recorded sessions: what comes when, in engine steps and tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.errors import InvalidArgumentError

FORMAT = "kvstore-sessions-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session: what it adds to what was said before, and the answer."""

    pause_steps: int
    """Engine steps between the end of the answer before it, or the start of all, and its arrival."""
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    name: str
    turns: tuple[Turn, ...]

    @property
    def token_count(self) -> int:
        """Of the whole session, when it is over."""
        return sum(turn.input_tokens + turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """Sessions of one engine. What several of them have in common counts as each one's own."""

    source: str
    licence: str
    compress: int
    """Lengths and pauses were divided by this, so a cool-down is to be, too."""
    tokens_per_block: int
    sessions: tuple[Session, ...]


def parse_sessions(found: Mapping[str, Any]) -> Sessions:
    """From JSON: `sessions` is a list per session of [pause_steps, input_tokens, output_tokens] per turn."""
    if found.get("format") != FORMAT:
        raise InvalidArgumentError.of("format", found.get("format"), FORMAT)
    sessions = tuple(
        Session(name=f"session-{number}", turns=tuple(_turn(*turn) for turn in turns))
        for number, turns in enumerate(found["sessions"])
    )
    if not all(session.turns for session in sessions):
        raise InvalidArgumentError.of("sessions", "a session without turns", "at least one turn each")
    return Sessions(
        source=found["source"],
        licence=found["licence"],
        compress=found["compress"],
        tokens_per_block=found["tokens_per_block"],
        sessions=sessions,
    )


def to_json(sessions: Sessions) -> dict[str, Any]:
    """The inverse of `parse_sessions`."""
    return {
        "format": FORMAT,
        "source": sessions.source,
        "licence": sessions.licence,
        "compress": sessions.compress,
        "tokens_per_block": sessions.tokens_per_block,
        "sessions": [_numbers(session.turns) for session in sessions.sessions],
    }


def _turn(pause_steps: int, input_tokens: int, output_tokens: int) -> Turn:
    if pause_steps < 0 or input_tokens < 1 or output_tokens < 1:
        raise InvalidArgumentError.of(
            "turn", [pause_steps, input_tokens, output_tokens], "a pause of 0 steps or more, 1 token or more each way"
        )
    return Turn(pause_steps=pause_steps, input_tokens=input_tokens, output_tokens=output_tokens)


def _numbers(turns: Sequence[Turn]) -> list[list[int]]:
    return [[turn.pause_steps, turn.input_tokens, turn.output_tokens] for turn in turns]
