"""The formats as docs/formats describes them, implemented again from those pages alone, and the golden vectors.

Nothing of `kvstore` is imported here: what an engineer in another language would write must give the same bytes.
"""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from blake3 import blake3

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "contract" / "golden"
FORMATS = ROOT / "docs" / "formats"

NAMESPACE_FIELDS = {
    "model": "string",
    "weights_revision": "string",
    "tokenizer": "string",
    "rope": "string",
    "dtype": "string",
    "num_layers": "u64",
    "num_kv_heads": "u64",
    "head_dim": "u64",
    "v_head_dim": "u64",
    "tokens_per_block": "u64",
    "layout": "string",
    "shard": "shard",
    "lora": "string",
    "tenant_salt": "bytes",
    "k_precision": "string",
    "v_precision": "string",
}
SHARD_FIELDS = ("tp_rank", "tp_size", "pp_rank", "pp_size", "dcp_rank", "dcp_size")
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
FRAME_FIELDS = {
    "ReadBlocksResponse": {"block_index": 1, "block_state": 2, "offset_bytes": 3, "size_bytes": 4},
    "WriteBlocksRequest": {"reservation_id": 1, "owner_id": 2, "offset_bytes": 3},
    "StoreBlocksRequest": {"block_hash": 1, "parent_hash": 2, "offset_bytes": 3},
}


def vectors(name: str, kind: str) -> list[Any]:
    loaded: list[Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))[kind]
    assert loaded
    return loaded


def encode_namespace(fields: dict[str, Any]) -> bytes:
    assert list(fields) == list(NAMESPACE_FIELDS)
    out = b"KVNS" + struct.pack("<H", 1)
    for number, (name, kind) in enumerate(NAMESPACE_FIELDS.items(), start=1):
        value = fields[name]
        if kind == "string":
            encoded = value.encode("utf-8")
        elif kind == "u64":
            encoded = struct.pack("<Q", value)
        elif kind == "bytes":
            encoded = bytes.fromhex(value)
        else:
            encoded = b"" if value is None else struct.pack("<6I", *(value[part] for part in SHARD_FIELDS))
        out += struct.pack("<BI", number, len(encoded)) + encoded
    return out


def hash_chain(tokens: list[int], tokens_per_block: int, extra_keys: dict[str, list[str]]) -> tuple[bytes, list[bytes]]:
    root = blake3(b"kvstore block chain v1" + struct.pack("<I", tokens_per_block)).digest()
    hashes = [root]
    for index in range(len(tokens) // tokens_per_block):
        ids = tokens[index * tokens_per_block : (index + 1) * tokens_per_block]
        preimage = hashes[-1] + struct.pack(f"<{len(ids)}I", *ids)
        for key in map(bytes.fromhex, extra_keys.get(str(index), [])):
            preimage += struct.pack("<I", len(key)) + key
        hashes.append(blake3(preimage).digest())
    return root, hashes[1:]


Numbers = npt.NDArray[np.float32]


def numbers_of(data: bytes, dtype: str) -> Numbers:
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, {"float16": "<f2", "float32": "<f4"}[dtype]).astype(np.float32)


def bytes_of(numbers: Numbers, dtype: str) -> bytes:
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(numbers).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return numbers.astype({"float16": "<f2", "float32": "<f4"}[dtype]).tobytes()


E4M3 = np.array(
    [
        (-1) ** (c >> 7) * (1 + (c & 7) / 8 if c & 0x78 else (c & 7) / 4) * 2.0 ** ((c >> 3 & 15) - 7)
        for c in range(256)
    ],
    np.float32,
)
"""What each code is; that of exponent 0 counts from 2^-6. Of codes with all other bits set there is none."""
FILL = 16


def filled(data: bytes) -> bytes:
    return data + bytes(-len(data) % FILL)


