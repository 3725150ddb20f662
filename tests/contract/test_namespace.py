from __future__ import annotations

import itertools
import re
import struct
from dataclasses import fields, replace

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError
from kvstore.namespace import STRING_MAX_BYTES, Namespace, Shard, differences
from tests.contract.strategies import NAMESPACE_FIELDS, namespaces

GEMMA = Namespace(
    model="google/gemma-3-270m",
    weights_revision="sha256:3f1c",
    tokenizer="sha256:77ab",
    rope="none",
    dtype="bfloat16",
    num_layers=18,
    num_kv_heads=1,
    head_dim=256,
    v_head_dim=256,
    tokens_per_block=16,
    layout="HND",
    shard=Shard(tp_rank=1, tp_size=2),
    lora="none",
    tenant_salt=b"tenant",
    k_precision="exact",
    v_precision="exact",
)


def field_starts(encoded: bytes) -> list[int]:
    starts = []
    position = 6
    while position < len(encoded):
        starts.append(position)
        position += 5 + struct.unpack_from("<I", encoded, position + 1)[0]
    return starts


@given(namespaces)
def test_a_namespace_survives_its_encoding(namespace: Namespace) -> None:
    assert Namespace.decode(namespace.encode()) == namespace


@given(namespaces)
def test_the_id_is_the_hash_of_the_canonical_bytes(namespace: Namespace) -> None:
    assert namespace.id == blake3(namespace.encode()).digest()


@given(namespaces, st.data())
def test_namespaces_that_differ_in_any_one_field_have_different_ids(namespace: Namespace, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in NAMESPACE_FIELDS if not name.endswith("precision")]))
    value = data.draw(NAMESPACE_FIELDS[name].filter(lambda value: value != getattr(namespace, name)))
    namespace = replace(namespace, k_precision="exact", v_precision="exact")  # which goes with all of them
    assert replace(namespace, **{name: value}).id != namespace.id


@given(namespaces, namespaces)
def test_ids_are_equal_exactly_when_namespaces_are(one: Namespace, other: Namespace) -> None:
    assert (one.id == other.id) == (one == other)


def test_a_shard_of_one_is_not_the_same_as_a_shard_agnostic_layout() -> None:
    assert replace(GEMMA, shard=Shard()).id != replace(GEMMA, shard=None).id


def test_text_that_moves_from_one_field_to_the_next_changes_the_id() -> None:
    assert replace(GEMMA, model="ab", weights_revision="c").id != replace(GEMMA, model="a", weights_revision="bc").id


def test_an_encoding_cut_off_at_any_byte_is_refused() -> None:
    encoded = GEMMA.encode()
    for size in range(len(encoded)):
        with pytest.raises(InvalidArgumentError):
            Namespace.decode(encoded[:size])


def test_bytes_behind_the_last_field_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="too many"):
        Namespace.decode(GEMMA.encode() + b"\0")


def test_fields_out_of_order_repeated_or_left_out_are_refused() -> None:
    encoded = GEMMA.encode()
    starts = [*field_starts(encoded), len(encoded)]
    parts = [encoded[start:end] for start, end in itertools.pairwise(starts)]
    assert len(parts) == 16
    for index in range(len(parts)):
        without = parts[:index] + parts[index + 1 :]
        twice = parts[: index + 1] + parts[index:]
        swapped = [*without, parts[index]] if index + 1 < len(parts) else [parts[index], *without]
        for wrong in (without, twice, swapped):
            with pytest.raises(InvalidArgumentError):
                Namespace.decode(encoded[:6] + b"".join(wrong))


@pytest.mark.parametrize("size", [0, 4, 7, 9])
def test_an_integer_of_another_width_is_refused(size: int) -> None:
    encoded = GEMMA.encode()
    start = field_starts(encoded)[5]  # num_layers
    narrow = struct.pack("<BI", 6, size) + (18).to_bytes(9, "little")[:size]
    with pytest.raises(InvalidArgumentError):
        Namespace.decode(encoded[:start] + narrow + encoded[start + 13 :])


@given(st.binary(max_size=200))
def test_garbage_is_refused_as_the_callers_mistake(garbage: bytes) -> None:
    for data in (garbage, b"KVNS\x01\x00" + garbage):
        with pytest.raises(InvalidArgumentError):
            Namespace.decode(data)


@given(st.data())
def test_a_damaged_encoding_is_refused_or_another_namespace(data: st.DataObject) -> None:
    encoded = bytearray(GEMMA.encode())
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
    try:
        other = Namespace.decode(bytes(encoded))
    except InvalidArgumentError:
        return
    assert other.encode() == encoded
    assert other.id != GEMMA.id


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", None),
        ("model", "x" * (STRING_MAX_BYTES + 1)),
        ("model", "é" * (STRING_MAX_BYTES // 2 + 1)),
        ("model", "\ud800"),
        ("rope", b"none"),
        ("dtype", "float12"),
        ("num_layers", 0),
        ("num_layers", -1),
        ("num_layers", 1.0),
        ("num_layers", True),
        ("num_kv_heads", 2**20 + 1),
        ("v_head_dim", -1),
        ("tokens_per_block", "16"),
        ("layout", "NDH"),
        ("shard", "tp0"),
        ("shard", b""),
        ("tenant_salt", "salt"),
        ("tenant_salt", bytes(STRING_MAX_BYTES + 1)),
        ("k_precision", "int7"),
        ("v_precision", ""),
    ],
)
def test_a_value_that_is_unknown_or_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=re.compile(field)):
        replace(GEMMA, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"), [("tp_size", 0), ("tp_size", 65537), ("pp_rank", 1), ("dcp_rank", -1), ("tp_size", 1.0)]
)
def test_an_impossible_shard_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"shard.{field}"):
        Shard(**{field: value})


def test_a_block_larger_than_any_integer_on_the_wire_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="payload_bytes"):
        replace(GEMMA, num_layers=1 << 20, num_kv_heads=1 << 20, head_dim=1 << 20)


@given(namespaces, namespaces)
def test_namespaces_differ_in_no_field_if_and_only_if_they_are_the_same(own: Namespace, other: Namespace) -> None:
    assert (differences(own, other) == ()) == (own.id == other.id)
    assert differences(own, own) == ()


@pytest.mark.parametrize("field", [field.name for field in fields(Namespace)])
def test_a_difference_is_told_by_the_name_of_its_field(field: str) -> None:
    changed = {
        "dtype": "float16",
        "layout": "NHD",
        "shard": None,
        "tenant_salt": b"other",
        "rope": "linear",
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 2,
        "v_head_dim": 2,
        "tokens_per_block": 2,
        "k_precision": "fp8",
        "v_precision": "fp8",
    }.get(field, "other")
    found = differences(GEMMA, replace(GEMMA, **{field: changed}))
    assert [difference.field for difference in found] == [field]


def test_settings_told_as_json_differ_by_their_own_names() -> None:
    own = replace(GEMMA, rope='{"kv_cache_dtype":"auto","window":512}')
    other = replace(GEMMA, rope='{"kv_cache_dtype":"fp8","draft":"none","window":512}')
    assert [(one.field, one.own, one.other) for one in differences(own, other)] == [
        ("rope.draft", "null", "none"),
        ("rope.kv_cache_dtype", "auto", "fp8"),
    ]


def test_a_salt_is_not_told_itself() -> None:
    found = differences(GEMMA, replace(GEMMA, tenant_salt=b"secret of a tenant"))
    assert "secret" not in str(found)
