"""The ways of one client: what a failure of one closes, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from kvstore.errors import UnavailableError
from kvstore.messages import TransferPath
from kvstore_client import ClientConfig
from kvstore_client.flows.steps import Send
from kvstore_client.paths.bulk import BulkMover
from kvstore_client.paths.mover import TransferRefusedError
from kvstore_client.paths.nixl import NixlMetadata, check_installed
from kvstore_client.paths.ways import Ways
from tests.client.builders import namespace
from tests.client.test_choose import INFO, REMOTE


def step(path: TransferPath, **fields: object) -> Send:
    return replace(
        Send(path=path, namespace=namespace(), hashes=[], blocks=[], slots=b"", ticket=b"", timeout_s=1.0),
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture
def ways() -> Iterator[Ways]:
    with closing(Ways(REMOTE, config=ClientConfig())) as made:
        made.note_info(INFO)
        yield made


def test_a_refused_transfer_costs_itself_and_not_the_path(ways: Ways) -> None:
    bulk = step(TransferPath.BULK)
    mover = ways.mover(bulk)
    assert isinstance(mover, BulkMover)
    ways.note_failure(bulk, TransferRefusedError("no such ticket"))
    assert ways.route(is_write=True).path is TransferPath.BULK
    assert ways.mover(bulk) is mover
    ways.note_failure(bulk, UnavailableError("the port is gone"))
    assert ways.route(is_write=True).path is TransferPath.STREAM
    assert ways.mover(bulk) is not mover


# --- NIXL: slots that were named to clients of one serving process may be others' when the next one serves


def nixl_metadata(name: bytes) -> bytes:
    return NixlMetadata(arena_bytes=4096, addresses=(4096,), agent=name).encode()


@pytest.fixture
def nixl_ways() -> Iterator[Ways]:
    try:
        check_installed()
    except UnavailableError as error:
        pytest.skip(str(error))
    with closing(Ways(REMOTE, config=ClientConfig(transport="nixl"))) as made:
        made.note_info(replace(INFO, nixl_metadata=nixl_metadata(b"first")))
        yield made


def test_what_was_reserved_before_nixl_restarted_is_not_written_afterwards(nixl_ways: Ways) -> None:
    early = step(TransferPath.NIXL, owner_id=nixl_ways.route(is_write=True).owner_id)
    mover = nixl_ways.mover(early)
    nixl_ways.note_info(replace(INFO, nixl_metadata=nixl_metadata(b"first")))
    assert nixl_ways.mover(early) is mover
    nixl_ways.note_info(replace(INFO, nixl_metadata=nixl_metadata(b"second")))
    with pytest.raises(UnavailableError, match="restarted meanwhile"):
        nixl_ways.mover(early)
    late = step(TransferPath.NIXL, owner_id=nixl_ways.route(is_write=True).owner_id)
    assert nixl_ways.mover(late) is not mover


def test_a_late_failure_does_not_end_the_connection_that_came_after(nixl_ways: Ways) -> None:
    early = step(TransferPath.NIXL, owner_id=nixl_ways.route(is_write=True).owner_id)
    nixl_ways.note_failure(early, UnavailableError("lost"))
    late = step(TransferPath.NIXL, owner_id=nixl_ways.route(is_write=True).owner_id)
    mover = nixl_ways.mover(late)
    nixl_ways.note_failure(early, UnavailableError("lost, too"))
    assert nixl_ways.mover(late) is mover


def test_nothing_is_reserved_where_nixl_is_not_offered(nixl_ways: Ways) -> None:
    nixl_ways.note_info(INFO)
    with pytest.raises(UnavailableError, match="the daemon does not offer it"):
        nixl_ways.route(is_write=True)
