"""vLLM's tiered offload on the CPU platform, where its own worker refuses to copy: the same spec, plain copies."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> CpuWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CpuWorker(kv_caches, region, blocks_per_chunk=self.blocks_per_chunk)


class CpuWorker(OffloadingWorker):
    """Copies at once, when it is asked to."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion, *, blocks_per_chunk: int) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._blocks = [tensor.tensor for tensor in kv_caches.tensors]
        self._chunks = [
            region.create_next_worker_view(tensor.page_size_bytes * blocks_per_chunk) for tensor in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Everything is done already."""

    def shutdown(self) -> None:
        self._blocks.clear()
        self._chunks.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, block_spec: Any, chunk_spec: Any, *, is_store: bool) -> bool:
        size_bytes = first_block = first_chunk = 0
        for group, (block_count, first_number) in enumerate(
            zip(block_spec.group_sizes, block_spec.block_indices, strict=True)
        ):
            skipped_count = first_number % self._blocks_per_chunk if block_count else 0
            for index in range(block_count):
                block_id = block_spec.block_ids[first_block + index]
                chunk, part = divmod(skipped_count + index, self._blocks_per_chunk)
                chunk_id = chunk_spec.block_ids[first_chunk + chunk]
                for ref in self._refs[group]:
                    block = self._blocks[ref.tensor_idx][block_id]
                    held = self._chunks[ref.tensor_idx][chunk_id][part * len(block) : (part + 1) * len(block)]
                    source, target = (block, held) if is_store else (held, block)
                    target[: ref.page_size_bytes] = source[: ref.page_size_bytes]
                    size_bytes += ref.page_size_bytes
            first_block += block_count
            first_chunk += -(-(skipped_count + block_count) // self._blocks_per_chunk)
        self._finished.append(TransferResult(job_id, success=True, transfer_size=size_bytes, transfer_time=0.0))
        return True
