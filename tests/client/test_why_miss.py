"""Two engines that do not share blocks are told which fields keep them apart."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvstore.keys import BlockHash
from kvstore_client.client import Client
from tests.client.builders import namespace
from tests.client.test_cli import run
from tests.conftest import DaemonProcess

OWN = namespace(model="m")


@pytest.fixture
def address(daemon: DaemonProcess) -> str:
    """Of a daemon that holds a block of one namespace, and was asked for another one that differs in one field."""
    with Client(daemon.address) as client:
        client.put(OWN, [BlockHash(b"a" * 32)], [bytes(OWN.block_layout.payload_bytes)])
        client.lookup(replace(OWN, lora="blake3:1234"), [BlockHash(b"a" * 32)])
        client.lookup(replace(OWN, weights_revision="other", tenant_salt=b"s"), [BlockHash(b"a" * 32)])
    return daemon.address


def test_each_namespace_is_beside_the_one_most_like_it(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("why-miss", "--json", "--address", address) == 0
    answer = json.loads(capsys.readouterr().out)
    own = next(one for one in answer["namespaces"] if one["namespace_id"] == OWN.id.hex())
    assert own["block_count"] == 1
    assert [field["field"] for field in own["others"][0]["fields"]] == ["lora"]
    assert answer["left_out_count"] == 0


def test_one_namespace_is_compared_with_as_many_as_are_asked_for(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("why-miss", "--namespace", OWN.id.hex()[:12], "--others", "9", "--address", address) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{OWN.id.hex()[:16]} m, 1 blocks in memory\n")
    for field in ("lora: none, there blake3:1234", "weights_revision: ", "tenant_salt: "):
        assert f"    {field}" in shown


def test_an_id_that_nobody_has_is_answered_with_those_that_there_are(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("why-miss", "--namespace", "zz", "--address", address) == 2
    assert OWN.id.hex()[:16] in capsys.readouterr().err


def test_a_daemon_that_nobody_has_asked_says_so(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("why-miss", "--address", daemon.address) == 0
    assert "no engine has asked" in capsys.readouterr().out


def test_each_pair_is_shown_once(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(address) as client:
        client.lookup(replace(OWN, model="unlike the others", dtype="float32"), [BlockHash(b"a" * 32)])
    assert run("why-miss", "--others", "9", "--address", address) == 0
    everything = capsys.readouterr().out
    assert everything.count("\n  differs from") == 4 * 3 / 2
    assert run("why-miss", "--address", address) == 0
    shown = capsys.readouterr().out
    assert shown.count("lora: ") == 1
    assert "unlike the others" in shown
