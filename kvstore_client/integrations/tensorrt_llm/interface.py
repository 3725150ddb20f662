"""The engine's interface, from where the installed version has it."""

from __future__ import annotations

import tensorrt_llm
from tensorrt_llm._utils import mpi_rank

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )
except ModuleNotFoundError:  # up to 1.2
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import KvCacheConnectorScheduler, KvCacheConnectorWorker

ENGINE_VERSION: str = tensorrt_llm.__version__

__all__ = ["ENGINE_VERSION", "KvCacheConnectorScheduler", "KvCacheConnectorWorker", "mpi_rank"]
