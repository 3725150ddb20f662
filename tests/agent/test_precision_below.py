"""Blocks that are stored in fewer bits below the pool."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu_agent import AgentConfig, GpuAgent
from gpu_agent.core.link import LinkController
from gpu_agent.core.scratch import plan_scratch
from gpu_agent.device.cpu import CpuDevice
from gpu_agent.precision.packed import plane_view
from gpu_agent.precision.reference import decode, encode
from gpu_agent.precision.tier import BlockCodec, stored_namespaces
from kvstore.errors import InvalidArgumentError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore.precision import BLOCK_PRECISIONS, PRECISIONS
from kvstore_client import Client
from tests.agent.conftest import MakeAgent
from tests.agent.fakes import BLOCK_BYTES, NAMESPACE, FakeArena, FakeStore, chain
from tests.conftest import DaemonProcess

HIT, MISS = BlockState.HIT, BlockState.MISS
LAYOUT = NAMESPACE.block_layout


def numbers(hashes: Sequence[BlockHash]) -> Tensor:
    """Rows of blocks with numbers in them, of which those that belong to a hash are always the same."""
    rows = [torch.randn(BLOCK_BYTES // 4, generator=_generator(block_hash)) for block_hash in hashes]
    return torch.stack(rows).view(torch.uint8)


def stored_once(rows: Tensor, precision: str) -> Tensor:
    """What has to come back of blocks that were stored in this precision."""
    rows = rows.clone()
    for plane, kind, name in zip(LAYOUT.planes, ("K", "V"), BLOCK_PRECISIONS[precision], strict=True):
        view = plane_view(rows, plane, LAYOUT)
        view.copy_(decode(encode(view, name, kind=kind), view.dtype))  # type: ignore[arg-type]
    return rows


def make_filled(
    make_agent: MakeAgent, store: FakeStore, *, is_direct: bool, device: CpuDevice | None = None, **settings: object
) -> GpuAgent:
    if is_direct:
        store.shared = (FakeArena(),)
    agent = make_agent(24, device=device or CpuDevice(latency_s=0.0005), **settings)
    agent.load(chain(1, seed=99), torch.zeros((1, BLOCK_BYTES), dtype=torch.uint8))
    assert agent._arenas.wait_settled(10.0)
    return agent


@pytest.mark.parametrize("precision", BLOCK_PRECISIONS)
@pytest.mark.parametrize("is_direct", [True, False])
def test_blocks_that_left_come_back_as_precise_as_they_were_stored(
    make_agent: MakeAgent, store: FakeStore, precision: str, is_direct: bool
) -> None:
    agent = make_filled(make_agent, store, is_direct=is_direct, precision=precision)
    hashes = chain(60)
    assert agent.store(hashes, numbers(hashes)) == (True,) * 60
    left = [block_hash for block_hash, is_here in zip(hashes, agent.contains(hashes), strict=True) if not is_here]
    assert len(left) >= 30
    into = torch.zeros((len(left), BLOCK_BYTES), dtype=torch.uint8)
    assert agent.load(left, into) == (HIT,) * len(left)
    assert torch.equal(into, stored_once(numbers(left), precision))
    counters, stored_bytes = agent.snapshot().counters, stored_namespaces(NAMESPACE, precision)[0].stored_bytes
    assert {len(block) for block in store.blocks.values()} == {stored_bytes}
    assert counters.loaded_bytes == counters.reloaded_count * stored_bytes
    assert (counters.direct_loaded_bytes > 0) == is_direct


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_pin_that_goes_layer_by_layer_finds_every_layer_decoded(
    make_agent: MakeAgent, store: FakeStore, is_direct: bool
) -> None:
    agent = make_filled(make_agent, store, is_direct=is_direct, precision="k16v8", layer_group_count=2)
    hashes = chain(60)
    agent.store(hashes, numbers(hashes))
    expected = stored_once(numbers(hashes[:8]), "k16v8")
    agent.bind("one", hashes[:8])
    with agent.pin("one") as pinned:
        assert pinned.is_complete
        for layer in range(LAYOUT.num_layers):
            assert pinned.wait_layer(layer)
            for plane in LAYOUT.planes:
                came = plane_view(agent.memory[pinned.slots], plane, LAYOUT)[:, layer]
                assert torch.equal(came, plane_view(expected, plane, LAYOUT)[:, layer])
        assert pinned.wait()


def test_a_slot_that_was_given_away_under_the_decoder_is_a_miss(make_agent: MakeAgent, store: FakeStore) -> None:
    agent = make_filled(make_agent, store, is_direct=True, precision="k16v8")
    hashes = chain(60)
    agent.store(hashes, numbers(hashes))
    store.rewritten = {hashes[1]}
    into = torch.zeros((3, BLOCK_BYTES), dtype=torch.uint8)
    assert agent.load(hashes[:3], into) == (HIT, MISS, HIT)
    assert torch.equal(into[::2], stored_once(numbers(hashes[:3:2]), "k16v8"))
    assert not bool(into[1].any())


def test_loads_and_pins_at_the_same_time_do_not_meet_in_scratch(make_agent: MakeAgent, store: FakeStore) -> None:
    """Both decode out of the same few rows, and each is held up between filling them and queueing that."""

    class Hesitant(CpuDevice):
        def compute(self, work: Callable[[], None]):  # type: ignore[no-untyped-def]  # as its base
            time.sleep(0.001)
            return super().compute(work)

    settings = {"precision": "k8v8", "cooldown_steps": 0, "layer_group_count": 2}
    agent = make_filled(make_agent, store, is_direct=True, device=Hesitant(), **settings)
    chains = [chain(6, seed=seed) for seed in range(8)]
    for hashes in chains:
        agent.store(hashes, numbers(hashes))
        assert agent.flush(5.0)
    away = stored_once(torch.cat([numbers(hashes) for hashes in chains]), "k8v8").split(6)
    seen: dict[str, list[bool]] = {"load": [], "pin": []}

    def check(who: str, number: int, came: Tensor) -> None:
        """Each block is as it was when it was stored, or as it comes back."""
        pairs = zip(came, numbers(chains[number]), away[number], strict=False)
        seen[who] += [torch.equal(row, here) or torch.equal(row, back) for row, here, back in pairs]

    def load() -> None:
        for turn in range(40):
            into = torch.zeros((6, BLOCK_BYTES), dtype=torch.uint8)
            assert agent.load(chains[turn % 4], into) == (HIT,) * 6
            check("load", turn % 4, into)

    loading = threading.Thread(target=load)
    loading.start()
    for turn in range(40):
        number = 4 + turn % 4
        agent.bind("one", chains[number])
        with agent.pin("one") as pinned:
            assert pinned.wait()
            check("pin", number, agent.memory[pinned.slots].clone())
        agent.step()
    loading.join()
    assert all(seen["load"])
    assert all(seen["pin"])
    assert len(seen["load"]) == 240
    assert len(seen["pin"]) >= 120
    assert agent.snapshot().counters.reloaded_count >= 120


def lower(agent: GpuAgent, *, is_lowered: bool) -> None:
    """What the agent decides at a step when its link is busy."""
    free = LinkController(block_bytes=1, batch_count_max=16, may_lower_precision=True).decide()
    with agent._pool.changed:
        agent._migrator.follow(free._replace(lowers_precision=is_lowered))


@pytest.mark.parametrize("is_direct", [True, False])
def test_under_pressure_blocks_leave_in_fewer_bits_and_both_forms_are_found(
    make_agent: MakeAgent, store: FakeStore, is_direct: bool
) -> None:
    agent = make_filled(make_agent, store, is_direct=is_direct, precision_under_pressure="k16v8")
    hashes = chain(20)
    lower(agent, is_lowered=False)
    agent.store(hashes[:10], numbers(hashes[:10]))
    assert agent.flush(5.0)
    lower(agent, is_lowered=True)
    agent.store(hashes[10:], numbers(hashes[10:]))
    assert agent.flush(5.0)
    sizes = [len(store.blocks[block_hash]) for block_hash in hashes]
    assert sizes == [BLOCK_BYTES] * 10 + [replace(NAMESPACE, v_precision="int8").stored_bytes] * 10
    agent.store(chain(60, seed=1), numbers(chain(60, seed=1)))
    assert not any(agent.contains(hashes))
    expected = torch.cat([numbers(hashes[:10]), stored_once(numbers(hashes[10:]), "k16v8")])
    into = torch.zeros_like(expected)
    assert agent.load(hashes, into) == (HIT,) * 20
    assert torch.equal(into, expected)
    loaded = agent.snapshot().counters.loaded_bytes
    assert loaded == sum(sizes)


def test_blocks_of_both_forms_reach_the_caller_also_where_there_is_no_slot(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent = make_filled(make_agent, store, is_direct=False, precision_under_pressure="k8v8")
    hashes = chain(6)
    for part, is_lowered in ((hashes[:3], False), (hashes[3:], True)):
        lower(agent, is_lowered=is_lowered)
        agent.store(part, numbers(part))
        assert agent.flush(5.0)
    slots = agent.reserve(agent.slot_count)
    expected = torch.cat([numbers(hashes[:3]), stored_once(numbers(hashes[3:]), "k8v8")])
    into = torch.zeros_like(expected)
    assert agent.load(hashes, into) == (HIT,) * 6
    assert torch.equal(into, expected)
    agent.discard(slots)


def test_a_block_that_is_stored_more_precisely_is_not_sent_again_in_fewer_bits(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent = make_filled(make_agent, store, is_direct=False, precision_under_pressure="k16v8")
    hashes = chain(8)
    agent.store(hashes, numbers(hashes))
    assert agent.flush(5.0)
    sent = agent.snapshot().counters.offloaded_bytes
    lower(agent, is_lowered=True)
    agent.touch(hashes)
    assert agent.flush(5.0)
    assert agent.snapshot().counters.offloaded_bytes == sent
    assert {len(block) for block in store.blocks.values()} == {BLOCK_BYTES}


def test_a_block_that_cannot_be_kept_in_fewer_bits_is_never_stored_and_concerns_no_other(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent = make_filled(make_agent, store, is_direct=False, precision="k8v8")
    hashes = chain(12)
    rows = numbers(hashes)
    rows.view(torch.float32)[5, 7] = float("inf")
    agent.store(hashes, rows)
    agent.flush(5.0)
    assert set(store.blocks) == {*hashes[:5], *hashes[6:]}
    assert store.parents[hashes[6]] == hashes[5]
    assert agent.snapshot().counters.migration_refused_count >= 1
    into = torch.zeros_like(rows)
    assert agent.load(hashes, into) == (HIT,) * 12
    assert torch.equal(into, rows)


def test_blocks_for_which_there_is_no_slot_reach_the_caller_decoded(make_agent: MakeAgent, store: FakeStore) -> None:
    agent, hashes = make_filled(make_agent, store, is_direct=False, precision="k16v8"), chain(60)
    agent.store(hashes, numbers(hashes))
    assert agent.flush(5.0)
    slots = agent.reserve(agent.slot_count)
    assert len(slots) == agent.slot_count
    into = torch.zeros((4, BLOCK_BYTES), dtype=torch.uint8)
    assert agent.load(hashes[:4], into) == (HIT,) * 4
    assert torch.equal(into, stored_once(numbers(hashes[:4]), "k16v8"))
    agent.discard(slots)


def test_precisions_do_not_find_each_others_blocks(make_agent: MakeAgent, daemon: DaemonProcess) -> None:
    """The same hashes, in one daemon: an engine that was not told to takes nothing in fewer bits."""
    hashes = chain(20)
    config = AgentConfig(vram_capacity_bytes=16 * BLOCK_BYTES, precision="k16v8")
    with Client(daemon.unix_address) as client:
        with GpuAgent(NAMESPACE, client, config=config) as agent:
            agent.store(hashes, numbers(hashes))
            assert agent.flush(10.0)
        into = torch.zeros((20, BLOCK_BYTES), dtype=torch.uint8)
        with GpuAgent(NAMESPACE, client, config=replace(config, precision="exact")) as agent:
            assert agent.load(hashes, into) == (MISS,) * 20
        with GpuAgent(NAMESPACE, client, config=config) as agent:
            assert agent.load(hashes, into) == (HIT,) * 20
        assert torch.equal(into, stored_once(numbers(hashes), "k16v8"))


def test_a_pool_and_what_is_on_its_way_stay_below_the_cap() -> None:
    plan = plan_scratch(capacity_bytes=1000, block_bytes=10, encoded=[7], count_max=16)
    assert plan.offload_count == 6
    assert plan.pool_bytes + (plan.offload_count + plan.load_count) * 7 == 1000
    with pytest.raises(InvalidArgumentError, match="at least 24"):
        plan_scratch(capacity_bytes=23, block_bytes=10, encoded=[7], count_max=16)
    assert plan_scratch(capacity_bytes=23, block_bytes=10, encoded=[], count_max=16).pool_bytes == 23


def test_an_engine_says_exact_and_the_agent_what_it_stores(store: FakeStore) -> None:
    config = AgentConfig(vram_capacity_bytes=10 * BLOCK_BYTES)
    with pytest.raises(InvalidArgumentError, match="v_precision"):
        GpuAgent(replace(NAMESPACE, v_precision="int8"), store, config=config)
    with pytest.raises(InvalidArgumentError, match="precision"):
        AgentConfig(vram_capacity_bytes=1, precision="k16v7")
    with pytest.raises(InvalidArgumentError, match="precision_under_pressure"):
        AgentConfig(vram_capacity_bytes=1, precision_under_pressure="none")
    with pytest.raises(InvalidArgumentError, match=r"precision_under_pressure is 'k16v8'.* fewer bytes than k8v8"):
        GpuAgent(NAMESPACE, store, config=replace(config, precision="k8v8", precision_under_pressure="k16v8"))


# --- kernels

Encode = Callable[[Namespace], BlockCodec]


@pytest.fixture
def kernel_codec() -> Encode:
    """A codec that uses the kernels, compiled where there is a GPU, else run by triton's interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        return lambda namespace: BlockCodec(namespace, device=torch.device("cuda"))
    kernels = importlib.import_module("gpu_agent.precision.kernels")

    def make(namespace: Namespace) -> BlockCodec:
        codec = BlockCodec(namespace, device=torch.device("cpu"))
        layout = namespace.block_layout
        codec._kernels = {
            encoded.kind: kernels.PlaneKernels(plane, encoded, layout)
            for plane, encoded in zip(layout.planes, namespace.encoded_layout.planes, strict=True)
            if not encoded.is_exact
        }
        return codec

    return make


