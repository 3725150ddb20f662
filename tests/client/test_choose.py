"""Which way blocks travel, from what is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore import messages as m
from kvstore.messages import Epoch, TransferPath
from kvstore_client.paths.choose import RETRY_S, Choice, transport_in_force
from tests.client.builders import refuses

UNIX, LOOPBACK, REMOTE = "unix:/run/kvstore/kvstore.sock", "127.0.0.1:7450", "10.0.0.7:7450"
INFO = m.StoreInfo(
    version="1",
    protocol_version=1,
    epoch=Epoch(b"1" * 16),
    uptime_s=0.0,
    draining=False,
    batch_count_max=1,
    frame_data_bytes_max=1,
    slab_socket="/run/kvstore/kvstore.sock.slab",
    bulk_port=7452,
)


def choice(address: str, *, transport: str = "auto", offers: m.StoreInfo | None = INFO) -> Choice:
    return Choice(transport=transport, address=address, offers=offers)


@pytest.mark.parametrize(
    ("address", "offers", "socket"),
    [
        (UNIX, None, "/run/kvstore/kvstore.sock.slab"),
        (LOOPBACK, None, None),
        (LOOPBACK, INFO, "/run/kvstore/kvstore.sock.slab"),
        (LOOPBACK, replace(INFO, slab_socket=""), None),
        ("localhost:1", INFO, "/run/kvstore/kvstore.sock.slab"),
        ("[::1]:1", INFO, "/run/kvstore/kvstore.sock.slab"),
        (REMOTE, INFO, None),
        ("127.example.com:1", INFO, None),
    ],
)
def test_the_slab_socket_is_beside_the_unix_socket_or_where_a_daemon_of_this_node_says(
    address: str, offers: m.StoreInfo | None, socket: str | None
) -> None:
    assert choice(address, offers=offers).slab_socket == socket


def test_over_tcp_the_slab_socket_must_be_of_the_very_daemon_that_named_it() -> None:
    assert choice(LOOPBACK).slab_epoch == INFO.epoch
    assert choice(UNIX).slab_epoch is None


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        (REMOTE, ("10.0.0.7", 7452)),
        ("[fe80::1]:7450", ("fe80::1", 7452)),
        (UNIX, ("127.0.0.1", 7452)),
    ],
)
def test_the_data_port_is_on_the_host_that_grpc_reaches(address: str, endpoint: tuple[str, int]) -> None:
    assert choice(address).bulk_endpoint == endpoint
    assert choice(address, offers=replace(INFO, bulk_port=0)).bulk_endpoint is None


def test_the_best_path_that_is_there_is_taken() -> None:
    assert choice(UNIX).path(has_slab=True, now_s=0.0) is TransferPath.SLAB
    assert choice(REMOTE).path(has_slab=False, now_s=0.0) is TransferPath.BULK
    assert choice(REMOTE, offers=replace(INFO, bulk_port=0)).path(has_slab=False, now_s=0.0) is TransferPath.STREAM
    assert choice(REMOTE, offers=None).path(has_slab=False, now_s=0.0) is TransferPath.STREAM


@pytest.mark.parametrize(
    ("transport", "path"),
    [
        ("slab", TransferPath.SLAB),
        ("bulk", TransferPath.BULK),
        ("grpc", TransferPath.STREAM),
        ("nixl", TransferPath.NIXL),
    ],
)
def test_what_is_insisted_on_is_taken_whether_it_is_there_or_not(transport: str, path: TransferPath) -> None:
    for has_slab in (True, False):
        assert choice(REMOTE, transport=transport, offers=None).path(has_slab=has_slab, now_s=0.0) is path


@pytest.mark.parametrize("transport", ["grpc", "bulk", "nixl"])
def test_the_slab_socket_is_left_alone_when_another_transport_is_insisted_on(transport: str) -> None:
    assert choice(UNIX, transport=transport).slab_socket is None


def test_a_path_that_failed_rests_until_its_time_or_the_next_daemon() -> None:
    known = choice(REMOTE)
    known.note_failure(TransferPath.BULK, now_s=10.0)
    assert known.path(has_slab=False, now_s=10.0) is TransferPath.STREAM
    assert known.path(has_slab=False, now_s=10.0 + RETRY_S) is TransferPath.BULK
    known.note_failure(TransferPath.BULK, now_s=20.0)
    known.note_info(INFO)
    assert known.path(has_slab=False, now_s=20.0) is TransferPath.STREAM
    known.note_info(replace(INFO, epoch=Epoch(b"2" * 16)))
    assert known.path(has_slab=False, now_s=20.0) is TransferPath.BULK


def test_the_environment_decides_where_the_configuration_does_not() -> None:
    assert transport_in_force("auto", {}) == "auto"
    assert transport_in_force("auto", {"KVSTORE_TRANSPORT": ""}) == "auto"
    assert transport_in_force("auto", {"KVSTORE_TRANSPORT": "grpc"}) == "grpc"
    assert transport_in_force("slab", {"KVSTORE_TRANSPORT": "grpc"}) == "slab"
    with refuses(r"\$KVSTORE_TRANSPORT"):
        transport_in_force("auto", {"KVSTORE_TRANSPORT": "carrier pigeon"})
