"""`kvstore bench lookup`: how long asking for a prompt's blocks takes, beside MGET of as many keys from Redis."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from kvstore.errors import KvstoreError, UnavailableError
from kvstore_client.bench import blocks, ping, redis_mget
from kvstore_client.bench.figures import median, percentile, rounded
from kvstore_client.bench.plan import Plan, Progress
from kvstore_client.bench.processes import Worker, private_daemon
from kvstore_client.bench.subject import serve
from kvstore_client.client import Client
from kvstore_client.config import ClientConfig

PROMPT_COUNTS = (256, 8192)
"""Hashes per lookup: prompts of 4,096 and 131,072 tokens, 16 to a block."""
BLOCK_BYTES = 512
"""A lookup moves no blocks, so they may be small; their slots take 4 KiB each."""
# Short ones repeat, or waking up would be most of what is measured.
_REPEATS = {256: 10, 8192: 2}
_PUT_COUNT = 1024
ACTIONS = ("lookup", "lookup_first")


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupSpec:
    address: str
    transport: str

    def command(self) -> list[str]:
        return [sys.executable, "-m", "kvstore_client.bench.lookup", json.dumps(asdict(self))]


class LookupSubject:
    """`lookup` of so many hashes, all of them hits, from a list of hashes to a result with every state.

    Action `lookup` is by the client that has put the blocks, `lookup_first` by one that has met none of them.
    """

    def __init__(self, spec: LookupSpec) -> None:
        self._namespace = blocks.namespace(BLOCK_BYTES, revision=blocks.new_revision())
        self._hashes = blocks.new_hashes(max(PROMPT_COUNTS))
        self._client, self._stranger = (
            Client(spec.address, config=ClientConfig(transport=spec.transport)) for _ in range(2)
        )
        source = bytes(_PUT_COUNT * BLOCK_BYTES)
        for start in range(0, len(self._hashes), _PUT_COUNT):
            parent_hash = self._hashes[start - 1] if start else None
            part = self._hashes[start : start + _PUT_COUNT]
            result = self._client.put(self._namespace, part, source, parent_hash=parent_hash)
            if result.stored_count != len(part):
                raise UnavailableError(f"{result.stored_count} of {len(part)} blocks stored: {result.error}")
        self.check()

    def prepare(self, action: str, batches: Sequence[int]) -> None:
        self._prompts = {count: self._hashes[:count] for count in batches}

    def run(self, action: str, batch: int) -> None:
        client = self._client if action == "lookup" else self._stranger
        result = client.lookup(self._namespace, self._prompts[batch])
        if result.matched_count != batch:
            raise UnavailableError(f"{result.matched_count} of {batch} blocks found: {result.error}")

    def check(self) -> None:
        self.prepare("", PROMPT_COUNTS)
        for count in PROMPT_COUNTS:
            for action in ACTIONS:
                self.run(action, count)

    def facts(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self._client.close()
        self._stranger.close()


def measure(plan: Plan, *, progress: Progress) -> dict[str, object]:
    with ExitStack() as stack:
        address = plan.address
        if address is None:
            daemon = private_daemon(
                capacity_bytes=blocks.capacity_bytes(block_count=max(PROMPT_COUNTS), block_bytes=BLOCK_BYTES),
                slab_bytes=blocks.slab_bytes(BLOCK_BYTES),
            )
            address = stack.enter_context(daemon).unix
        ours = LookupSpec(address=address, transport=plan.transport)
        lookup = stack.enter_context(Worker(ours.command(), name="lookup"))
        lookup.wait_ready()
        workers = dict.fromkeys(ACTIONS, lookup)
        workers["ping"] = stack.enter_context(Worker(ping.command(), name="ping"))
        workers["ping"].wait_ready()
        redis_reason = ""
        redis = stack.enter_context(Worker(redis_mget.command(max(PROMPT_COUNTS)), name="redis"))
        try:
            redis.wait_ready()
        except KvstoreError as error:
            redis_reason = str(error)
        else:
            workers |= dict.fromkeys(redis.facts["forms"], redis)
        times_s: dict[tuple[str, int], list[float]] = {
            (action, count): [] for count in PROMPT_COUNTS for action in workers
        }
        progress(0.0)
        for number in range(plan.round_count):
            for action, count in times_s:
                order = [count] * _REPEATS[count]
                times_s[action, count] += workers[action].measure(action, order).times_s
            progress((number + 1) / plan.round_count)
        for worker in set(workers.values()):
            worker.check()
    return _figures(times_s, redis_reason=redis_reason)


def _figures(times_s: Mapping[tuple[str, int], Sequence[float]], *, redis_reason: str) -> dict[str, object]:
    found: dict[str, float | None] = {}
    for count in PROMPT_COUNTS:
        for action in ACTIONS:
            name = action.replace("lookup", f"lookup_{count}")
            found[f"{name}_p50_ms"] = median(times_s[action, count]) * 1e3
            found[f"{name}_p99_ms"] = percentile(times_s[action, count], 99) * 1e3
            found[f"{name}_vs_ping"] = median(times_s[action, count]) / median(times_s["ping", count])
            found[f"{name}_vs_redis"] = None
        found[f"ping_{count}_p50_ms"] = median(times_s["ping", count]) * 1e3
        forms = {
            form: median(times_s[form, key]) for form, key in times_s if form not in (*ACTIONS, "ping") and key == count
        }
        found |= {f"{form}_{count}_p50_ms": time_s * 1e3 for form, time_s in forms.items()}
        if forms:
            fastest_s = min(forms.values())
            found[f"redis_{count}_p50_ms"] = fastest_s * 1e3
            for action in ACTIONS:
                ratio = fastest_s / median(times_s[action, count])
                found[action.replace("lookup", f"lookup_{count}") + "_vs_redis"] = ratio
    found["lookups_per_s"] = 1 / median(times_s["lookup", min(PROMPT_COUNTS)])
    found["lookup_hashes_per_s"] = max(PROMPT_COUNTS) / median(times_s["lookup", max(PROMPT_COUNTS)])
    for action in ACTIONS:
        whole = found[action.replace("lookup", f"lookup_{max(PROMPT_COUNTS)}") + "_vs_redis"]
        found[f"{action}_vs_redis"] = whole
    figures: dict[str, object] = {name: None if value is None else rounded(value) for name, value in found.items()}
    return figures | ({"redis_reason": redis_reason} if redis_reason else {})


if __name__ == "__main__":
    serve(lambda: LookupSubject(LookupSpec(**json.loads(sys.argv[1]))))