def stored_plane(whole: bytes, plane: dict[str, Any], fields: dict[str, Any]) -> tuple[bytes, bytes]:
    """The bytes that are stored of a plane, and what comes back of it."""
    kind = plane["name"].lower()
    precision, dtype = fields[f"{kind}_precision"], fields["dtype"]
    if precision == "exact":
        return filled(whole), whole
    heads, tokens = fields["num_kv_heads"], fields["tokens_per_block"]
    dim = fields["head_dim" if kind == "k" else "v_head_dim"]
    shape = (heads, tokens, dim) if fields["layout"] == "HND" else (tokens, heads, dim)
    groups = {
        "fp8": (tokens, dim),
        "int8": (tokens, 1) if kind == "k" else (1, dim),
        "int4": (math.gcd(tokens, 32), 1) if kind == "k" else (1, math.gcd(dim, 32)),
    }
    group_tokens, group_dim = groups[precision]
    assert plane["group"] == [group_tokens, group_dim]
    stored, decoded = b"", b""
    for layer in numbers_of(whole, dtype).reshape(fields["num_layers"], *shape):
        codes, back = np.zeros(shape, np.uint8), np.zeros(shape, np.float32)
        minimums, scales = [], []
        in_order = (lambda array: array) if fields["layout"] == "HND" else (lambda array: array.swapaxes(0, 1))
        for head in range(heads):
            for token in range(0, tokens, group_tokens):
                for element in range(0, dim, group_dim):
                    where = (head, slice(token, token + group_tokens), slice(element, element + group_dim))
                    made = group_codes(in_order(layer)[where], precision)
                    in_order(codes)[where], minimum, scale = made
                    came = E4M3[made[0]] * scale if precision == "fp8" else made[0] * scale + minimum
                    in_order(back)[where] = came
                    minimums.append(minimum)
                    scales.append(scale)
        flat = codes.ravel()
        part = filled(bytes(flat[::2] | flat[1::2] << 4) if precision == "int4" else flat.tobytes())
        assert len(part) == plane["minimums_offset_bytes"]
        if precision != "fp8":
            part += bytes_of(np.array(minimums, np.float32), dtype)
        assert len(part) == plane["scales_offset_bytes"]
        part = filled(part + bytes_of(np.array(scales, np.float32), "bfloat16"))
        assert len(part) == plane["layer_bytes"]
        stored += part
        decoded += bytes_of(back, dtype)
    return stored, decoded


