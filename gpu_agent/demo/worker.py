"""One stage of the demo in a process of its own: `python -m gpu_agent.demo.worker`, JSON lines in and out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from gpu_agent.agent import GpuAgent
from gpu_agent.config import AgentConfig
from gpu_agent.demo import model as models
from gpu_agent.demo.agent_store import AgentStore
from gpu_agent.demo.decode import answer_without_store, forward, greedy
from gpu_agent.demo.prompts import TOKENS_PER_BLOCK, build_prompts, find_document
from kvstore.errors import KvstoreError
from kvstore.namespace import Namespace
from kvstore_client import Client
from kvstore_client.integrations.transformers import Prefill, PrefixCache, namespace_for
from kvstore_client.integrations.transformers.blocks import gather_blocks

_WARM_UP_IDS = range(100, 164)

Report = Callable[[str], None]


def prepare(report: Report, *, model: str | None, document: str | None, token_counts: list[int]) -> dict[str, Any]:
    """Makes sure the model is there, and cuts the prompts: one part of the document per entry of `token_counts`."""
    folder = str(models.ensure_default_model(report)) if model is None else model
    report("reading the document")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except OSError as error:
        raise OSError(f"the model {folder} cannot be loaded: {error}") from error
    name, text = find_document(document)
    parts = [
        build_prompts(
            tokenizer,
            text,
            token_count=token_count,
            part=part,
            part_count=len(token_counts),
            tokens_per_block=TOKENS_PER_BLOCK,
        )
        for part, token_count in enumerate(token_counts)
    ]
    return {"model": folder, "document": name, "prompts": [asdict(part) for part in parts]}


def answer(
    report: Report,
    *,
    emit: Callable[..., None],
    llm: Any,
    address: str,
    ids: list[int],
    answer_tokens: int,
    save_kv: str | None,
    compare_kv: str | None,
) -> dict[str, Any]:
    """Answers one prompt through the store, then once more without it.

    `save_kv` keeps the K and V that were computed here; `compare_kv` names such a file to hold against what was
    restored here.
    """
    namespace = namespace_for(llm, tokens_per_block=TOKENS_PER_BLOCK)
    with Client(address) as client, PrefixCache(llm, client, namespace=namespace) as prefixes:
        report("answering")
        prefill, ttft_s = _timed_prefill(prefixes, ids)
        said = greedy(llm, prefill.logits[0], prefill.cache, token_count=answer_tokens)
        offloaded = prefill.offloaded.result()
    saved = load_file(compare_kv)["blocks"] if compare_kv else None
    if save_kv:
        save_file({"blocks": _blocks(prefill.cache, namespace, token_count=len(ids))}, save_kv)
    restored = _blocks(prefill.cache, namespace, token_count=prefill.tokens_reused)
    emit("timed")
    report("answering again without the store")
    alone = answer_without_store(llm, ids, first_chunk=prefill.tokens_reused, token_count=answer_tokens)
    return {
        "ttft_s": ttft_s,
        "prompt_tokens": len(ids),
        "tokens_reused": prefill.tokens_reused,
        "stored_blocks": offloaded.stored_count,
        "offloaded_blocks": len(offloaded.states),
        "is_identical": said == alone,
        "max_abs_kv_error": None if saved is None else _max_abs_error(restored, saved, namespace),
        "compared_blocks": 0 if saved is None else restored.shape[0],
    }


def pressure(
    report: Report,
    *,
    emit: Callable[..., None],
    llm: Any,
    address: str,
    first_ids: list[int],
    ids: list[int],
    answer_tokens: int,
    vram_cap_bytes: int | None,
    vram_share: float,
) -> dict[str, Any]:
    """Two turns on one document with the agent's pool smaller than the sequence.

    The first turn's blocks go through the pool, which moves what does not fit to the daemon; the second turn needs
    all of them again. The cap defaults to `vram_share` of the first turn's blocks.
    """
    namespace = namespace_for(llm, tokens_per_block=TOKENS_PER_BLOCK)
    sequence_bytes = len(first_ids) // TOKENS_PER_BLOCK * namespace.block_layout.payload_bytes
    cap_bytes = vram_cap_bytes or int(sequence_bytes * vram_share)
    config = AgentConfig(vram_capacity_bytes=cap_bytes, device="cpu")
    with (
        Client(address) as client,
        GpuAgent(namespace, client, config=config) as agent,
        PrefixCache(llm, AgentStore(agent, client), namespace=namespace) as prefixes,
    ):
        report("first turn, through a small pool")
        first = prefixes.prefill(first_ids)
        first_offloaded = first.offloaded.result()
        agent.step()
        computed = _blocks(first.cache, namespace, token_count=len(first_ids))
        report("second turn, blocks come back")
        second, ttft_s = _timed_prefill(prefixes, ids)
        said = greedy(llm, second.logits[0], second.cache, token_count=answer_tokens)
        prefixes.wait()
        status = agent.status()
    restored = _blocks(second.cache, namespace, token_count=second.tokens_reused)
    emit("timed")
    report("answering again without the store")
    alone = answer_without_store(llm, ids, first_chunk=second.tokens_reused, token_count=answer_tokens)
    return {
        "ttft_s": ttft_s,
        "prompt_tokens": len(ids),
        "tokens_reused": second.tokens_reused,
        "stored_blocks": first_offloaded.stored_count,
        "offloaded_blocks": len(first_offloaded.states),
        "is_identical": said == alone,
        "max_abs_kv_error": _max_abs_error(restored, computed, namespace),
        "compared_blocks": restored.shape[0],
        "sequence_bytes": sequence_bytes,
        "vram_cap_bytes": cap_bytes,
        "peak_vram_bytes": status.peak_bytes,
        "evicted_blocks": status.migrated_count,
        "eviction_batches": status.migration_batch_count,
        "reloaded_blocks": status.reloaded_count,
    }


def offload(
    report: Report, *, emit: Callable[..., None], llm: Any, address: str, ids: list[int], save_kv: str
) -> dict[str, Any]:
    """Computes a prompt, keeps its K and V in a file, and offloads them in small puts; to be killed meanwhile."""
    namespace = namespace_for(llm, tokens_per_block=TOKENS_PER_BLOCK)
    cache = DynamicCache()
    report("computing a document to lose")
    forward(llm, ids, cache)
    blocks = _blocks(cache, namespace, token_count=len(ids))
    save_file({"blocks": blocks}, f"{save_kv}.partial")
    Path(f"{save_kv}.partial").rename(save_kv)
    with Client(address) as client, PrefixCache(llm, client, namespace=namespace, blocks_per_put=2) as prefixes:
        emit("offloading", block_count=blocks.shape[0])
        offloaded = prefixes.offload(ids, cache)
    return {"stored_blocks": offloaded.stored_count, "offloaded_blocks": len(offloaded.states)}


def main() -> None:
    # Libraries may print: keep the protocol's stdout to ourselves and send theirs to the log.
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: str, **fields: Any) -> None:
        _write(protocol, {"event": event, **fields})

    def report(text: str) -> None:
        emit("progress", text=text)

    try:
        model = json.loads(sys.stdin.readline())["model"]
        llm = None if model is None else _load(model, report)
        line = sys.stdin.readline()
        if not line:
            return  # there is no job after all
        job = json.loads(line)
        jobs: dict[str, Callable[..., dict[str, Any]]] = {
            "prepare": prepare,
            "answer": partial(answer, emit=emit, llm=llm),
            "pressure": partial(pressure, emit=emit, llm=llm),
            "offload": partial(offload, emit=emit, llm=llm),
        }
        emit("result", **jobs[job.pop("kind")](report, **job))
    except (KvstoreError, OSError) as error:
        # A model that is not there, a document that is too short: the message says it all.
        emit("failed", text=str(error))
        raise


def _write(protocol: IO[str], event: dict[str, Any]) -> None:
    protocol.write(json.dumps(event) + "\n")
    protocol.flush()


def _load(model: str, report: Report) -> Any:
    """The model, warmed up: libraries and kernels set themselves up on first use, which is nobody's prompt."""
    report("loading the model")
    llm = models.load(model, dtype=torch.float32)
    cache = DynamicCache()
    vocabulary = llm.get_input_embeddings().num_embeddings
    greedy(llm, forward(llm, [token % vocabulary for token in _WARM_UP_IDS], cache), cache, token_count=2)
    return llm


def _timed_prefill(prefixes: PrefixCache, ids: Sequence[int]) -> tuple[Prefill, float]:
    """Seconds from token ids to the first answer token, everything in between included."""
    started_s = time.perf_counter()
    prefill = prefixes.prefill(ids)
    prefill.logits.argmax().item()
    return prefill, time.perf_counter() - started_s


def _blocks(cache: DynamicCache, namespace: Namespace, *, token_count: int) -> torch.Tensor:
    layout = namespace.block_layout
    return gather_blocks(cache, layout, first_block=0, block_count=token_count // layout.tokens_per_block)


def _max_abs_error(restored: torch.Tensor, computed: torch.Tensor, namespace: Namespace) -> float:
    """Largest difference between restored blocks and the same ones when first computed; NaN counts as infinite."""
    if not restored.shape[0]:
        return 0.0
    dtype: torch.dtype = getattr(torch, namespace.dtype)
    left, right = (blocks.view(dtype).float() for blocks in (restored, computed[: restored.shape[0]]))
    return float((left - right).abs().nan_to_num(nan=float("inf")).max())


if __name__ == "__main__":
    main()
