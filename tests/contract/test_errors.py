from __future__ import annotations

import inspect
import re
from pathlib import Path

import grpc
import pytest

from kvstore import errors
from kvstore.errors import InvalidArgumentError, KvstoreError, error_from_status


def tree() -> list[type[KvstoreError]]:
    return [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, KvstoreError) and kind is not KvstoreError
    ]


@pytest.mark.parametrize("kind", tree())
def test_an_error_comes_out_of_the_wire_as_it_went_in(kind: type[KvstoreError]) -> None:
    error = error_from_status(status=kind.grpc_status, reason=kind.reason, message="why")
    assert type(error) is kind
    assert str(error) == "why"


def test_reasons_are_unique_and_statuses_are_those_of_grpc() -> None:
    reasons = [kind.reason for kind in tree()]
    assert len(set(reasons)) == len(reasons)
    assert {kind.grpc_status for kind in tree()} <= set(grpc.StatusCode.__members__)


@pytest.mark.parametrize("status", sorted(grpc.StatusCode.__members__))
@pytest.mark.parametrize("reason", [None, "OF_A_LATER_VERSION"])
def test_every_status_is_an_error_of_the_tree_that_keeps_the_message(status: str, reason: str | None) -> None:
    error = error_from_status(status=status, reason=reason, message="why")
    assert type(error) in tree()
    assert "why" in str(error)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("CANCELLED", errors.UnavailableError),
        ("UNKNOWN", errors.UnavailableError),
        ("UNAVAILABLE", errors.UnavailableError),
        ("DEADLINE_EXCEEDED", errors.DeadlineExceededError),
        ("INTERNAL", errors.InternalError),
        ("UNIMPLEMENTED", errors.InternalError),
        ("no status at all", errors.InternalError),
    ],
)
def test_a_status_without_a_reason_reads_as_what_it_usually_means(status: str, kind: type[KvstoreError]) -> None:
    assert type(error_from_status(status=status, reason=None, message="")) is kind


def test_a_wrong_argument_is_named_with_its_value_and_what_is_allowed() -> None:
    error = InvalidArgumentError.of("num_layers", 0, "1 to 1048576")
    assert str(error) == "num_layers is 0; allowed: 1 to 1048576"
    assert isinstance(error, ValueError)


def test_a_huge_wrong_argument_does_not_flood_the_log() -> None:
    assert len(str(InvalidArgumentError.of("salt", bytes(10_000), "less"))) < 200


def test_the_page_has_a_row_for_each_error_in_the_words_of_its_docstring() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "formats" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| (.+) \|$", page, flags=re.MULTILINE)
    assert rows == [(kind.reason, kind.grpc_status, kind.__name__, inspect.getdoc(kind)) for kind in tree()]
    assert f"`{errors.REASON_METADATA_KEY}`" in page