def group_codes(x: Numbers, precision: str) -> tuple[npt.NDArray[np.uint8], np.float32, np.float32]:
    one = np.float32(1)
    if precision == "fp8":
        wanted = np.abs(x).max() * (one / np.float32(448))
        scale = np.float32(max(2.0 ** math.ceil(math.log2(wanted)), 2.0**-126))
        distances = np.abs(E4M3[None, None, :] - (x * (one / scale))[..., None])
        distances[..., [0x7F, 0xFF]] = np.inf
        near = np.arange(256)[None, None, :]
        # Of two that are as near, the even one; and zeros keep their sign.
        order = distances * 1024 + near % 2 / 1024 + ((near >= 128) != np.signbit(x)[..., None]) * (distances == 0)
        return order.argmin(axis=-1).astype(np.uint8), np.float32(0), scale
    most = np.float32({"int8": 255, "int4": 15}[precision])
    minimum = x.min() + np.float32(0)
    span = x.max() - minimum
    if span == 0:
        return np.zeros(x.shape, np.uint8), minimum, np.float32(0)
    bits = (span * (one / most)).view(np.uint32)
    scale = np.maximum(((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32), np.float32(2.0**-126))
    codes = np.rint((x - minimum) * (one / scale))
    return np.clip(codes, 0, most).astype(np.uint8), minimum, scale


def encode_envelope(fields: dict[str, Any], payload: bytes) -> bytes:
    head = b"KVB1" + struct.pack("<HH", 1, 128)
    head += bytes.fromhex(fields["namespace_id"]) + bytes.fromhex(fields["block_hash"])
    head += struct.pack("<BBHI", fields["k_codec"], fields["v_codec"], 0, fields["tokens"])
    head += struct.pack("<QQQ", fields["k_bytes"], fields["v_bytes"], fields["decoded_bytes"])
    head += struct.pack("<QQ", xxhash.xxh3_64_intdigest(payload, seed=0), 0)
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head, seed=0))


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def encode_frame(message: str, fields: dict[str, Any]) -> bytes:
    out = b""
    for name, number in FRAME_FIELDS[message].items():
        value = fields[name]
        if isinstance(value, str) and value:
            out += varint(number << 3 | 2) + varint(len(value) // 2) + bytes.fromhex(value)
        elif value:
            out += varint(number << 3) + varint(value)
    data = bytes.fromhex(fields["data"])
    return out + (b"\x7a" + varint(len(data)) + data if data else b"")


def encode_slab(kind: str, fields: dict[str, Any]) -> bytes:
    """Slots and the slab socket; the plural name of a structure is that of its golden vectors."""
    value = {name: bytes.fromhex(field) if isinstance(field, str) else field for name, field in fields.items()}
    if kind == "slot_headers":
        sequence = value["generation"] * 2 + value["is_readable"]
        verified = 2**64 - 1 - sequence if value["is_verified"] else 0
        return struct.pack("<QQ", sequence, verified) + bytes(48)
    if kind == "slot_records":
        return struct.pack("<QQQ", value["place"], value["generation"], value["size_bytes"])
    if kind == "hellos":
        return b"KVSH" + struct.pack("<HBB", 1, value["kind"], value["access"]) + value["session_id"] + bytes(8)
    if kind == "welcomes":
        head = b"KVSH" + struct.pack("<HHII", 1, value["refusal_bytes"], value["arena_count"], 0)
        return head + struct.pack("<Q", value["arena_bytes"]) + value["epoch"] + bytes([value["access"]]) + bytes(7)
    if kind == "arena_requests":
        return b"KVSA" + struct.pack("<I", value["index"])
    if kind == "arena_replies":
        head = b"KVSA" + struct.pack("<III", value["index"], value["is_granted"], value["incarnation"])
        return head + struct.pack("<QQ", value["size_bytes"], value["page_bytes"])
    assert kind == "call_headers"
    return struct.pack("<IHHQ", value["body_bytes"], value["code"], value["is_one_way"], value["call_number"])


def encode_bulk(kind: str, value: dict[str, Any]) -> bytes:
    if kind == "requests":
        head = b"KVBK" + struct.pack("<HH", 1, value["direction"]) + bytes.fromhex(value["ticket"])
        return head + struct.pack("<IIQ", value["block_count"], 0, value["following_bytes"])
    if kind == "replies":
        head = b"KVBK" + struct.pack("<HH", 1, value["status"])
        return head + struct.pack("<IIQ", value["block_count"], 0, value["following_bytes"])
    assert kind == "block_headers"
    return struct.pack("<IIQ", value["position"], 0, value["size_bytes"])


def describe_layout(layout: dict[str, Any]) -> dict[str, Any]:
    element = DTYPE_BYTES[layout["dtype"]]
    planes = []
    offset = 0
    for name, head_dim in (("K", layout["head_dim"]), ("V", layout["v_head_dim"])):
        if head_dim == 0:
            continue
        heads, tokens = layout["num_kv_heads"], layout["tokens_per_block"]
        middle = [heads, tokens] if layout["order"] == "HND" else [tokens, heads]
        strides = [
            element * middle[0] * middle[1] * head_dim,
            element * middle[1] * head_dim,
            element * head_dim,
            element,
        ]
        shape = [layout["num_layers"], *middle, head_dim]
        planes.append({"name": name, "offset_bytes": offset, "shape": shape, "strides_bytes": strides})
        offset += shape[0] * strides[0]
    return {"layout": layout, "payload_bytes": offset, "planes": planes}


@pytest.mark.parametrize("vector", vectors("keys", "namespaces"))
def test_namespaces(vector: dict[str, Any]) -> None:
    canonical = encode_namespace(vector["fields"])
    assert canonical.hex() == vector["canonical"]
    assert blake3(canonical).hexdigest() == vector["namespace_id"]


@pytest.mark.parametrize("vector", vectors("keys", "chains"))
def test_chains(vector: dict[str, Any]) -> None:
    root, hashes = hash_chain(vector["tokens"], vector["tokens_per_block"], vector["extra_keys"])
    assert root.hex() == vector["root"]
    assert [block.hex() for block in hashes] == vector["block_hashes"]


@pytest.mark.parametrize("vector", vectors("keys", "engine_hashes"))
def test_engine_hashes(vector: dict[str, Any]) -> None:
    given = bytes.fromhex(vector["engine_hash"])
    assert (given if len(given) == 32 else blake3(given).digest()).hex() == vector["block_hash"]


@pytest.mark.parametrize("vector", vectors("envelope", "envelopes"))
def test_envelopes(vector: dict[str, Any]) -> None:
    payload = bytes.fromhex(vector["payload"])
    assert f"{xxhash.xxh3_64_intdigest(payload):016x}" == vector["fields"]["payload_checksum"]
    assert encode_envelope(vector["fields"], payload).hex() == vector["envelope"]


@pytest.mark.parametrize("vector", vectors("frames", "frames"))
def test_frames(vector: dict[str, Any]) -> None:
    assert encode_frame(vector["message"], vector["fields"]).hex() == vector["encoded"]


@pytest.mark.parametrize("vector", vectors("layout", "layouts"))
def test_layouts(vector: dict[str, Any]) -> None:
    assert describe_layout(vector["layout"]) == vector


@pytest.mark.parametrize("vector", vectors("precision", "blocks"))
def test_precision(vector: dict[str, Any]) -> None:
    payload, stored, decoded = bytes.fromhex(vector["payload"]), b"", b""
    fields = vector["fields"]
    whole_bytes = DTYPE_BYTES[fields["dtype"]] * fields["num_layers"] * fields["num_kv_heads"]
    whole_bytes *= fields["tokens_per_block"]
    for plane, dim in zip(vector["planes"], (fields["head_dim"], fields["v_head_dim"]), strict=True):
        assert plane["offset_bytes"] == len(stored)
        whole, payload = payload[: whole_bytes * dim], payload[whole_bytes * dim :]
        plane_stored, plane_decoded = stored_plane(whole, plane, fields)
        assert plane["size_bytes"] == len(plane_stored)
        stored, decoded = stored + plane_stored, decoded + plane_decoded
    assert stored.hex() == vector["stored"]
    assert decoded.hex() == vector["decoded"]


SLAB_KINDS = (
    "slot_headers",
    "slot_records",
    "hellos",
    "welcomes",
    "arena_requests",
    "arena_replies",
    "call_headers",
)


@pytest.mark.parametrize("kind", SLAB_KINDS)
def test_slab(kind: str) -> None:
    for vector in vectors("slab", kind):
        assert encode_slab(kind, vector["fields"]).hex() == vector["encoded"]


@pytest.mark.parametrize("kind", ["requests", "replies", "block_headers"])
def test_bulk(kind: str) -> None:
    for vector in vectors("bulk", kind):
        assert encode_bulk(kind, vector["fields"]).hex() == vector["encoded"]


@pytest.mark.parametrize("name", ["bulk", "envelope", "frames", "keys", "layout", "precision", "slab"])
def test_each_page_shows_exactly_its_golden_vectors(name: str) -> None:
    page = (FORMATS / f"{name}.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```json\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert shown == [(GOLDEN / f"{name}.json").read_text(encoding="utf-8")]


def test_the_namespace_table_of_the_page_is_the_one_implemented_here() -> None:
    page = (FORMATS / "keys.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, flags=re.MULTILINE)
    assert rows == [(str(number), name) for number, name in enumerate(NAMESPACE_FIELDS, start=1)]
