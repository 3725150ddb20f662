from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError
from kvstore.keys import (
    BlockHash,
    NamespaceId,
    block_hash_from_engine,
    chain_root,
    hash_blocks,
    pack_hashes,
    session_hash,
    split_hashes,
)
from tests.contract.strategies import hashes, u32

prompts = st.lists(u32, max_size=40)
block_sizes = st.integers(1, 9)
extras = st.lists(st.binary(max_size=8), max_size=3)


class TensorLike:
    """What `hash_blocks` may rely on in a tensor: that numpy can take it."""

    def __init__(self, values: list[int]) -> None:
        self._values = values

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._values, dtype=np.int64)


@given(prompts, block_sizes)
def test_only_full_blocks_have_hashes(tokens: list[int], size: int) -> None:
    assert len(hash_blocks(tokens, tokens_per_block=size)) == len(tokens) // size


@given(prompts, prompts, block_sizes)
def test_prompts_share_hashes_exactly_as_far_as_they_share_blocks(one: list[int], other: list[int], size: int) -> None:
    pairs = list(zip(hash_blocks(one, tokens_per_block=size), hash_blocks(other, tokens_per_block=size), strict=False))
    for index, (left, right) in enumerate(pairs):
        end = (index + 1) * size
        assert (left == right) == (one[:end] == other[:end])


@given(prompts, prompts, block_sizes)
def test_what_follows_does_not_change_the_hashes_of_a_prefix(head: list[int], tail: list[int], size: int) -> None:
    alone = hash_blocks(head, tokens_per_block=size)
    assert hash_blocks(head + tail, tokens_per_block=size)[: len(alone)] == alone


@given(prompts.filter(bool))
def test_blocks_of_another_size_never_share_a_hash(tokens: list[int]) -> None:
    by_size = [set(hash_blocks(tokens, tokens_per_block=size)) for size in range(1, 10)]
    assert len(set().union(*by_size)) == sum(map(len, by_size))
    assert len({chain_root(size) for size in range(1, 10)}) == 9


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), block_sizes)
def test_lists_arrays_and_tensors_of_the_same_ids_hash_alike(tokens: list[int], size: int) -> None:
    expected = hash_blocks(tokens, tokens_per_block=size)
    for same in (
        tuple(tokens),
        array("q", tokens),
        np.array(tokens, dtype=np.int64),
        np.array(tokens, dtype=np.uint32),
        np.array(tokens, dtype=">i8"),
        np.repeat(np.array(tokens, dtype=np.int32), 2)[::2],
        TensorLike(tokens),
    ):
        assert hash_blocks(same, tokens_per_block=size) == expected


def test_a_torch_tensor_hashes_as_its_list_does() -> None:
    torch = pytest.importorskip("torch")
    tokens = list(range(100))
    assert hash_blocks(torch.tensor(tokens), tokens_per_block=16) == hash_blocks(tokens, tokens_per_block=16)


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [1.5],
        ["a"],
        "abcd",
        b"\1\0\0\0",
        bytearray(4),
        np.array([-1]),
        np.array([2**32]),
        np.array([1.0]),
        np.array([True]),
        np.array([[1, 2]]),
    ],
    ids=repr,
)
def test_what_is_no_run_of_token_ids_is_refused(tokens: object) -> None:
    with pytest.raises(InvalidArgumentError, match="tokens"):
        hash_blocks(tokens, tokens_per_block=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, 2**20 + 1, 2**32])
def test_a_block_size_that_no_layout_has_is_refused(size: int) -> None:
    with pytest.raises(InvalidArgumentError, match="tokens_per_block"):
        hash_blocks([1], tokens_per_block=size)


@given(extras, extras)
def test_extra_keys_give_equal_hashes_only_if_they_are_equal(one: list[bytes], other: list[bytes]) -> None:
    left = hash_blocks([1, 2], tokens_per_block=1, extra_keys={0: one})
    right = hash_blocks([1, 2], tokens_per_block=1, extra_keys={0: other})
    assert (left[0] == right[0]) == (one == other)
    assert (left[1] == right[1]) == (one == other)


def test_extra_keys_change_their_block_and_all_later_ones_but_none_before() -> None:
    plain = hash_blocks(range(8), tokens_per_block=2)
    marked = hash_blocks(range(8), tokens_per_block=2, extra_keys={1: [b"image"]})
    assert [left == right for left, right in zip(plain, marked, strict=True)] == [True, False, False, False]


def test_hashes_are_the_same_in_every_process() -> None:
    program = (
        "from kvstore.keys import hash_blocks\n"
        "for h in hash_blocks(range(64), tokens_per_block=16, extra_keys={1: [b'x']}): print(h.hex())\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "random")
    }
    here = hash_blocks(range(64), tokens_per_block=16, extra_keys={1: [b"x"]})
    assert outputs == {"".join(f"{block.hex()}\n" for block in here).encode()}


@given(hashes)
def test_engine_hashes_of_our_length_pass_unchanged(engine_hash: bytes) -> None:
    assert block_hash_from_engine(engine_hash) == engine_hash


@given(st.binary(min_size=1, max_size=80), st.binary(min_size=1, max_size=80))
def test_engine_hashes_of_any_length_stay_apart(one: bytes, other: bytes) -> None:
    left, right = block_hash_from_engine(one), block_hash_from_engine(other)
    assert len(left) == len(right) == 32
    assert (left == right) == (one == other)


def test_a_session_is_hashed_as_the_page_says() -> None:
    golden = json.loads((Path(__file__).parent / "golden" / "keys.json").read_text(encoding="utf-8"))
    namespace_id = NamespaceId(bytes.fromhex(golden["namespaces"][0]["namespace_id"]))
    assert session_hash(namespace_id, "a chat") == 0x5EFB322602068CA3


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.binary(min_size=32, max_size=32))
def test_a_session_hash_is_64_bits_and_never_the_one_for_none(name: str, namespace_id: bytes) -> None:
    assert 0 < session_hash(NamespaceId(namespace_id), name) < 1 << 64


def test_an_empty_engine_hash_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="engine_hash"):
        block_hash_from_engine(b"")


@given(st.lists(hashes, max_size=20))
def test_packed_hashes_come_apart_as_they_were(blocks: list[BlockHash]) -> None:
    assert split_hashes(pack_hashes(blocks)) == blocks


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 512, 1000])
def test_any_number_of_packed_hashes_comes_apart(count: int) -> None:
    blocks = [BlockHash(number.to_bytes(32, "big")) for number in range(count)]
    assert split_hashes(pack_hashes(blocks)) == blocks


@given(st.binary(max_size=100).filter(lambda data: len(data) % 32 != 0))
def test_packed_hashes_of_a_broken_length_are_refused(packed: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="block_hashes"):
        split_hashes(packed)


@given(head=st.lists(u32, min_size=3), tail=prompts, size=st.integers(1, 3))
def test_a_chain_goes_on_behind_a_block_as_if_it_had_been_hashed_at_once(
    head: list[int], tail: list[int], size: int
) -> None:
    whole = hash_blocks(head[: len(head) // size * size] + tail, tokens_per_block=size)
    known = hash_blocks(head, tokens_per_block=size)
    assert whole == known + hash_blocks(tail, tokens_per_block=size, parent_hash=known[-1])
