"""The agent as an engine uses it, in front of a store that is a dictionary."""

from __future__ import annotations

import torch

from bench.gpu_check.rig import Rig
from gpu_agent import AgentConfig, GpuAgent
from kvstore.messages import BlockState
from tests.agent.fakes import BLOCK_BYTES, NAMESPACE, FakeArena, FakeStore, chain, content

_SLOT_COUNT = 16
_BLOCK_COUNT = 48
_SETTLE_S = 30.0


def round_trip(rig: Rig, *, is_direct: bool) -> dict[str, int] | None:
    """How many blocks moved, straight to and from the store's memory or not; None when anything was wrong."""
    store = FakeStore(shared=(FakeArena(),) if is_direct else ())
    hashes = chain(_BLOCK_COUNT)
    right = content(hashes).to(rig.torch_device)
    blocks = right.clone()
    config = AgentConfig(vram_capacity_bytes=_SLOT_COUNT * BLOCK_BYTES, device=rig.device.name, batch_count_max=8)
    with GpuAgent(NAMESPACE, store, config=config) as agent:
        if is_direct:
            # Memory is registered once blocks have been asked for.
            agent.load(chain(1, seed=99), torch.zeros((1, BLOCK_BYTES), dtype=torch.uint8))
            agent._arenas.wait_settled(_SETTLE_S)  # noqa: SLF001  # as its own tests do
        is_right = all(agent.store(hashes, blocks))
        blocks.zero_()
        for _ in range(2):
            into = torch.zeros_like(right)
            is_right &= agent.load(hashes, into) == (BlockState.HIT,) * _BLOCK_COUNT and torch.equal(into, right)
        count = _SLOT_COUNT // 2
        agent.bind("sequence", hashes[:count])
        with agent.pin("sequence") as pinned:
            pinned.wait()
            is_right &= pinned.is_complete and torch.equal(agent.memory[pinned.slots], right[:count])
        counters = agent.snapshot().counters
    is_right &= counters.migrated_count > 0 < counters.reloaded_count
    is_right &= (counters.direct_loaded_bytes > 0) is is_direct
    counts = {"migrated": counters.migrated_count, "reloaded": counters.reloaded_count, "lost": counters.lost_count}
    return counts if is_right else None
