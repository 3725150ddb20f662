"""What the store is told of vLLM's requests, and that nothing a caller says can hurt the engine."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvstore_client import FinishReason, Hint
from kvstore_client.integrations.vllm.hints import Hints
from tests.integrations.vllm.fakes import make_request

TOOL_TOKEN = 7


@pytest.fixture
def hints() -> Hints:
    return Hints(tool_stop_token_ids=[TOOL_TOKEN])


def ended(status: str, *answer: int, **fields: Any) -> Any:
    return make_request(
        tokens=12, status=status, output_token_ids=list(answer), num_output_tokens=len(answer), **fields
    )


def test_what_the_engine_knows_is_told_without_being_asked(hints: Hints) -> None:
    request = make_request(tokens=12, session_id="a chat", priority=-1)
    assert hints.of(request) == Hint(session="a chat", input_tokens=12, priority=1)


def test_what_a_caller_says_counts_for_more(hints: Hints) -> None:
    said = {
        "kvstore.session": "an agent",
        "kvstore.turn": 4,
        "kvstore.expected_return_s": 9.5,
        "kvstore.is_done": True,
        "kvstore.priority": -2,
        "kvstore.ttl_s": 60,
        "do_remote_prefill": False,
    }
    request = make_request(tokens=12, session_id="a chat", priority=-1, kv_transfer_params=said)
    assert hints.of(request) == Hint(
        session="an agent", turn=4, input_tokens=12, expected_return_s=9.5, is_done=True, priority=-2, ttl_s=60
    )


@pytest.mark.parametrize(
    ("status", "answer", "finish"),
    [
        ("FINISHED_STOPPED", (1, 2), FinishReason.END_TURN),
        ("FINISHED_STOPPED", (1, TOOL_TOKEN), FinishReason.TOOL_USE),
        ("FINISHED_STOPPED", (), FinishReason.END_TURN),
        ("FINISHED_LENGTH_CAPPED", (1, TOOL_TOKEN), FinishReason.OTHER),
        ("FINISHED_ABORTED", (1,), FinishReason.OTHER),
        ("a status of later versions", (1,), FinishReason.OTHER),
    ],
)
def test_how_an_answer_ended_is_told_when_it_has(
    hints: Hints, status: str, answer: tuple[int, ...], finish: FinishReason
) -> None:
    request = ended(status, *answer)
    assert hints.of(request, is_over=True) == Hint(input_tokens=12, output_tokens=len(answer), finish=finish)
    assert hints.of(request).finish is FinishReason.UNKNOWN


@pytest.mark.parametrize(("priority", "told"), [(0, 0), (-100, 2), (100, -2), (2, -2)])
def test_vllms_priorities_the_lowest_being_the_first_become_ours(hints: Hints, priority: int, told: int) -> None:
    assert hints.of(make_request(tokens=4, priority=priority)).priority == told


@pytest.mark.parametrize(
    "said",
    [
        {"kvstore.session": 5},
        {"kvstore.priority": "high"},
        {"kvstore.ttl_s": -1},
        {"kvstore.unheard_of": 1},
        {"kvstore.session": "\ud800"},
    ],
)
def test_what_a_caller_says_wrongly_is_left_out_and_said_once(
    hints: Hints, said: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.kvstore"):
        for _ in range(3):
            assert hints.of(make_request(tokens=12, kv_transfer_params=said)) == Hint(input_tokens=12)
    assert len(caplog.records) == 1
    assert "kv_transfer_params" in caplog.text


def test_a_session_that_cannot_be_one_does_not_reach_the_engine(hints: Hints) -> None:
    assert hints.of(make_request(tokens=12, session_id="x" * 5000)) == Hint(input_tokens=12)
