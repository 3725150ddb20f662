from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError
from kvstore.layout import DTYPE_BYTES, BlockLayout, LayoutOrder, OpaqueOrder, parse_order

layouts = st.builds(
    BlockLayout,
    num_layers=st.integers(1, 5),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.integers(1, 8),
    v_head_dim=st.integers(0, 8),
    tokens_per_block=st.integers(1, 6),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    order=st.sampled_from(LayoutOrder),
)


@given(layouts)
def test_planes_lie_one_behind_the_other_and_fill_the_payload(layout: BlockLayout) -> None:
    position = 0
    for plane in layout.planes:
        assert plane.offset_bytes == position
        position += plane.size_bytes
    assert position == layout.payload_bytes


@given(layouts)
def test_there_is_a_v_plane_unless_its_heads_have_no_size(layout: BlockLayout) -> None:
    assert [plane.name for plane in layout.planes] == (["K", "V"] if layout.v_head_dim else ["K"])


@given(layouts)
def test_strides_and_offsets_are_those_of_dense_arrays(layout: BlockLayout) -> None:
    element_bytes = DTYPE_BYTES[layout.dtype]
    element = np.dtype(f"V{element_bytes}")
    payload = np.arange(layout.payload_bytes, dtype=np.uint32).astype(np.uint8)
    for plane, head_dim in zip(layout.planes, (layout.head_dim, layout.v_head_dim), strict=False):
        heads, tokens = layout.num_kv_heads, layout.tokens_per_block
        middle = (heads, tokens) if layout.order is LayoutOrder.HND else (tokens, heads)
        assert plane.shape == (layout.num_layers, *middle, head_dim)
        dense = payload[plane.offset_bytes : plane.offset_bytes + plane.size_bytes].view(element).reshape(plane.shape)
        assert dense.strides == plane.strides_bytes
        last = tuple(size - 1 for size in plane.shape)
        offset = plane.offset_bytes + sum(map(int.__mul__, last, plane.strides_bytes))
        assert dense[last].tobytes() == payload[offset : offset + element_bytes].tobytes()


@given(layouts)
def test_one_layer_of_a_plane_is_one_contiguous_run(layout: BlockLayout) -> None:
    for plane in layout.planes:
        assert plane.strides_bytes[0] * layout.num_layers == plane.size_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "float12"), ("num_layers", 0), ("num_kv_heads", -1), ("head_dim", 2**20 + 1), ("v_head_dim", -1)],
)
def test_sizes_that_no_model_has_are_refused_by_name(field: str, value: object) -> None:
    sizes: dict[str, object] = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 1,
        "v_head_dim": 1,
        "tokens_per_block": 1,
        "dtype": "float16",
        "order": LayoutOrder.HND,
    }
    with pytest.raises(InvalidArgumentError, match=field):
        BlockLayout(**{**sizes, field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["HND", "NHD", "opaque:a", "opaque:vllm.LBHNC.x86_64+avx512"])
def test_an_order_is_read_back_from_how_it_is_written(text: str) -> None:
    assert str(parse_order(text)) == text


@pytest.mark.parametrize(
    "text", ["", "hnd", "opaque", "opaque:", "opaque:.a", "opaque:a b", "opaque:" + "a" * 201, None]
)
def test_an_order_that_nobody_knows_is_refused_and_the_allowed_ones_are_named(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="HND, NHD or opaque:NAME"):
        parse_order(text)


def test_an_opaque_block_is_one_plane_as_large_as_its_k_and_v() -> None:
    sizes = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 4, "tokens_per_block": 16}
    known = BlockLayout(**sizes, dtype="bfloat16", order=LayoutOrder.HND)
    opaque = BlockLayout(**sizes, dtype="bfloat16", order=OpaqueOrder("engine"))
    assert opaque.payload_bytes == known.payload_bytes
    (plane,) = opaque.planes
    assert (plane.name, plane.offset_bytes, plane.size_bytes) == ("KV", 0, known.payload_bytes)
    assert plane.strides_bytes[0] * 3 == plane.size_bytes
