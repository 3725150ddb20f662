"""`kvstore bench node`: blocks between a client and its node's daemon, beside a plain copy of the same bytes."""

from __future__ import annotations

from contextlib import ExitStack

from kvstore_client.bench import blocks
from kvstore_client.bench.batches import cold_batch_count
from kvstore_client.bench.client_subject import ClientSpec
from kvstore_client.bench.figures import gb_per_s, median, rounded
from kvstore_client.bench.plan import Plan, Progress
from kvstore_client.bench.processes import Worker, private_daemon, together_s

CLIENT_COUNT = 4
_BATCH_COUNT_TOGETHER = 4
# Each client moves so many batches per sample: 4 x 8 x 32 MiB = 1 GiB takes 0.2 s, far above what starting costs.
_BURST_COUNT = 8
# A burst is as long as a dozen single batches, and its spread accordingly smaller.
_ROUNDS_PER_BURST = 5
# Views are so short that waking up for one would be most of what is measured.
_REPEATS = {"view": 8}


def measure(plan: Plan, *, progress: Progress) -> dict[str, object]:
    batch_bytes = plan.block_count * plan.block_bytes
    batch_count = cold_batch_count(batch_bytes)
    batch_count_together = max(_BATCH_COUNT_TOGETHER, -(-batch_count // CLIENT_COUNT))
    kept_count = (batch_count + CLIENT_COUNT * batch_count_together) * plan.block_count
    revision = blocks.new_revision()
    with ExitStack() as stack:
        address = plan.address
        if address is None:
            daemon = private_daemon(
                capacity_bytes=blocks.capacity_bytes(block_count=kept_count, block_bytes=plan.block_bytes),
                slab_bytes=blocks.slab_bytes(plan.block_bytes),
            )
            address = stack.enter_context(daemon).unix
        specs = [
            ClientSpec(
                address=address,
                transport=plan.transport,
                block_count=plan.block_count,
                block_bytes=plan.block_bytes,
                batch_count=batch_count if seed == 0 else batch_count_together,
                seed=seed,
                revision=revision,
            )
            for seed in range(1 + CLIENT_COUNT)
        ]
        with Worker(specs[0].command(), name="one client") as one:
            one.wait_ready()
            progress(0.0)
            times_s = _measure_one(one, plan=plan, batch_count=batch_count, progress=lambda share: progress(share / 2))
            one.check()
        together = [stack.enter_context(Worker(spec.command(), name="four clients")) for spec in specs[1:]]
        for worker in together:
            worker.wait_ready()
        together_times_s = _measure_together(
            together,
            burst_count=max(3, plan.round_count // _ROUNDS_PER_BURST),
            batch_count=batch_count_together,
            progress=lambda share: progress(0.5 + share / 2),
        )
        for worker in together:
            worker.check()
    burst_bytes = CLIENT_COUNT * _BURST_COUNT * batch_bytes
    speeds = {action: gb_per_s(batch_bytes, times_s[action]) for action in ("memcpy", "put", "get", "get_first")}
    speeds_together = {action: gb_per_s(burst_bytes, samples) for action, samples in together_times_s.items()}
    ratios = {
        "get_vs_memcpy": speeds["get"] / speeds["memcpy"],
        "put_vs_memcpy": speeds["put"] / speeds["memcpy"],
        "get_first_vs_memcpy": speeds["get_first"] / speeds["memcpy"],
        "view_us_p50": median(times_s["view"]) * 1e6,
        "view_first_us_p50": median(times_s["view_first"]) * 1e6,
        "get_4_clients_vs_memcpy_4": speeds_together["get"] / speeds_together["memcpy"],
        "put_4_clients_vs_memcpy_4": speeds_together["put"] / speeds_together["memcpy"],
    }
    figures = ratios | {
        "memcpy_gb_per_s": speeds["memcpy"],
        "get_gb_per_s": speeds["get"],
        "get_first_gb_per_s": speeds["get_first"],
        "put_gb_per_s": speeds["put"],
        "memcpy_4_gb_per_s": speeds_together["memcpy"],
        "get_4_clients_gb_per_s": speeds_together["get"],
        "put_4_clients_gb_per_s": speeds_together["put"],
    }
    return {name: rounded(value) for name, value in figures.items()} | one.facts


def _measure_one(worker: Worker, *, plan: Plan, batch_count: int, progress: Progress) -> dict[str, list[float]]:
    actions = ("memcpy", "put", "get", "get_first", "view_first", "view")
    times_s: dict[str, list[float]] = {action: [] for action in actions}
    for number in range(plan.round_count):
        for position, action in enumerate(actions):
            # Another batch for each action, so that none finds its bytes in a cache; `view` needs what
            # `view_first` has seen.
            batch = (number + min(position, 4)) % batch_count
            times_s[action] += worker.measure(action, [batch] * _REPEATS.get(action, 1)).times_s
        progress((number + 1) / plan.round_count)
    return times_s


def _measure_together(
    workers: list[Worker], *, burst_count: int, batch_count: int, progress: Progress
) -> dict[str, list[float]]:
    times_s: dict[str, list[float]] = {action: [] for action in ("memcpy", "put", "get")}
    for number in range(burst_count):
        burst = [(number + step) % batch_count for step in range(_BURST_COUNT)]
        for action, samples in times_s.items():
            samples.append(together_s(workers, action, burst))
        progress((number + 1) / burst_count)
    return times_s
