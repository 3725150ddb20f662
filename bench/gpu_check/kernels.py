"""Gather, scatter and the codecs, beside a copy within the device of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.gpu_check.rig import Result, Rig, gigabytes_per_s
from gpu_agent.device import PagedBlocks
from kvstore.layout import BlockLayout, LayoutOrder
from kvstore.namespace import Namespace
from kvstore.precision import PRECISIONS

_TARGET = 0.80


def check_pages(rig: Rig) -> Iterator[Result]:
    """An engine's pages into the pool and back."""
    count = rig.sizes.kernel_batch_count
    rows, indices = rig.rows(count), range(count)
    for order in LayoutOrder:
        blocks = rig.cache(order).blocks(rig.pages(count))

        def gather(blocks: PagedBlocks = blocks) -> None:
            rig.copy_for_caller(blocks, indices, rig.pool, rows)

        def scatter(blocks: PagedBlocks = blocks) -> None:
            rig.copy_for_caller(rig.pool, rows, blocks, indices)

        yield _compared(rig, f"gather_{order.value.lower()}", gather)
        yield _compared(rig, f"scatter_{order.value.lower()}", scatter)


def check_codecs(rig: Rig) -> Iterator[Result]:
    """Blocks of the pool into fewer bits and back."""
    from gpu_agent.precision.tier import BlockCodec

    count = rig.sizes.kernel_batch_count
    rows = rig.rows(count)
    elements = torch.randn((rig.sizes.pool_count, rig.sizes.block_bytes // 2), device=rig.torch_device)
    rig.pool.copy_(elements.to(torch.bfloat16).view(torch.uint8))
    for precision in PRECISIONS:
        if precision == "exact":
            continue
        namespace = _namespace(rig.sizes.layout, k_precision=precision, v_precision=precision)
        yield _same_bits(rig, precision, namespace, rows)
        yield from _kernel_speeds(rig, precision, namespace, rows)
    namespace = _namespace(rig.sizes.layout, k_precision="exact", v_precision="int8")
    codec = BlockCodec(namespace, device=rig.torch_device)
    stored, kept = _stored(rig, namespace)
    yield _compared(
        rig,
        "encode_k16v8_as_the_agent_does",
        lambda: codec.encode_rows(rig.pool, rows, out=stored, kept=kept),
        block_bytes=(rig.sizes.block_bytes + namespace.stored_bytes) // 2,
        target=None,
    )


def _kernel_speeds(rig: Rig, precision: str, namespace: Namespace, rows: list[int]) -> Iterator[Result]:
    names = (f"encode_{precision}", f"decode_{precision}")
    if not rig.is_cuda:
        for name in names:
            yield Result(name=name, passed=None, skipped="kernels run on a GPU")
        return
    from gpu_agent.precision.kernels import PlaneKernels

    layout, layers = rig.sizes.layout, range(rig.sizes.layout.num_layers)
    planes = [
        PlaneKernels(plane, encoded, layout)
        for plane, encoded in zip(layout.planes, namespace.encoded_layout.planes, strict=True)
    ]
    indices = torch.tensor(rows, dtype=torch.int64, device=rig.torch_device)
    stored, kept = _stored(rig, namespace)

    def encode() -> None:
        for kernels in planes:
            kernels.encode(rig.pool, indices, out=stored, kept=kept)

    def decode() -> None:
        for kernels in planes:
            kernels.decode(stored, indices, pool=rig.pool, layers=layers)

    half_bytes = (rig.sizes.block_bytes + namespace.stored_bytes) // 2
    yield _compared(rig, names[0], encode, block_bytes=half_bytes)
    yield _compared(rig, names[1], decode, block_bytes=half_bytes)


def _same_bits(rig: Rig, precision: str, namespace: Namespace, rows: list[int]) -> Result:
    """What the device makes of blocks, and of what was made of them, and what the reference does."""
    from gpu_agent.precision.tier import BlockCodec

    indices = range(len(rows))
    stored, kept = _stored(rig, namespace)
    codec = BlockCodec(namespace, device=rig.torch_device)
    codec.encode_rows(rig.pool, rows, out=stored, kept=kept)
    decoded = torch.empty((len(rows), rig.sizes.block_bytes), dtype=torch.uint8, device=rig.torch_device)
    codec.decode_rows(stored, pool=decoded, rows=indices)
    reference = BlockCodec(namespace, device=torch.device("cpu"))
    expected, expected_kept = torch.empty(stored.shape, dtype=torch.uint8), torch.empty(kept.shape, dtype=torch.uint8)
    reference.encode_rows(rig.pool[rows].cpu(), indices, out=expected, kept=expected_kept)
    expected_blocks = torch.empty(decoded.shape, dtype=torch.uint8)
    reference.decode_rows(expected, pool=expected_blocks, rows=indices)
    is_encoded_right, is_decoded_right = (
        torch.equal(stored.cpu(), expected),
        torch.equal(decoded.cpu(), expected_blocks),
    )
    return Result(
        name=f"bits_{precision}",
        passed=is_encoded_right and is_decoded_right and bool(kept.all()),
        figures={
            "is_encoded_right": is_encoded_right,
            "is_decoded_right": is_decoded_right,
            "stored_share": round(namespace.stored_bytes / rig.sizes.block_bytes, 3),
        },
    )


def _stored(rig: Rig, namespace: Namespace) -> tuple[Tensor, Tensor]:
    """Room for a batch of encoded blocks, and for what is said of each."""
    count = rig.sizes.kernel_batch_count
    stored = rig.device.allocate_scratch(row_count=count, block_bytes=namespace.stored_bytes)
    return stored, torch.ones(count, dtype=torch.uint8, device=rig.torch_device)


def _compared(
    rig: Rig, name: str, call: Callable[[], object], *, block_bytes: int | None = None, target: float | None = _TARGET
) -> Result:
    """`block_bytes` are read, and as many written, per block."""
    size_bytes = rig.sizes.kernel_batch_count * (rig.sizes.block_bytes if block_bytes is None else block_bytes)
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=rig.torch_device)
    copied = torch.empty_like(source)
    ratio, seconds = rig.compare(lambda: rig.kernel_s(lambda: copied.copy_(source)), lambda: rig.kernel_s(call))
    launched_s = rig.called_s(call)
    moved_bytes = rig.sizes.calls * size_bytes
    return rig.speed(
        name,
        ratio,
        target,
        gigabytes_per_s=gigabytes_per_s(moved_bytes, seconds),
        gigabytes_per_s_with_launch=gigabytes_per_s(moved_bytes, launched_s),
    )


def _namespace(layout: BlockLayout, *, k_precision: str, v_precision: str) -> Namespace:
    return Namespace(
        model="gpu-check",
        weights_revision="none",
        tokenizer="none",
        rope="none",
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        v_head_dim=layout.v_head_dim,
        tokens_per_block=layout.tokens_per_block,
        layout=str(layout.order),
        shard=None,
        lora="none",
        tenant_salt=b"",
        k_precision=k_precision,
        v_precision=v_precision,
    )
