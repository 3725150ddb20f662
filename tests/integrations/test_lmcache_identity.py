"""How LMCache's objects become blocks; needs no LMCache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.messages import BlockState, CutReason
from kvstore_client.integrations._identity import model_revision
from kvstore_client.integrations.lmcache.identity import (
    LMCacheSettings,
    Namespaces,
    ObjectLayout,
    Revisions,
    Space,
    chunk_hash,
    locate,
    worth_loading,
)
from kvstore_client.results import LookupResult


class Dtype:
    """Stands for a torch dtype."""

    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize

    def __str__(self) -> str:
        return f"torch.{self.name}"


BF16, FP8 = Dtype("bfloat16", 2), Dtype("float8_e4m3fn", 1)
LAYOUT = ObjectLayout.of([(2, 4, 256, 1024)], [BF16])


def space_of(layout: ObjectLayout = LAYOUT, *, version: str = "0.5.6", **changes: Any) -> Space:
    settings = LMCacheSettings(weights_revision="1")
    namespaces = Namespaces(settings, mode="l2", lmcache_version=version, revisions=Revisions(settings))
    space = namespaces.of("org/model", layout, **{"worker": 0, "worker_count": 1, "settings": {}, **changes})
    assert space is not None
    return space


@pytest.mark.parametrize(
    ("shapes", "dtypes", "block_count", "block_bytes"),
    [
        ([(2, 32, 256, 1024)], [BF16], 16, 2 << 20),
        ([(2, 30, 256, 1024), (2, 2, 256, 512)], [BF16, FP8], 16, (30 << 16) + (1 << 15)),
        ([(1, 61, 64, 576)], [FP8], 2, 61 * 32 * 576),
        ([(8 << 20,)], [BF16], 8, 2 << 20),
        ([(3, 7)], [FP8], 1, 21),
    ],
    ids=["attention", "two kinds of layers", "one latent plane", "recurrent state", "small"],
)
def test_blocks_of_an_object_are_equal_parts_of_its_bytes(
    shapes: list[tuple[int, ...]], dtypes: list[Dtype], block_count: int, block_bytes: int
) -> None:
    space = space_of(ObjectLayout.of(shapes, dtypes))
    assert (space.block_count, space.namespace.block_layout.payload_bytes) == (block_count, block_bytes)


def test_an_object_is_there_when_all_of_its_blocks_are() -> None:
    hashes = [chunk_hash(bytes([number]) * 32) for number in range(3)]
    (located,) = locate([space_of()] * 3, hashes)
    assert located.block_count == 2
    assert len({*located.hashes, *hashes}) == 6 + 3
    assert located.whole_positions([True, True, True, False, True, True]) == [0, 2]
    assert located.whole_positions([True, True, True, False]) == [0]
    whole = [np.arange(located.block_count * 4, dtype=np.uint8) + 10 * number for number in range(3)]
    parts = located.blocks(whole)
    assert [part.tolist() for part in parts[2:4]] == [[10, 11, 12, 13], [14, 15, 16, 17]]
    parts[0][0] = 99
    assert whole[0][0] == 99


def test_another_lmcache_orders_bytes_in_another_way_for_all_we_know() -> None:
    assert space_of().namespace.id != space_of(version="0.5.7").namespace.id


def test_a_worker_is_one_shard_of_all_and_a_cache_of_all_workers_is_none() -> None:
    shard = space_of(worker=1, worker_count=2).namespace.shard
    assert shard is not None
    assert (shard.tp_rank, shard.tp_size) == (1, 2)
    shared = [space_of(worker=worker, worker_count=1).namespace for worker in (1, 2)]
    assert [namespace.shard for namespace in shared] == [None, None]
    assert shared[0].id != shared[1].id


def test_weights_are_read_in_the_background_and_unknown_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_text('{"rope_theta": 1}')
    revisions = Revisions(LMCacheSettings())
    while (found := revisions.of(str(model))) is None:
        pass  # ends with the test's time limit
    assert found == model_revision(str(model))
    (model / "config.json").write_text('{"rope_theta": 2}')
    assert found != model_revision(str(model))


def test_salts_and_tags_make_another_hash() -> None:
    own = bytes(32)
    assert chunk_hash(own) == own
    assert len({chunk_hash(own), chunk_hash(own, parts=("a",)), chunk_hash(own, parts=("b",))}) == 3


def test_keys_are_located_once_in_their_order_and_left_out_without_a_space() -> None:
    small = ObjectLayout.of([(2, 2, 4, 8)], [BF16])
    one, two = space_of(small), space_of(small, worker=1, worker_count=2)
    hashes = [chunk_hash(bytes([number]) * 32) for number in range(3)]
    located = locate([one, two, None, one, one], [hashes[0], hashes[1], hashes[2], hashes[0], hashes[2]])
    assert [(part.namespace, part.hashes, part.positions) for part in located] == [
        (one.namespace, [hashes[0], hashes[2]], [0, 4]),
        (two.namespace, [hashes[1]], [1]),
    ]


def test_what_would_be_there_later_than_it_is_computed_is_not_worth_loading() -> None:
    hit, miss = BlockState.HIT, BlockState.MISS
    assert worth_loading(LookupResult(states=(hit, miss, hit), matched_count=1)) == [True, False, True]
    cut = LookupResult(states=(hit, hit, hit), matched_count=1, left_out_count=2, cut_reason=CutReason.TOO_SLOW)
    assert worth_loading(cut) == [True, False, False]
