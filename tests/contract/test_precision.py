from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.envelope import Codec, Envelope, checksum, verify_block
from kvstore.errors import CorruptBlockError, InvalidArgumentError
from kvstore.keys import BlockHash
from kvstore.layout import BlockLayout, LayoutOrder, OpaqueOrder
from kvstore.namespace import Namespace
from kvstore.precision import BLOCK_PRECISIONS, CODECS, PRECISIONS, EncodedLayout, encoded_layout, group_shape
from tests.contract.strategies import namespaces

LLAMA = BlockLayout(
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    tokens_per_block=16,
    dtype="bfloat16",
    order=LayoutOrder.HND,
)
BLOCK = BlockHash(bytes(range(32)))
NAMESPACE = Namespace(
    model="m",
    weights_revision="r",
    tokenizer="t",
    rope="none",
    dtype="float16",
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    v_head_dim=16,
    tokens_per_block=16,
    layout="NHD",
    shard=None,
    lora="none",
    tenant_salt=b"",
    k_precision="int4",
    v_precision="int8",
)
lossy = st.builds(
    replace,
    st.just(NAMESPACE),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    num_layers=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(8, 60).map(lambda half: 2 * half),
    v_head_dim=st.sampled_from([16, 64, 80, 128]),
    tokens_per_block=st.integers(8, 70),
    layout=st.sampled_from(["HND", "NHD"]),
    k_precision=st.sampled_from(["exact", "fp8", "int8"]),
    v_precision=st.sampled_from(PRECISIONS[1:]),
)


@given(namespaces)
def test_encoded_planes_lie_one_behind_the_other_and_fill_the_stored_payload(namespace: Namespace) -> None:
    position = 0
    for plane in namespace.encoded_layout.planes:
        assert plane.offset_bytes == position
        position += plane.size_bytes
    assert position == namespace.stored_bytes


@given(namespaces)
def test_an_exact_namespace_stores_the_payload_itself(namespace: Namespace) -> None:
    exact = replace(namespace, k_precision="exact", v_precision="exact")
    assert exact.encoded_layout.is_exact
    assert exact.stored_bytes == exact.block_layout.payload_bytes
    exact.check_exact()


@given(lossy)
def test_a_plane_in_fewer_bits_is_smaller_and_its_parts_begin_where_a_gpu_reads_at_once(namespace: Namespace) -> None:
    for plane, whole in zip(namespace.encoded_layout.planes, namespace.block_layout.planes, strict=True):
        assert plane.offset_bytes % 16 == plane.size_bytes % 16 == 0
        if not plane.is_exact:
            assert plane.size_bytes < whole.size_bytes
            assert plane.layer_bytes * plane.layer_count == plane.size_bytes
            assert plane.layer_bytes % 16 == plane.minimums_offset_bytes % 16 == 0
            assert plane.minimums_offset_bytes <= plane.scales_offset_bytes < plane.layer_bytes


@given(lossy)
def test_groups_divide_a_plane_evenly(namespace: Namespace) -> None:
    for plane in namespace.encoded_layout.planes:
        dim = namespace.head_dim if plane.kind == "K" else namespace.v_head_dim
        if not plane.is_exact:
            assert namespace.tokens_per_block % plane.group_tokens == dim % plane.group_dim == 0


def test_k_shares_scales_along_tokens_and_v_along_the_head() -> None:
    assert group_shape("int8", "K", tokens=16, dim=128) == (16, 1)
    assert group_shape("int8", "V", tokens=16, dim=128) == (1, 128)
    assert group_shape("int4", "K", tokens=64, dim=128) == (32, 1)
    assert group_shape("int4", "V", tokens=64, dim=80) == (1, 16)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("exact", 1.0),
        ("k16v8", 0.758),
        ("k16v4", 0.656),
        ("k8v8", 0.570),
        ("k8v4", 0.469),
        ("k4v4", 0.344),
        ("fp8", 0.501),
    ],
)
def test_shares_of_a_usual_block_are_those_of_the_documentation(name: str, share: float) -> None:
    k_precision, v_precision = BLOCK_PRECISIONS[name]
    stored = encoded_layout(LLAMA, k_precision=k_precision, v_precision=v_precision)
    assert stored.payload_bytes / LLAMA.payload_bytes == pytest.approx(share, abs=0.001)


def refused(layout: BlockLayout, *, k: str = "exact", v: str = "exact") -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        encoded_layout(layout, k_precision=k, v_precision=v)
    return str(caught.value)


def test_what_cannot_be_stored_in_fewer_bits_is_refused_by_name() -> None:
    assert "k_precision" in refused(LLAMA, k="int7")
    assert "opaque" in refused(replace(LLAMA, order=OpaqueOrder("mine")), v="int8")
    assert "no such plane" in refused(replace(LLAMA, v_head_dim=0), v="int8")
    assert "float8_e4m3fn" in refused(replace(LLAMA, dtype="float8_e4m3fn"), k="fp8")
    assert "odd" in refused(replace(LLAMA, v_head_dim=127), v="int4")


def test_what_would_not_become_smaller_is_refused() -> None:
    """With one token in a block every element of K would have a scale of its own."""
    assert "bytes" in refused(replace(LLAMA, tokens_per_block=1), k="int8")


@given(lossy)
def test_every_precision_is_part_of_the_identity(namespace: Namespace) -> None:
    assert Namespace.decode(namespace.encode()) == namespace
    assert namespace.id != replace(namespace, k_precision="exact", v_precision="exact").id
    with pytest.raises(InvalidArgumentError, match="_precision"):
        namespace.check_exact()


def test_every_precision_has_a_codec_of_its_own() -> None:
    assert set(CODECS) == set(PRECISIONS)
    assert len(set(CODECS.values())) == len(CODECS)


def test_an_envelope_says_the_codecs_and_fits_no_other_size() -> None:
    payload = bytes(NAMESPACE.stored_bytes)
    block = NAMESPACE.envelopes.encode(BLOCK, payload_checksum=checksum(payload)) + payload
    told = Envelope.decode(block)
    assert (told.k_codec, told.v_codec) == (Codec.INT4, Codec.INT8)
    assert told.decoded_bytes == NAMESPACE.block_layout.payload_bytes

    def verify(payload_bytes: int) -> memoryview:
        return verify_block(block, namespace_id=NAMESPACE.id, block_hash=BLOCK, payload_bytes=payload_bytes)

    assert verify(len(payload)) == payload
    for payload_bytes in (len(payload) - 1, len(payload) + 1, told.decoded_bytes):
        with pytest.raises(CorruptBlockError, match="the namespace stores"):
            verify(payload_bytes)


def test_an_encoded_layout_of_exact_planes_says_so() -> None:
    assert encoded_layout(LLAMA, k_precision="exact", v_precision="exact").is_exact
    assert not EncodedLayout(encoded_layout(LLAMA, k_precision="exact", v_precision="fp8").planes).is_exact
