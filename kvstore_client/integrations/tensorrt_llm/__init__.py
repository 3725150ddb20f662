"""TensorRT-LLM: its KV-cache connector, on the PyTorch backend.

    kv_connector_config:
      connector_module: kvstore_client.integrations.tensorrt_llm
      connector_scheduler_class: KVStoreScheduler
      connector_worker_class: KVStoreWorker

The scheduler answers with blocks that it already holds: the engine has no way to be told that a load failed. What it
has not in hand when it answers is not offered. `plan` decides; `model` is who the blocks are of.
"""

from __future__ import annotations

from kvstore_client.integrations.tensorrt_llm.scheduler import KVStoreScheduler
from kvstore_client.integrations.tensorrt_llm.worker import KVStoreWorker

__all__ = ["KVStoreScheduler", "KVStoreWorker"]
