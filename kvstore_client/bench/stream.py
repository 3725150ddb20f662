"""`kvstore bench stream`: blocks over the network paths, on loopback, beside one raw TCP connection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from kvstore.errors import KvstoreError, UnavailableError
from kvstore_client.bench import blocks
from kvstore_client.bench.batches import cold_batch_count
from kvstore_client.bench.client_subject import ClientSpec
from kvstore_client.bench.figures import gb_per_s, rounded
from kvstore_client.bench.nixl_bare import NixlSpec
from kvstore_client.bench.plan import Plan, Progress
from kvstore_client.bench.processes import Worker, private_daemon
from kvstore_client.bench.tcp import TcpSpec
from kvstore_client.paths.nixl import check_installed

TRANSPORTS = ("grpc", "bulk", "nixl")
ACTIONS = ("get", "put")
_LIMITS = {"grpc": ("tcp", "vs_tcp"), "bulk": ("tcp", "vs_tcp"), "nixl": ("nixl_bare", "vs_bare")}
"""Side: what it is measured against, and how the ratio is called."""
# As between two machines: on one, UCX would rather read the other process' memory.
_OVER_TCP = {"UCX_TLS": "tcp"}


def measure(plan: Plan, *, progress: Progress) -> dict[str, object]:
    batch_bytes = plan.block_count * plan.block_bytes
    batch_count = cold_batch_count(batch_bytes)
    with ExitStack() as stack:
        address = plan.address or stack.enter_context(_daemon(plan, batch_count=batch_count))
        workers, reasons = _start(_commands(plan, address=address, batch_count=batch_count), stack=stack)
        times_s: dict[tuple[str, str], list[float]] = {(side, action): [] for side in workers for action in ACTIONS}
        progress(0.0)
        for number in range(plan.round_count):
            for position, (side, action) in enumerate(times_s):
                batch = (number + position) % batch_count
                times_s[side, action] += workers[side].measure(action, [batch]).times_s
            progress((number + 1) / plan.round_count)
        for worker in workers.values():
            worker.check()
    return _figures({key: gb_per_s(batch_bytes, samples) for key, samples in times_s.items()}, reasons=reasons)


@contextlib.contextmanager
def _daemon(plan: Plan, *, batch_count: int) -> Iterator[str]:
    environment = _OVER_TCP if _nixl_reason() else _OVER_TCP | {"KVSTORE_NIXL__ENABLED": "true"}
    with private_daemon(
        capacity_bytes=blocks.capacity_bytes(
            block_count=len(TRANSPORTS) * batch_count * plan.block_count, block_bytes=plan.block_bytes
        ),
        slab_bytes=blocks.slab_bytes(plan.block_bytes),
        environment=environment,
    ) as daemon:
        yield daemon.tcp


def _nixl_reason() -> str | None:
    """Why NIXL cannot be measured, as far as it can be told without trying."""
    try:
        check_installed()
    except UnavailableError as error:
        return str(error)
    return None


def _commands(plan: Plan, *, address: str, batch_count: int) -> dict[str, list[str]]:
    revision = blocks.new_revision()
    tcp = TcpSpec(block_count=plan.block_count, block_bytes=plan.block_bytes, batch_count=batch_count, seed=0)
    bare = NixlSpec(block_count=plan.block_count, block_bytes=plan.block_bytes, batch_count=batch_count, seed=1)
    commands = {"tcp": tcp.command()}
    if not (nixl_reason := _nixl_reason()):
        commands["nixl_bare"] = bare.command()
    for seed, transport in enumerate(TRANSPORTS, start=2):
        if transport == "nixl" and nixl_reason:
            continue
        commands[transport] = ClientSpec(
            address=address,
            transport=transport,
            block_count=plan.block_count,
            block_bytes=plan.block_bytes,
            batch_count=batch_count,
            seed=seed,
            revision=revision,
        ).command()
    return commands


def _start(commands: Mapping[str, list[str]], *, stack: ExitStack) -> tuple[dict[str, Worker], dict[str, str]]:
    """What can be measured, and why the others cannot."""
    workers: dict[str, Worker] = {}
    nixl_reason = _nixl_reason()
    reasons: dict[str, str] = {} if nixl_reason is None else {"nixl": nixl_reason}
    started = {
        side: stack.enter_context(Worker(command, name=side, environment=_OVER_TCP))
        for side, command in commands.items()
    }
    for side, worker in started.items():
        try:
            worker.wait_ready()
        except KvstoreError as error:
            if side == "tcp":
                raise
            reasons[side] = str(error)
        else:
            workers[side] = worker
    return workers, reasons


def _figures(speeds: Mapping[tuple[str, str], float], *, reasons: Mapping[str, str]) -> dict[str, object]:
    ratios: dict[str, float | None] = {}
    for side, (limit, name) in _LIMITS.items():
        for action in ACTIONS:
            is_there = (side, action) in speeds and (limit, action) in speeds
            ratios[f"{side}_{action}_{name}"] = speeds[side, action] / speeds[limit, action] if is_there else None
    nixl = [ratio for ratio in (ratios["nixl_get_vs_bare"], ratios["nixl_put_vs_bare"]) if ratio is not None]
    ratios["nixl_vs_bare"] = min(nixl, default=None)
    return {
        **{name: None if ratio is None else rounded(ratio) for name, ratio in ratios.items()},
        **{f"{side}_{action}_gb_per_s": rounded(speed) for (side, action), speed in speeds.items()},
        **{f"{side}_reason": reason for side, reason in reasons.items()},
    }
