"""The package gives the golden vectors of docs/formats, and reads them back."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore import frames, slab
from kvstore.envelope import Codec, Envelope, verify_block
from kvstore.keys import BlockHash, NamespaceId, block_hash_from_engine, chain_root, hash_blocks
from kvstore.layout import BlockLayout, LayoutOrder
from kvstore.messages import Epoch, OwnerId
from kvstore.namespace import Namespace, Shard
from kvstore.slab import (
    Access,
    ArenaReply,
    CallHeader,
    ConnectionKind,
    Generation,
    Hello,
    SlotRecord,
    SlotState,
    Welcome,
)
from tests.contract.test_documented_formats import vectors

DECODERS = {
    "ReadBlocksResponse": (frames.decode_read_frame, frames.encode_read_frame),
    "WriteBlocksRequest": (frames.decode_write_frame, frames.encode_write_frame),
    "StoreBlocksRequest": (frames.decode_store_frame, frames.encode_store_frame),
}


@pytest.mark.parametrize("vector", vectors("keys", "namespaces"))
def test_namespaces(vector: dict[str, Any]) -> None:
    given = vector["fields"]
    shard = Shard(**given["shard"]) if given["shard"] else None
    namespace = Namespace(**{**given, "shard": shard, "tenant_salt": bytes.fromhex(given["tenant_salt"])})
    assert namespace.encode().hex() == vector["canonical"]
    assert namespace.id.hex() == vector["namespace_id"]
    assert Namespace.decode(bytes.fromhex(vector["canonical"])) == namespace


@pytest.mark.parametrize("vector", vectors("keys", "chains"))
def test_chains(vector: dict[str, Any]) -> None:
    extra_keys = {int(index): [bytes.fromhex(key) for key in keys] for index, keys in vector["extra_keys"].items()}
    hashes = hash_blocks(vector["tokens"], tokens_per_block=vector["tokens_per_block"], extra_keys=extra_keys)
    assert chain_root(vector["tokens_per_block"]).hex() == vector["root"]
    assert [block.hex() for block in hashes] == vector["block_hashes"]


@pytest.mark.parametrize("vector", vectors("keys", "engine_hashes"))
def test_engine_hashes(vector: dict[str, Any]) -> None:
    assert block_hash_from_engine(bytes.fromhex(vector["engine_hash"])).hex() == vector["block_hash"]


@pytest.mark.parametrize("vector", vectors("envelope", "envelopes"))
def test_envelopes(vector: dict[str, Any]) -> None:
    given = vector["fields"]
    envelope = Envelope(
        namespace_id=NamespaceId(bytes.fromhex(given["namespace_id"])),
        block_hash=BlockHash(bytes.fromhex(given["block_hash"])),
        k_codec=Codec(given["k_codec"]),
        v_codec=Codec(given["v_codec"]),
        tokens=given["tokens"],
        k_bytes=given["k_bytes"],
        v_bytes=given["v_bytes"],
        decoded_bytes=given["decoded_bytes"],
        payload_checksum=int(given["payload_checksum"], 16),
    )
    payload = bytes.fromhex(vector["payload"])
    assert envelope.encode().hex() == vector["envelope"]
    verified = verify_block(
        bytes.fromhex(vector["envelope"]) + payload,
        namespace_id=envelope.namespace_id,
        block_hash=envelope.block_hash,
        payload_bytes=len(payload),
    )
    assert verified == payload


@pytest.mark.parametrize("vector", vectors("frames", "frames"))
def test_frames(vector: dict[str, Any]) -> None:
    decode, encode = DECODERS[vector["message"]]
    frame: Any = decode(bytes.fromhex(vector["encoded"]))
    assert encode(frame).hex() == vector["encoded"]  # type: ignore[operator]
    for name, expected in vector["fields"].items():
        value = getattr(frame, name)
        assert (value or b"" if isinstance(expected, str) else value) == (
            bytes.fromhex(expected) if isinstance(expected, str) else expected
        )


@pytest.mark.parametrize("vector", vectors("slab", "slot_headers"))
def test_slot_headers(vector: dict[str, Any]) -> None:
    given, encoded = vector["fields"], bytes.fromhex(vector["encoded"])
    generation = Generation(given["generation"])
    states = {(True, True): SlotState.VERIFIED, (True, False): SlotState.READABLE}
    assert slab.slot_state(encoded, generation) is states.get(
        (given["is_readable"], given["is_verified"]), SlotState.GONE
    )
    assert (
        slab.encode_slot_header(generation, is_readable=given["is_readable"], is_verified=given["is_verified"])
        == encoded
    )


def test_slot_records() -> None:
    expected = vectors("slab", "slot_records")
    records = [SlotRecord(**vector["fields"]) for vector in expected]
    packed = b"".join(bytes.fromhex(vector["encoded"]) for vector in expected)
    assert slab.encode_slot_records(records) == packed
    assert slab.decode_slot_records(packed) == records


def test_slab_socket_messages() -> None:
    def given(kind: str) -> list[tuple[dict[str, Any], bytes]]:
        return [(vector["fields"], bytes.fromhex(vector["encoded"])) for vector in vectors("slab", kind)]

    for fields, encoded in given("hellos"):
        hello = Hello(
            kind=ConnectionKind(fields["kind"]),
            access=Access(fields["access"]),
            session_id=OwnerId(bytes.fromhex(fields["session_id"])),
        )
        assert hello.encode() == encoded
        assert Hello.decode(encoded) == hello
    for fields, encoded in given("welcomes"):
        access, epoch = Access(fields["access"]), Epoch(bytes.fromhex(fields["epoch"]))
        welcome = Welcome(**{**fields, "access": access, "epoch": epoch})
        assert welcome.encode() == encoded
        assert Welcome.decode(encoded) == welcome
    for fields, encoded in given("arena_requests"):
        assert slab.encode_arena_request(fields["index"]) == encoded
        assert slab.decode_arena_request(encoded) == fields["index"]
    for fields, encoded in given("arena_replies"):
        assert ArenaReply(**fields).encode() == encoded
        assert ArenaReply.decode(encoded) == ArenaReply(**fields)
    for fields, encoded in given("call_headers"):
        assert CallHeader(**fields).encode() == encoded
        assert CallHeader.decode(encoded) == CallHeader(**fields)


@pytest.mark.parametrize("vector", vectors("layout", "layouts"))
def test_layouts(vector: dict[str, Any]) -> None:
    layout = BlockLayout(**{**vector["layout"], "order": LayoutOrder(vector["layout"]["order"])})
    assert layout.payload_bytes == vector["payload_bytes"]
    assert [
        {
            "name": plane.name,
            "offset_bytes": plane.offset_bytes,
            "shape": list(plane.shape),
            "strides_bytes": list(plane.strides_bytes),
        }
        for plane in layout.planes
    ] == vector["planes"]
