"""How processes that serve listen, yield to each other and are found."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore_client.hosting import Addresses, Role, announce, is_loopback, listen_tcp, listen_unix, remove_at_exit

ROLE = Role(name="agent", asked_with="kvstore agent status", port_setting="--port", socket_setting="--socket-path")
ADDRESSES = Addresses(grpc_address="127.0.0.1:1", unix_address=None, metrics_address="127.0.0.1:2", pid=3)


class Server:
    """Binds as gRPC does; a broken one fails as gRPC does, without a reason of the system's."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.addresses: list[str] = []
        self._is_broken = is_broken

    def listen(self, address: str) -> int:
        if self._is_broken:
            raise OSError("gRPC cannot have it")
        self.addresses.append(address)
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address.removeprefix("unix:"))
        return 4711


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_host_is_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org", ""])
def test_a_host_that_others_can_reach_is_no_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_an_address_says_the_port_that_was_given() -> None:
    server = Server()
    assert listen_tcp(server.listen, host="127.0.0.1", port=0, role=ROLE) == "127.0.0.1:4711"
    assert server.addresses == ["127.0.0.1:0"]


def test_a_port_in_use_is_refused_before_the_server_tries() -> None:
    server = Server()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UnavailableError, match=r"in use, perhaps by another agent .*set --port \(0: any free port\)"
        ):
            listen_tcp(server.listen, host="127.0.0.1", port=port, role=ROLE)
    assert server.addresses == []


def test_a_server_that_loses_the_race_for_its_address_says_so_in_one_sentence(tmp_path: Path) -> None:
    server, path = Server(is_broken=True), tmp_path / "s"
    with pytest.raises(UnavailableError, match=r"^cannot listen on 127\.0\.0\.1:0: gRPC cannot have it; free it"):
        listen_tcp(server.listen, host="127.0.0.1", port=0, role=ROLE)
    with ExitStack() as parts, pytest.raises(UnavailableError) as refused:
        listen_unix(server.listen, path, role=ROLE, parts=parts)
    assert str(refused.value) == f"cannot listen on {path}: gRPC cannot have it; set --socket-path"
    assert not path.exists()


def test_a_socket_is_for_this_user_alone_and_goes_with_the_process(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "s"
    with ExitStack() as parts:
        assert listen_unix(Server().listen, path, role=ROLE, parts=parts) == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.exists()


def test_only_a_dead_processs_socket_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with ExitStack() as parts:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            with pytest.raises(UnavailableError, match=f"another agent serves {path} .`kvstore agent status --address"):
                listen_unix(Server().listen, path, role=ROLE, parts=parts)
        listen_unix(Server().listen, path, role=ROLE, parts=parts)
        path.unlink()
        path.write_text("mine")
        with pytest.raises(UnavailableError, match="not a socket"):
            listen_unix(Server().listen, path, role=ROLE, parts=parts)
    assert path.read_text() == "mine"


def test_a_socket_path_that_the_kernel_cannot_take_is_refused_with_the_limit(tmp_path: Path) -> None:
    with ExitStack() as parts, pytest.raises(InvalidArgumentError, match=r"--socket-path is .*up to 107 bytes"):
        listen_unix(Server().listen, tmp_path / ("long" * 30), role=ROLE, parts=parts)


def test_what_a_successor_has_put_in_place_of_a_file_of_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("ours")
    with ExitStack() as parts:
        remove_at_exit(path, parts)
        (tmp_path / "new").write_text("theirs")
        (tmp_path / "new").replace(path)
    assert path.read_text() == "theirs"


def test_the_ready_file_says_the_same_as_stdout_and_goes_with_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ready.json"
    with ExitStack() as parts:
        announce(ADDRESSES, path, parts)
        assert json.loads(path.read_text())["pid"] == 3
        assert path.read_text() == capsys.readouterr().out
        assert list(tmp_path.iterdir()) == [path]
    assert not path.exists()


def test_nothing_is_announced_when_the_ready_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ready.json"
    folder.mkdir()
    with ExitStack() as parts, pytest.raises(UnavailableError, match="cannot write the ready file"):
        announce(ADDRESSES, folder, parts)
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == [folder], "half a ready file was left"
