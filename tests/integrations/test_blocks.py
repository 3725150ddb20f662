"""What integrations have in common: settings, hashes, shapes and the namespaces made of them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from blake3 import blake3

from kvstore.errors import InvalidArgumentError
from kvstore.namespace import NONE, STRING_MAX_BYTES, Namespace, Shard
from kvstore_client.integrations._blocks import BlockShape, EngineModel, StoreSettings, to_block_hash

SHAPE = BlockShape(
    layout="HND", dtype="bfloat16", num_layers=6, num_kv_heads=2, head_dim=64, v_head_dim=32, tokens_per_block=16
)
MODEL = EngineModel(model="org/model", weights_revision="1", settings={"b": 2, "a": {"y": 1, "x": None}})


# Settings.


@pytest.mark.parametrize("extra_config", [None, {}])
def test_no_settings_are_the_defaults(extra_config: dict[str, object] | None) -> None:
    settings = StoreSettings.parse(extra_config, where="extra")
    assert settings == StoreSettings(address=None, transport="auto", tenant_salt="", weights_revision=None)


def test_settings_are_what_was_given() -> None:
    given = {"address": "host:1", "transport": "grpc", "tenant_salt": "a", "weights_revision": "2"}
    assert StoreSettings.parse(given, where="extra").model_dump() == given


def test_a_setting_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        StoreSettings.parse({"adress": "host:1"}, where="extra")
    for part in ("extra.adress", "host:1", "address, tenant_salt, transport, weights_revision"):
        assert part in str(caught.value)


def test_a_setting_of_the_wrong_kind_is_named_with_its_value() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        StoreSettings.parse({"address": 7450}, where="extra")
    assert "extra.address" in str(caught.value)
    assert "7450" in str(caught.value)


def test_a_transport_that_does_not_exist_is_refused_when_the_client_is_opened() -> None:
    with pytest.raises(InvalidArgumentError, match="pigeon"):
        StoreSettings.parse({"transport": "pigeon"}, where="extra").open_client()


# Hashes.


@pytest.mark.parametrize(("name", "value"), [("address", "localhost"), ("transport", "rdma"), ("weights_revision", "")])
def test_what_no_client_can_be_opened_with_is_refused_at_once_under_its_full_name(name: str, value: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^extra\.{name} is '{value}'"):
        StoreSettings.parse({name: value}, where="extra")


def test_a_name_that_nobody_knows_is_told_before_a_value_that_makes_no_sense() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^extra\.adress"):
        StoreSettings.parse({"tenant_salt": 7, "adress": "unix:/a"}, where="extra")


def test_a_hash_of_our_length_stays_as_it_is() -> None:
    key = bytes(range(32))
    assert to_block_hash(key) == key
    assert to_block_hash(key.hex()) == key
    assert to_block_hash(key.hex().upper()) == key


@pytest.mark.parametrize("key", [b"", b"short", bytes(31), bytes(33), b"\x01" * 64])
def test_a_hash_of_another_length_is_hashed(key: bytes) -> None:
    assert to_block_hash(key) == blake3(key).digest()


@pytest.mark.parametrize("key", ["", "short", "g" * 64, "ab" * 31, "é" * 32, " " * 64])
def test_text_that_spells_no_hash_is_hashed_as_it_is(key: str) -> None:
    assert to_block_hash(key) == blake3(key.encode()).digest()


# Shapes.


def test_a_shape_counts_the_bytes_that_its_namespace_counts() -> None:
    assert SHAPE.payload_bytes == 6 * 2 * 16 * (64 + 32) * 2
    assert MODEL.namespace(SHAPE, shard=None).block_layout.payload_bytes == SHAPE.payload_bytes


@pytest.mark.parametrize(
    ("num_layers", "tokens_per_block", "layer_bytes"), [(3, 16, 4096), (3, 16, 4100), (1, 1, 7), (2, 16, 16)]
)
def test_bytes_of_any_number_have_a_shape(num_layers: int, tokens_per_block: int, layer_bytes: int) -> None:
    shape = BlockShape.of_bytes(
        layout="opaque:x", num_layers=num_layers, tokens_per_block=tokens_per_block, layer_bytes=layer_bytes
    )
    assert shape.payload_bytes == num_layers * layer_bytes
    assert shape.v_head_dim == 0
    assert MODEL.namespace(shape, shard=None).block_layout.payload_bytes == num_layers * layer_bytes


# Namespaces.


def test_a_namespace_says_all_that_model_and_shape_say() -> None:
    shard = Shard(tp_rank=1, tp_size=2)
    namespace = replace(MODEL, tenant_salt="salt").namespace(SHAPE, shard=shard, lora="blake3:a")
    assert namespace == Namespace(
        model="org/model",
        weights_revision="1",
        tokenizer="token-ids",
        rope='{"a":{"x":null,"y":1},"b":2}',
        dtype="bfloat16",
        num_layers=6,
        num_kv_heads=2,
        head_dim=64,
        v_head_dim=32,
        tokens_per_block=16,
        layout="HND",
        shard=shard,
        lora="blake3:a",
        tenant_salt=b"salt",
        k_precision="exact",
        v_precision="exact",
    )
    assert MODEL.namespace(SHAPE, shard=None).lora == NONE


def differing(one: Namespace, other: Namespace) -> set[str]:
    return {field.name for field in fields(Namespace) if getattr(one, field.name) != getattr(other, field.name)}


@pytest.mark.parametrize(
    ("change", "value", "differs"),
    [
        ("model", "org/other", "model"),
        ("weights_revision", "2", "weights_revision"),
        ("settings", {"a": 1}, "rope"),
        ("tenant_salt", "b", "tenant_salt"),
    ],
)
def test_another_model_differs_in_that_field_alone(change: str, value: object, differs: str) -> None:
    other = replace(MODEL, **{change: value})  # type: ignore[arg-type]
    one, two = MODEL.namespace(SHAPE, shard=None), other.namespace(SHAPE, shard=None)
    assert one.id != two.id
    assert differing(one, two) == {differs}


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("layout", "NHD"),
        ("layout", "opaque:a"),
        ("dtype", "float16"),
        ("num_layers", 5),
        ("num_kv_heads", 4),
        ("head_dim", 32),
        ("v_head_dim", 64),
        ("tokens_per_block", 32),
    ],
)
def test_another_shape_differs_in_that_field_alone(change: str, value: object) -> None:
    other = replace(SHAPE, **{change: value})  # type: ignore[arg-type]
    one, two = MODEL.namespace(SHAPE, shard=None), MODEL.namespace(other, shard=None)
    assert one.id != two.id
    assert differing(one, two) == {change}


def test_settings_of_some_layers_alone_are_part_of_their_identity() -> None:
    plain = MODEL.namespace(SHAPE, shard=None)
    windowed = MODEL.namespace(SHAPE, shard=None, settings={"window": 512})
    assert differing(plain, windowed) == {"rope"}
    assert MODEL.namespace(SHAPE, shard=None, settings={"b": 2}) == plain
    assert differing(plain, MODEL.namespace(SHAPE, shard=None, settings={"b": 3})) == {"rope"}


def test_the_order_in_which_settings_are_told_does_not_matter() -> None:
    other = replace(MODEL, settings={"a": {"x": None, "y": 1}, "b": 2})
    assert other.namespace(SHAPE, shard=None) == MODEL.namespace(SHAPE, shard=None)


def test_settings_that_are_too_long_to_be_told_still_differ() -> None:
    one, two = (
        replace(MODEL, settings={"text": "x" * STRING_MAX_BYTES + end}).namespace(SHAPE, shard=None) for end in "ab"
    )
    assert differing(one, two) == {"rope"}


@pytest.mark.parametrize(("change", "value"), [("weights_revision", ""), ("model", ""), ("model", "x" * 5_000)])
def test_a_model_that_is_not_known_is_refused(change: str, value: str) -> None:
    with pytest.raises(InvalidArgumentError, match=change):
        replace(MODEL, **{change: value}).namespace(SHAPE, shard=None)  # type: ignore[arg-type]
