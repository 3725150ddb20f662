"""An agent in front of a real daemon that is killed, paused and restarted under it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from gpu_agent import AgentConfig, GpuAgent
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore_client import Client, ClientConfig
from tests.agent.fakes import BLOCK_BYTES, NAMESPACE, chain, content
from tests.conftest import DaemonProcess

SLOT_COUNT = 10
IMPATIENT = {
    transport: ClientConfig(
        attach_timeout_s=1.0,
        control_timeout_s=1.0,
        data_timeout_base_s=1.0,
        breaker_cooldown_initial_s=0.05,
        transport=transport,
    )
    for transport in ("auto", "grpc")
}
each_transport = pytest.mark.parametrize("transport", list(IMPATIENT))
CONFIG = AgentConfig(
    vram_capacity_bytes=SLOT_COUNT * BLOCK_BYTES,
    room_wait_s=3.0,
    cooldown_steps=2,
    retry_pause_initial_s=0.05,
    retry_pause_max_s=0.2,
)


@each_transport
def test_three_times_the_pool_goes_through_a_real_daemon_bit_for_bit(daemon: DaemonProcess, transport: str) -> None:
    hashes = chain(30)
    with (
        Client(daemon.unix_address, config=IMPATIENT[transport]) as client,
        GpuAgent(NAMESPACE, client, config=CONFIG) as agent,
    ):
        assert agent.store(hashes, content(hashes)) == (True,) * 30
        for _ in range(3):
            agent.step()
            assert _load_right_or_miss(agent, hashes) == [BlockState.HIT] * 30
            assert agent.status().used_bytes <= SLOT_COUNT * BLOCK_BYTES
        assert agent.status().lost_count == 0
        assert agent.status().peak_bytes <= CONFIG.vram_capacity_bytes
        counters = agent.snapshot().counters
        assert counters.offloaded_bytes <= 30 * BLOCK_BYTES, "blocks that the daemon still has moved again"
        assert (counters.direct_loaded_bytes > 0) == (transport == "auto")
        others = chain(30, seed=1)
        agent.store(others, content(others))
        agent.step(CONFIG.cooldown_steps + 1)
        assert _load_right_or_miss(agent, others) == [BlockState.HIT] * 30
        assert (agent.snapshot().counters.direct_offloaded_bytes > 0) == (transport == "auto")
        assert client.stats().reservation_count == 0


@each_transport
def test_an_agent_outlives_its_daemon_and_uses_the_next_one(daemon: DaemonProcess, transport: str) -> None:
    """Kill -9 and a restart in under a second: the restarted daemon is empty, and nothing it lost is served."""
    first, second = chain(20, seed=1), chain(20, seed=2)
    with (
        Client(daemon.address, config=IMPATIENT[transport]) as client,
        GpuAgent(NAMESPACE, client, config=CONFIG) as agent,
    ):
        agent.store(first, content(first))
        daemon.kill()
        states = _load_right_or_miss(agent, first)
        assert states.count(BlockState.HIT) == sum(agent.contains(first))
        assert agent.store(second, content(second)) == (True,) * 20
        agent.check_invariants()
        daemon.start()
        assert agent.flush(10.0)
        assert _load_right_or_miss(agent, second).count(BlockState.HIT) >= SLOT_COUNT // 2
        agent.check_invariants()
        assert agent.failure is None


@each_transport
def test_a_paused_daemon_neither_hangs_the_engine_nor_spoils_a_block(daemon: DaemonProcess, transport: str) -> None:
    first, second = chain(20, seed=1), chain(20, seed=2)
    with (
        Client(daemon.address, config=IMPATIENT[transport]) as client,
        GpuAgent(NAMESPACE, client, config=CONFIG) as agent,
    ):
        agent.store(first, content(first))
        daemon.pause()
        assert agent.store(second, content(second)) == (True,) * 20
        _load_right_or_miss(agent, first)
        daemon.resume()
        assert agent.flush(10.0)
        _load_right_or_miss(agent, first)
        _load_right_or_miss(agent, second)
        agent.check_invariants()


def _load_right_or_miss(agent: GpuAgent, hashes: Sequence[BlockHash]) -> list[BlockState]:
    into = torch.full((len(hashes), BLOCK_BYTES), 255, dtype=torch.uint8)
    states = list(agent.load(hashes, into))
    right = content(hashes)
    for row, state in enumerate(states):
        expected = right[row] if state is BlockState.HIT else torch.full_like(right[row], 255)
        assert torch.equal(into[row], expected), f"row {row}, {state.name}"
    return states
