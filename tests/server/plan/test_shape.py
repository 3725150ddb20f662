"""What layers keep, of tokens and of sequences, whole and on one of several GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError
from kvstore_server.plan.shape import AttentionLayer, CacheShape, StateLayer, check_tensor_parallel, fewest_gpus, shards

dims = st.integers(1, 256)
attention = st.builds(
    AttentionLayer,
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=dims,
    v_head_dim=st.integers(0, 256),
    window_tokens=st.none() | st.integers(1, 5_000),
    index_bytes=st.sampled_from([0, 132]),
)
states = st.builds(
    StateLayer,
    recurrent_elements=st.integers(1, 10_000),
    recurrent_element_bytes=st.sampled_from([2, 4]),
    conv_elements=st.integers(0, 1_000),
)
shapes = st.builds(
    CacheShape,
    layers=st.lists(attention | states, min_size=1, max_size=12).map(tuple),
    element_bytes=st.sampled_from([1, 2, 4]),
)
tokens = st.integers(0, 20_000)


def full(*, layers: int, kv_heads: int, head_dim: int = 128, element_bytes: int = 2) -> CacheShape:
    layer = AttentionLayer(num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim)
    return CacheShape(layers=(layer,) * layers, element_bytes=element_bytes)


@given(layers=st.integers(1, 200), kv_heads=dims, head_dim=dims, count=tokens)
def test_full_layers_grow_with_layers_times_tokens(layers: int, kv_heads: int, head_dim: int, count: int) -> None:
    one = full(layers=1, kv_heads=kv_heads, head_dim=head_dim)
    assert one.token_bytes == 2 * kv_heads * head_dim * 2
    assert full(layers=layers, kv_heads=kv_heads, head_dim=head_dim).sequence_bytes(count) == (
        layers * count * one.token_bytes
    )


@given(layers=st.integers(1, 100), kv_heads=st.integers(1, 16), ratio=st.integers(1, 16), count=tokens)
def test_grouped_heads_take_their_share_of_what_as_many_kv_heads_as_heads_take(
    layers: int, kv_heads: int, ratio: int, count: int
) -> None:
    every_head = full(layers=layers, kv_heads=kv_heads * ratio)
    assert full(layers=layers, kv_heads=kv_heads).sequence_bytes(count) * ratio == every_head.sequence_bytes(count)


@given(shape=shapes, first=tokens, more=tokens)
def test_a_longer_sequence_never_takes_less_and_never_more_than_what_is_stored(
    shape: CacheShape, first: int, more: int
) -> None:
    assert shape.sequence_bytes(first) <= shape.sequence_bytes(first + more) <= shape.stored_bytes(first + more)
    added = shape.sequence_bytes(first + more) - shape.sequence_bytes(first)
    assert shape.full_token_bytes * more <= added <= shape.token_bytes * more


@given(shape=shapes, count=tokens)
def test_windows_add_nothing_once_they_are_full(shape: CacheShape, count: int) -> None:
    longest = shape.window_tokens or 0
    added = shape.sequence_bytes(longest + count) - shape.sequence_bytes(longest)
    assert added == shape.full_token_bytes * count


@given(shape=shapes, count=tokens, pp=st.integers(1, 12))
def test_pipeline_stages_share_out_all_layers_evenly(shape: CacheShape, count: int, pp: int) -> None:
    pp = min(pp, len(shape.layers))
    stages = shards(shape, tp=1, pp=pp)
    assert sum((stage.layers for stage in stages), ()) == shape.layers
    assert sum(stage.sequence_bytes(count) for stage in stages) == shape.sequence_bytes(count)
    sizes = [len(stage.layers) for stage in stages]
    assert max(sizes) - min(sizes) <= 1


@given(shape=shapes, count=tokens, tp=st.sampled_from([1, 2, 4, 8, 16]))
def test_tensor_parallel_gpus_hold_everything_at_least_once(shape: CacheShape, count: int, tp: int) -> None:
    (each,) = shards(shape, tp=tp, pp=1)
    assert each.sequence_bytes(count) <= shape.sequence_bytes(count) <= tp * each.sequence_bytes(count)


@pytest.mark.parametrize(("tp", "copies"), [(1, 1), (4, 1), (8, 1), (16, 2), (64, 8)])
def test_kv_heads_are_kept_several_times_where_there_are_more_gpus(tp: int, copies: int) -> None:
    shape = full(layers=3, kv_heads=8)
    (each,) = shards(shape, tp=tp, pp=1)
    assert tp * each.token_bytes == copies * shape.token_bytes


def test_each_gpu_keeps_the_whole_latent() -> None:
    latent = CacheShape(layers=(AttentionLayer(num_kv_heads=1, head_dim=576, v_head_dim=0),) * 61, element_bytes=2)
    assert latent.token_bytes == 70_272
    assert shards(latent, tp=8, pp=1)[0] == latent


def test_gpus_that_cannot_share_the_heads_are_refused_by_name() -> None:
    shape = full(layers=3, kv_heads=8)
    with pytest.raises(InvalidArgumentError, match=r"--tp is 3; allowed: a divisor or a multiple .* 8 KV heads"):
        shards(shape, tp=3, pp=1)
    with pytest.raises(InvalidArgumentError, match="--tp is 0; allowed: 1 to 1024"):
        shards(shape, tp=0, pp=1)
    with pytest.raises(InvalidArgumentError, match="--pp is 4; allowed: 1 to 3"):
        shards(shape, tp=1, pp=4)


def test_a_state_is_of_the_same_size_for_any_sequence() -> None:
    state = StateLayer(recurrent_elements=1_000, recurrent_element_bytes=4, conv_elements=30)
    shape = CacheShape(layers=(state, state), element_bytes=2)
    assert shape.token_bytes == 0
    assert shape.sequence_bytes(1) == shape.sequence_bytes(100_000) == 2 * (4_000 + 60)
    assert replace(shape, element_bytes=1).state_bytes == 2 * (4_000 + 30)


@given(shape=shapes, num_heads=st.sampled_from([8, 12, 32]), weights=st.integers(1, 4096), usable=st.integers(1, 64))
def test_the_fewest_gpus_hold_the_weights_and_share_out_all_heads(
    shape: CacheShape, num_heads: int, weights: int, usable: int
) -> None:
    tp, pp = fewest_gpus(shape, num_heads=num_heads, weights_bytes=weights, usable_bytes=usable)
    check_tensor_parallel(shape, num_heads=num_heads, tp=tp)
    shards(shape, tp=tp, pp=pp)
    is_held = weights <= tp * pp * usable
    assert is_held or (tp, pp) == (1, 1)
    assert pp == 1 or weights > tp * (pp - 1) * usable
    assert tp == 1 or pp > 1 or weights > tp // 4 * usable  # 2 or 4 may not divide the heads, where 8 does


def test_a_node_of_eight_is_filled_before_a_second_stage_begins() -> None:
    shape = full(layers=4, kv_heads=8)
    found = [fewest_gpus(shape, num_heads=32, weights_bytes=one, usable_bytes=10) for one in (10, 11, 40, 41, 81, 999)]
    assert found == [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (1, 1)]


@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "tp"), [(32, 8, 3), (12, 2, 8), (None, 6, 4), (14, 2, 7), (64, 1, 3)]
)
def test_gpus_over_which_heads_cannot_be_shared_out_are_refused(num_heads: int | None, kv_heads: int, tp: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"--tp is {tp}; allowed: a divisor"):
        check_tensor_parallel(full(layers=2, kv_heads=kv_heads), num_heads=num_heads, tp=tp)
