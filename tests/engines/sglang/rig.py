"""SGLang as these tests run it: on the CPU, with its hierarchical cache, and shims for what that needs of a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.rig import EngineProcess

PAGE_TOKENS = 64
JOB_S_MAX = 240.0
"""The first prompt waits for what SGLang compiles, where its compiler's cache is empty."""
START_S_MAX = 600.0
"""It needs 30 s of a core for itself, and a busy machine has little of one to give."""
SHIMS = Path(__file__).parents[1] / "sglang_shims"
_MODEL_MODULES = frozenset({"llama", "gemma3_causal"})
_SEEDS = itertools.count(1_000_000)

FLAG: Mapping[str, Any] = {
    "backend_name": "kvstore",
    "module_path": "kvstore_client.integrations.sglang",
    "class_name": "KVStoreHiCache",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}
"""`--hicache-storage-backend-extra-config` as the docs have it."""

_SETTINGS: Mapping[str, Any] = {
    "device": "cpu",
    "log_level": "warning",
    "attention_backend": "torch_native",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "page_size": PAGE_TOKENS,
    "max_total_tokens": 8192,
    "context_length": 2048,
    "mem_fraction_static": 0.3,
    # In which a page's place in a batch, or its batch, changes nothing that counts.
    "dtype": "float32",
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend": "dynamic",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of these tokens."""
    cached_count: int
    """Tokens of the prompt that were not computed."""
    stored_count: int
    """Those of them that came from the store."""


class Prompt:
    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)

    @classmethod
    def random(cls, token_count: int, *, seed: int) -> Prompt:
        rng = random.Random(seed)
        return cls([rng.randrange(256) for _ in range(token_count)])

    @classmethod
    def probe(cls) -> Prompt:
        """Nobody else's: for finding out whether the store works, without touching what a test is about."""
        return cls.random(PAGE_TOKENS + 1, seed=next(_SEEDS))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def whole_count(self) -> int:
        """The most tokens that may come from a cache: whole pages, and one token is always computed."""
        return (len(self) - 1) // PAGE_TOKENS * PAGE_TOKENS


class Engine:
    """One SGLang, with as many processes as it needs."""

    def __init__(
        self,
        model: Path,
        *,
        address: str,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        told = dict(FLAG) | {"address": address, "call_timeout_s": 10.0, "prefetch_threshold": PAGE_TOKENS}
        known = {"PYTHONPATH": str(SHIMS), "HF_HUB_OFFLINE": "1", "SGLANG_DISABLED_MODEL_ARCHS": _other_models()}
        self._process = EngineProcess(
            "tests.engines.sglang_worker",
            settings=dict(_SETTINGS)
            | {"model_path": str(model), "hicache_storage_backend_extra_config": json.dumps(told | dict(extra or {}))}
            | settings,
            environment=known | dict(environment or {}),
            log_path=log_path,
            start_s_max=START_S_MAX,
        )

    def ask(self, *prompts: Prompt, token_count: int = 8) -> list[Answer]:
        """All at once."""
        self.begin(*prompts, token_count=token_count)
        return self.end()

    def begin(self, *prompts: Prompt, token_count: int = 8) -> None:
        told = [{"token_ids": list(prompt.token_ids)} for prompt in prompts]
        self._process.send("generate", prompts=told, token_count=token_count)

    def end(self) -> list[Answer]:
        return [
            Answer(token_ids=tuple(told.pop("token_ids")), logprobs=tuple(told.pop("logprobs")), **told)
            for told in self._process.receive(timeout_s=JOB_S_MAX)
        ]

    def ask_afresh(self, *prompts: Prompt) -> list[Answer]:
        """One after the other, with nothing in the engine's own memory at the start."""
        self.forget()
        return [answer for prompt in prompts for answer in self.ask(prompt)]

    def forget(self) -> None:
        """Drops the engine's own cache, on its device and in host memory; the store keeps what it has."""
        _poll(lambda: self._process.call("forget"), "the engine does not come to rest")

    def wait_stored(self, *prompts: Prompt) -> None:
        """Until the store has all whole pages of these, which were asked before."""
        for prompt in prompts:

            def is_stored(asked: Prompt = prompt) -> bool:
                [answer] = self.ask_afresh(asked)
                return answer.stored_count == asked.whole_count

            _poll(is_stored, f"a prompt of {len(prompt)} tokens is not stored")

    def wait_attached(self) -> None:
        """Until what it stores is found: a daemon that was away is asked again after a cool-down of some seconds."""

        def is_attached() -> bool:
            probe = Prompt.probe()
            self.ask(probe)
            return any(self.ask_afresh(probe)[0].stored_count for _ in range(3))

        _poll(is_attached, "nothing is found in the store")

    def update_weights(self, model: Path) -> bool:
        return bool(self._process.call("update_weights", folder=str(model)))

    def log(self) -> str:
        return self._process.log_path.read_text(errors="replace")

    def kill(self) -> None:
        self._process.kill()


def _other_models() -> str:
    """Model modules that are not used here: SGLang imports them all otherwise, in each of its processes."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    names = {path.stem for path in (Path(spec.origin).parent / "srt" / "models").glob("*.py")}
    return ",".join(sorted(names - _MODEL_MODULES - {"__init__", "registry"}))


def _poll(is_done: Callable[[], object], otherwise: str) -> None:
    deadline_s = time.monotonic() + JOB_S_MAX
    while not is_done():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.01)
