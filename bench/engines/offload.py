"""vLLM's own offload to host memory on the CPU platform, where its worker refuses to copy: the same spec, plain copies.

They are made at once, in the step that asks for them: a lower limit of what the engine's own copies take.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from tests.engines.vllm.cpu_tiering import CpuWorker


class CpuOffloadSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> CpuWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CpuWorker(kv_caches, region, blocks_per_chunk=self.blocks_per_chunk)