def case(precision: str, dtype: str, layout: str, *, tokens: int, dim: int) -> Namespace:
    sizes = {"num_kv_heads": 2, "tokens_per_block": tokens, "head_dim": dim, "v_head_dim": dim}
    precisions = {"k_precision": precision, "v_precision": precision}
    return replace(NAMESPACE, dtype=dtype, layout=layout, **sizes, **precisions)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.parametrize(
    ("dtype", "layout", "tokens", "dim"),
    [("bfloat16", "HND", 16, 80), ("float16", "NHD", 24, 64), ("float32", "NHD", 16, 32)],
)
def test_kernels_make_the_same_bytes_as_the_reference(
    kernel_codec: Encode, precision: str, dtype: str, layout: str, tokens: int, dim: int
) -> None:
    namespace = case(precision, dtype, layout, tokens=tokens, dim=dim)
    on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plain, kernels = BlockCodec(namespace, device=torch.device("cpu")), kernel_codec(namespace)
    element_count = namespace.block_layout.payload_bytes * 3 // (4 if dtype == "float32" else 2)
    values = torch.randn(element_count, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    values[:200] *= torch.logspace(-30, 4, 200).to(values.dtype)
    values[1000:1064] = -0.0
    pool = values.view(torch.uint8).view(3, -1)
    expected, kept = _encoded(plain, namespace, pool)
    made, kept_by_kernel = _encoded(kernels, namespace, pool.to(on))
    assert torch.equal(made.cpu(), expected)
    assert kept.tolist() == kept_by_kernel.tolist() == [1, 1]
    decoded, by_kernel = torch.zeros_like(pool), torch.zeros_like(pool, device=on)
    plain.decode_rows(expected, pool=decoded, rows=[1, 0])
    for layer in range(namespace.num_layers):
        kernels.decode_rows(expected.to(on), pool=by_kernel, rows=[1, 0], layers=range(layer, layer + 1))
    assert torch.equal(by_kernel.cpu(), decoded)


@pytest.mark.parametrize("precision", PRECISIONS[1:])
# What the interpreter says of numbers that are none, and rightly so.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_tell_which_blocks_are_not_kept(kernel_codec: Encode, precision: str) -> None:
    namespace = case(precision, "float32", "HND", tokens=16, dim=32)
    on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = torch.zeros((3, namespace.block_layout.payload_bytes // 4), device=on)
    values[0, 77] = float("nan")
    _, kept = _encoded(kernel_codec(namespace), namespace, values.view(torch.uint8))
    assert kept.tolist() == [1, 0]


def _encoded(codec: BlockCodec, namespace: Namespace, pool: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.full((2, namespace.stored_bytes), 7, dtype=torch.uint8, device=pool.device)
    kept = torch.zeros(2, dtype=torch.uint8, device=pool.device)
    codec.encode_rows(pool, [2, 0], out=out, kept=kept)
    return out, kept


def _generator(block_hash: BlockHash) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(block_hash[:7], "little"))
