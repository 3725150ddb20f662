from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from hypothesis import settings

from gpu_agent import AgentConfig, GpuAgent
from gpu_agent.device import Device
from gpu_agent.store import Store
from tests.agent.fakes import BLOCK_BYTES, NAMESPACE, FakeStore

settings.register_profile("agent", deadline=None)
settings.load_profile("agent")
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Before anything imports triton, whose own functions are read as they are to run.
    os.environ["TRITON_INTERPRET"] = "1"

MakeAgent = Callable[..., GpuAgent]


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def make_agent(store: FakeStore) -> Iterator[MakeAgent]:
    """Agents of `slot_count` blocks that are closed, and checked, at the end of the test."""
    with ExitStack() as stack:

        def make(
            slot_count: int,
            *,
            client: Store = store,
            device: Device | None = None,
            clock: Callable[[], float] = time.monotonic,
            **settings_: object,
        ) -> GpuAgent:
            config = AgentConfig(vram_capacity_bytes=slot_count * BLOCK_BYTES, **settings_)  # type: ignore[arg-type]
            agent = GpuAgent(NAMESPACE, client, config=config, device=device, clock=clock)
            stack.callback(agent.check_invariants)
            stack.callback(store.revive)
            stack.callback(agent.close)
            return agent

        yield make
