"""Who takes part: vLLM alone, with our connector, with its own offload to host memory, with LMCache."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from kvstore_client.bench.processes import spawn, stop
from tests.engines.rig import START_S_MAX, EngineError, EngineProcess

OFFLOAD_BYTES = 1 << 30
"""Host memory of each other contestant's cache: it holds all that it has to find again."""
_JOB_S_MAX = 600.0
"""A job takes seconds; on a machine that is busy with other things, a minute."""
_MODEL_SETTINGS: Mapping[str, Any] = {"dtype": "bfloat16", "max_model_len": 4096}
_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
}


class NotMeasuredError(Exception):
    """A contestant that cannot take part, and why."""


class Contestant(AbstractContextManager["Contestant"]):
    """One engine process, and its cache's server where that has one; both end with its `with` block."""

    def __init__(self, name: str, *, model: Path, address: str, log_path: Path) -> None:
        self.name = name
        with ExitStack() as stack:
            settings = {"model": str(model), **_MODEL_SETTINGS}
            if name != "alone":
                settings["kv_transfer_config"] = _flag(name, stack, address=address, log_path=log_path)
            self._process = EngineProcess(
                "bench.engines.lmcache_worker" if name == "lmcache" else "bench.engines.worker",
                settings=settings,
                environment=_ENVIRONMENT,
                log_path=log_path,
            )
            stack.callback(self._process.kill)
            self._parts = stack.pop_all()

    def first_token(self, token_ids: list[int], *, cached_min: int) -> float:
        """Seconds; the engine must have had that many tokens of the prompt, of its own or from its connector."""
        answer = self._call("first_token", token_ids=token_ids)
        if answer["cached_count"] < cached_min:
            raise NotMeasuredError(f"{answer['cached_count']} tokens were cached, expected {cached_min} or more")
        return float(answer["first_token_s"])

    def throughput(self, prompts: list[list[int]], *, token_count: int) -> dict[str, float]:
        return dict(self._call("throughput", prompts=prompts, token_count=token_count))

    def profile(self, token_ids: list[int]) -> dict[str, float]:
        return dict(self._call("profile", token_ids=token_ids))

    def forget(self) -> None:
        """Drops the engine's own blocks, once all that is being stored is stored."""
        self._call("forget")

    def loaded_bytes(self) -> float:
        return float(self._call("metrics").get("vllm:kvstore_load_bytes", 0.0))

    def close(self) -> None:
        self._parts.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, job: str, **arguments: Any) -> Any:
        return self._process.call(job, timeout_s=_JOB_S_MAX, **arguments)


def why_absent(name: str) -> str | None:
    if name == "lmcache" and importlib.util.find_spec("lmcache") is None:
        return "lmcache is not installed in the engine's environment"
    return None


def _flag(name: str, stack: ExitStack, *, address: str, log_path: Path) -> dict[str, Any]:
    extra: dict[str, Any]
    match name:
        case "kvstore":
            own = {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore_client.integrations.vllm"}
            extra = {"address": address}
        case "native_offload":
            own = {"kv_connector": "OffloadingConnector"}
            extra = {
                "cpu_bytes_to_use": OFFLOAD_BYTES,
                "spec_name": "CpuOffloadSpec",
                "spec_module_path": "bench.engines.offload",
            }
        case "lmcache":
            module = "lmcache.integration.vllm.lmcache_mp_connector"
            own = {"kv_connector": "LMCacheMPConnector", "kv_connector_module_path": module}
            port = _start_lmcache(stack, log_path=log_path.with_suffix(".server.log"))
            extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        case _:
            raise AssertionError(name)
    return own | {
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _start_lmcache(stack: ExitStack, *, log_path: Path) -> int:
    """Its server, with blocks of the engine's size, in the mode that it has for engines without a GPU. Its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    command = [
        *(sys.executable, "-m", "lmcache.v1.multiprocess.server"),
        *("--host", "127.0.0.1", "--port", str(port), "--chunk-size", "128"),
        *("--supported-transfer-mode", "engine_driven", "--l1-size-gb", str(OFFLOAD_BYTES >> 30)),
        *("--eviction-policy", "LRU", "--disable-observability"),
    ]
    with log_path.open("wb") as log:
        environment = os.environ | _ENVIRONMENT
        server = spawn(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    stack.callback(stop, server)
    deadline_s = time.monotonic() + START_S_MAX
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            if server.poll() is None and time.monotonic() < deadline_s:
                time.sleep(0.1)
                continue
            raise EngineError(f"LMCache's server does not start\n{log_path.read_text()[-2000:]}") from None
        return port
