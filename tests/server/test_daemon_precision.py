"""A daemon that stores planes in fewer bits: to it they are bytes, of which there are fewer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import InvalidArgumentError
from kvstore.keys import hash_blocks
from kvstore.messages import BlockState
from kvstore_client import Client, ClientConfig
from tests.conftest import DaemonProcess
from tests.faults import blocks

SPACE = replace(blocks.namespace("mixed", head_dim=128), k_precision="int8", v_precision="exact")
HASHES = hash_blocks(range(6 * 16), tokens_per_block=16)


def content(size_bytes: int) -> list[np.ndarray]:
    return [np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8) for seed in range(len(HASHES))]


def test_blocks_in_fewer_bits_go_over_every_path_and_survive_on_disk(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    space = replace(SPACE, v_precision="int4")
    daemon = start_daemon("--nvme-path", str(tmp_path), "--nvme-capacity", "64MiB")
    right = content(space.stored_bytes)
    assert space.stored_bytes < space.block_layout.payload_bytes

    def check(transport: str) -> None:
        address = daemon.unix_address if transport == "slab" else daemon.address
        with Client(address, config=ClientConfig(transport=transport)) as client:
            into = [np.empty_like(block) for block in right]
            assert set(client.get(space, HASHES, into).states) == {BlockState.HIT}
            assert all(map(np.array_equal, into, right))

    with Client(daemon.unix_address) as client:
        assert client.put(space, HASHES[:2], right[:2]).stored_count == 2
    for transport, part in (("bulk", slice(2, 4)), ("grpc", slice(4, 6))):
        with Client(daemon.address, config=ClientConfig(transport=transport)) as client:
            assert client.put(space, HASHES[part], right[part], parent_hash=HASHES[part.start - 1]).stored_count == 2
    for transport in ("slab", "bulk", "grpc"):
        check(transport)
    assert daemon.stop() == 0
    daemon.start()
    check("slab")


def test_blocks_as_an_engine_has_them_are_refused_where_they_are_stored_in_fewer_bits(daemon: DaemonProcess) -> None:
    with Client(daemon.unix_address) as client:
        exact = content(SPACE.block_layout.payload_bytes)
        with pytest.raises(InvalidArgumentError, match=str(SPACE.stored_bytes)):
            client.put(SPACE, HASHES, exact)


def test_a_view_shows_the_planes_that_are_stored_exact_and_names_the_others(daemon: DaemonProcess) -> None:
    right = content(SPACE.stored_bytes)
    with Client(daemon.unix_address) as client:
        client.put(SPACE, HASHES, right)
        with client.view(SPACE, HASHES[:1]) as (view,):
            assert view is not None
            v = SPACE.encoded_layout.planes[1]
            assert view.numpy(plane="v").tobytes() == right[0][v.offset_bytes : v.offset_bytes + v.size_bytes].tobytes()
            with pytest.raises(InvalidArgumentError, match="int8"):
                view.numpy(plane="k")
