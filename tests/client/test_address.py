"""A client finds its daemon; a malformed address says what is allowed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvstore_client.address import (
    ADDRESS_VARIABLE,
    DEFAULT_ADDRESS,
    default_socket_path,
    find_address,
    parse_address,
    socket_candidates,
)
from tests.client.builders import refuses


@pytest.fixture
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node without any socket, as far as this process can see."""
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    ours = tmp_path / "kvstore" / "kvstore.sock"
    monkeypatch.setattr("kvstore_client.address.socket_candidates", lambda: [ours])
    return tmp_path


@pytest.fixture
def node_socket(runtime_dir: Path) -> Iterator[Path]:
    path = runtime_dir / "kvstore" / "kvstore.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield path


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("127.0.0.1:7450", "127.0.0.1:7450"),
        ("localhost:1", "localhost:1"),
        ("node-7.example_x.org:65535", "node-7.example_x.org:65535"),
        ("[::1]:7450", "[::1]:7450"),
        ("[fe80::1%eth0]:7450".replace("%eth0", ""), "[fe80::1]:7450"),
        ("host:07450", "host:7450"),
        ("unix:/run/kvstore/kvstore.sock", "unix:/run/kvstore/kvstore.sock"),
        ("unix:///run/kvstore/kvstore.sock", "unix:/run/kvstore/kvstore.sock"),
    ],
)
def test_addresses_have_one_form(given: str, used: str) -> None:
    assert parse_address(given) == used
    assert parse_address(used) == used


@pytest.mark.parametrize(
    "given",
    ["", "host", "host:", ":7450", "host:0", "host:65536", "host:-1", "host:7450x", "host:٣", "http://host:7450",
     "::1:7450", "[::1]", "[host]:7450", "ho st:7450", "unix:", "unix:relative.sock", "unix://relative.sock",
     "unix:/folder/", "unix:/" + "x" * 200, "unix:/a\0b", "/run/kvstore.sock", 7450, None],
)  # fmt: skip
def test_a_malformed_address_says_what_is_allowed(given: object) -> None:
    with refuses("address"):
        parse_address(given)  # type: ignore[arg-type]


def test_the_argument_wins_then_the_environment_then_the_socket_then_the_port(
    node_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "elsewhere:1234")
    assert find_address("here:1") == "here:1"
    assert find_address() == "elsewhere:1234"
    monkeypatch.setenv(ADDRESS_VARIABLE, "")
    assert find_address() == f"unix:{node_socket}"
    node_socket.unlink()
    assert find_address() == DEFAULT_ADDRESS


def test_a_malformed_environment_is_named(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "nonsense")
    with refuses(r"\$KVSTORE_ADDRESS is 'nonsense'"):
        find_address()


def test_what_is_no_socket_is_not_connected_to(runtime_dir: Path) -> None:
    path = runtime_dir / "kvstore" / "kvstore.sock"
    path.parent.mkdir()
    path.write_text("")
    assert find_address() == DEFAULT_ADDRESS
    path.unlink()
    path.symlink_to("/dev/null")
    assert find_address() == DEFAULT_ADDRESS


@pytest.mark.parametrize("owned", ["socket", "folder"])
def test_another_users_socket_is_not_trusted(node_socket: Path, monkeypatch: pytest.MonkeyPatch, owned: str) -> None:
    """Anybody can make /tmp/kvstore-1000 before user 1000 does."""
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        found = real(path)
        foreign = node_socket if owned == "socket" else node_socket.parent
        return os.stat_result([*found[:4], os.getuid() + 1, *found[5:]]) if path == foreign else found

    monkeypatch.setattr(Path, "lstat", lstat)
    assert find_address() == DEFAULT_ADDRESS


@pytest.mark.parametrize("trouble", ["stale", "forbidden"])
def test_a_socket_that_cannot_be_used_does_not_hide_the_next_one(
    node_socket: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    other = node_socket.with_name("other.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(other))
        if trouble == "forbidden":
            server.listen()
            other.chmod(0)
            if os.access(other, os.W_OK):
                pytest.skip("this user may use every socket")
        monkeypatch.setattr("kvstore_client.address.socket_candidates", lambda: [other, node_socket])
        assert find_address() == f"unix:{node_socket}"
        assert find_address(f"unix:{other}") == f"unix:{other}", "who names it means it"


def test_a_daemon_that_is_too_busy_to_accept_is_there(node_socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = node_socket.with_name("busy.sock")
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(busy))
        server.listen(0)
        callers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2)]
        with suppress(BlockingIOError):
            for caller in callers:
                caller.setblocking(False)
                caller.connect(str(busy))
        monkeypatch.setattr("kvstore_client.address.socket_candidates", lambda: [busy, node_socket])
        assert find_address() == f"unix:{busy}"


def test_candidates_go_from_most_private_to_least() -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert socket_candidates(environ=environ, uid=7, temp_dir="/tmp") == [
        Path("/run/user/7/kvstore/kvstore.sock"),
        Path("/run/kvstore/kvstore.sock"),
        Path("/tmp/kvstore-7/kvstore.sock"),
    ]
    for unusable in ({}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "relative"}, {"XDG_RUNTIME_DIR": "/" + "x" * 99}):
        assert len(socket_candidates(environ=unusable, uid=7, temp_dir="/tmp")) == 2


def test_the_daemon_puts_its_socket_where_clients_look(runtime_dir: Path) -> None:
    path = default_socket_path()
    assert path == runtime_dir / "kvstore" / "kvstore.sock"
    path.parent.mkdir(mode=0o700)
    assert default_socket_path() == path
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        assert find_address() == f"unix:{path}"


def test_without_a_folder_to_put_it_there_is_no_socket(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_client.address.socket_candidates", lambda: [Path("/nonexistent/kvstore/kvstore.sock")])
    assert default_socket_path() is None
