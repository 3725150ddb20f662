"""What `kvstore simulate` says of a trace is what a daemon does with it: the same requests and tiers, for real."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvstore.keys import BlockHash
from kvstore.namespace import Namespace
from kvstore_client import Client, Hint, PutState
from kvstore_server.simulate.replay import replay
from kvstore_server.simulate.tiers import TierPlan
from kvstore_server.simulate.trace import Numbering, Trace, TraceRequest
from tests.client.builders import namespace
from tests.conftest import DaemonProcess

_PAYLOAD_BYTES = 3584
"""With its header and envelope a block fills a slot of 4 KiB."""
_MEMORY_BLOCKS = 256
_DISK_BLOCKS = 4 * 255
"""Four segments of 1 MiB, each with a page for its header."""
_SETTINGS = "memory: {{capacity: 1MiB, slab_size: 64KiB, high_watermark: 1, low_watermark: 1, policy: {policy}}}\n"
_WITH_DISK = (
    "nvme: {{path: {path}, capacity: 21MiB, segment_size: 1MiB, admission: all, policy: {policy}, "
    "load_timeout_s: 20}}\n"
)


def _prompts(count: int, *, seed: int) -> list[tuple[int, int, list[int]]]:
    """Session, turn and blocks of each request: a few beginnings that many share, and sessions that grow and end."""
    rng = random.Random(seed)
    fresh = iter(range(1_000_000))
    starts = [[next(fresh) for _ in range(rng.randrange(4, 12))] for _ in range(4)]
    sessions: list[tuple[int, list[int]]] = []
    turns: dict[int, int] = {}
    found = []
    for _ in range(count):
        if len(sessions) < 20 or rng.random() < 0.1:
            sessions.append((len(turns), list(rng.choice(starts))))
            turns[sessions[-1][0]] = 0
        session, blocks = sessions[max(len(sessions) - 1 - int(rng.expovariate(1 / 12)), 0)]
        blocks += [next(fresh) for _ in range(rng.randrange(1, 8))]
        del blocks[80:]
        turns[session] += 1
        found.append((session, turns[session], list(blocks)))
    return found


class Live:
    """Serves requests with a daemon as an engine would: looks, loads, computes the rest, stores it."""

    def __init__(self, client: Client, space: Namespace, *, metrics_address: str) -> None:
        self._client = client
        self._metrics_url = f"http://{metrics_address}/metrics"
        self._space = space
        self._buffers = [bytearray(_PAYLOAD_BYTES) for _ in range(100)]
        self._block = bytes(_PAYLOAD_BYTES)

    def serve(self, blocks: Sequence[int], hint: Hint) -> int:
        """Returns how many leading blocks were there."""
        hashes = [BlockHash(number.to_bytes(32, "big")) for number in blocks]
        count = self._client.lookup(self._space, hashes, hint=hint).matched_count
        if count:
            got = self._client.get(self._space, hashes[:count], self._buffers[:count], hint=hint)
            assert got.matched_count == count, "what a lookup has found left before it was read"
        rest, parent = hashes[count:], hashes[count - 1] if count else None
        while rest:  # what has no room yet, as blocks are on their way to the disk, has it soon
            put = self._client.put(self._space, rest, [self._block] * len(rest), parent_hash=parent, hint=hint)
            done = list(takewhile(lambda state: state is not PutState.DROPPED, put.states))
            parent = rest[len(done) - 1] if done else parent
            rest = rest[len(done) :]
        return count

    def settle(self) -> None:
        """Until nothing is on its way to the disk."""
        while any(sample.value for sample in self._samples("kvstore_nvme_queue_bytes")):
            pass

    def _samples(self, name: str) -> list[Sample]:
        with urlopen(self._metrics_url, timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return [sample for family in families for sample in family.samples if sample.name == name]

    def hit_counts(self) -> tuple[int, int]:
        """Blocks of answered lookups that memory had, and that only the disk had."""
        stats = self._client.stats()
        below = stats.nvme.hit_count if stats.nvme is not None else 0
        return stats.hit_count - below, below


@pytest.mark.parametrize(("policy", "points"), [("lru", 1.0), ("phix", 3.0)])
@pytest.mark.parametrize("disk_blocks", [0, _DISK_BLOCKS])
def test_a_daemon_hits_what_the_replay_hits_in_each_tier(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path, policy: str, points: float, disk_blocks: int
) -> None:
    """To within so many points: a daemon makes room for a few blocks at once, and writes behind."""
    config = tmp_path / "kvstore.yaml"
    config.write_text(_SETTINGS.format(policy=policy))
    if disk_blocks:
        (tmp_path / "nvme").mkdir(mode=0o700)
        config.write_text(_SETTINGS.format(policy=policy) + _WITH_DISK.format(policy=policy, path=tmp_path / "nvme"))
    daemon = start_daemon("--memory-capacity", "1MiB", "--config", str(config))
    space = namespace(payload_bytes=_PAYLOAD_BYTES)
    prompts = _prompts(400, seed=5)
    numbering = Numbering()
    requests: list[TraceRequest] = []
    with Client(daemon.address) as client:
        live = Live(client, space, metrics_address=daemon.metrics_address)
        for session, turn, blocks in prompts:
            requests.append(
                TraceRequest(
                    time_s=time.monotonic(),
                    input_tokens=len(blocks) * space.tokens_per_block,
                    session_id=session,
                    turn=turn,
                    spans=numbering.spans(blocks),
                )
            )
            live.serve(blocks, Hint(session=f"session {session}", turn=turn))
            if disk_blocks:
                live.settle()
        hit_counts = live.hit_counts()
    trace = Trace(
        name="live", tokens_per_block=space.tokens_per_block, requests=tuple(requests), unique_blocks=len(numbering)
    )
    plans = [TierPlan(name="memory", capacity_blocks=_MEMORY_BLOCKS, policy=policy)]
    if disk_blocks:
        plans.append(TierPlan(name="nvme", capacity_blocks=disk_blocks, policy=policy))
    replayed = [tier.counts.hit_blocks for tier in replay(trace, plans).tiers]
    total = sum(len(blocks) for _, _, blocks in prompts)
    for tier, (real, said) in enumerate(zip(hit_counts, replayed, strict=False)):
        assert abs(real - said) * 100 / total <= points, f"tier {tier}: {real} of {total} blocks, {said} in the replay"
    assert hit_counts[0] > total / 4, "nothing to compare"
