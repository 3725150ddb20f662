"""vLLM as these tests run it: on the CPU, in one process, in eager mode."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engines.rig import JOB_S_MAX, Answer, EngineProcess

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
BLOCK_TOKENS = 32
"""The smallest that this platform is meant for: short prompts, several blocks."""


_SETTINGS: Mapping[str, Any] = {
    "max_model_len": 2048,
    "block_size": BLOCK_TOKENS,
    # Room for 40,000 tokens of the llama in float32, and little to touch at the start.
    "kv_cache_memory_bytes": 256 << 20,
}


ORDER_VARIABLE = "TEST_DYING_DAEMON_ORDER"
"""For `dying_daemon`: names a file that says when (`at`) to send which `signal` to which `pid`."""
FLAG: Mapping[str, Any] = {
    "kv_connector": "KVStoreConnector",
    "kv_connector_module_path": "kvstore_client.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""`--kv-transfer-config` as the docs have it."""


def connect(address: str, **extra: Any) -> dict[str, Any]:
    """The flag for this daemon. A busy machine is to be no reason for a miss."""
    return dict(FLAG) | {"kv_connector_extra_config": {"address": address, "lookup_timeout_s": 30.0} | extra}


class Engine:
    """One vLLM process."""

    def __init__(
        self,
        model: Path,
        *,
        log_path: Path,
        dtype: str = "float32",
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self._process = EngineProcess(
            "tests.engines.vllm_worker",
            settings={"model": str(model), "dtype": dtype} | _SETTINGS | settings,
            environment=dict(ENVIRONMENT) | dict(environment or {}),
            log_path=log_path,
        )

    def ask(self, *prompts: Prompt, token_count: int = 8) -> list[Answer]:
        """All at once."""
        self.begin(*prompts, token_count=token_count)
        return self.end()

    def begin(self, *prompts: Prompt, token_count: int = 8) -> None:
        self._process.send("generate", prompts=[prompt.job() for prompt in prompts], token_count=token_count)

    def end(self) -> list[Answer]:
        return [
            Answer(token_ids=tuple(answer.pop("token_ids")), logprobs=tuple(answer.pop("logprobs")), **answer)
            for answer in self._process.receive()
        ]

    def ask_afresh(self, *prompts: Prompt, token_count: int = 8) -> list[Answer]:
        """One after the other, each without blocks of the engine's own; what they store is stored by then."""
        answers = []
        for prompt in prompts:
            self.forget()
            answers += self.ask(prompt, token_count=token_count)
        self.settle()
        return answers

    def settle(self) -> None:
        """Waits until nothing is being stored any more."""
        self._process.call("settle")

    def forget(self) -> None:
        """Drops the engine's own blocks. The store keeps what it has."""
        self._process.call("forget")

    def wait_warm(self, prompt: Prompt) -> None:
        """Until what this engine stores is found again: at first it reads the weights, to know which they are."""
        deadline_s = time.monotonic() + JOB_S_MAX
        while self.ask_afresh(prompt)[0].cached_count == 0:
            assert time.monotonic() < deadline_s, f"nothing is found in the store: {self._process.log_path}"

    def call(self, job: str, **arguments: Any) -> Any:
        return self._process.call(job, **arguments)

    def group_count(self) -> int:
        return int(self._process.started["group_count"])

    def log(self) -> str:
        return self._process.log_path.read_text(errors="replace")

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self._process.stop()


class Prompt:
    """Tokens, and what else an engine tells prompts apart by."""

    def __init__(self, token_ids: Sequence[int], **others: Any) -> None:
        self.token_ids = tuple(token_ids)
        self.others = others

    @classmethod
    def random(cls, token_count: int, *, seed: int, **others: Any) -> Prompt:
        rng = random.Random(seed)
        return cls([rng.randrange(256) for _ in range(token_count)], **others)

    def __len__(self) -> int:
        return len(self.token_ids)

    def altered_behind(self, token_count: int) -> Prompt:
        """As long, so that what they have in common is computed in steps of the same size, down to the last bit."""
        rest = [(token_id + 1) % 256 for token_id in self.token_ids[token_count:]]
        return Prompt([*self.token_ids[:token_count], *rest], **self.others)

    def but(self, **others: Any) -> Prompt:
        return Prompt(self.token_ids, **(self.others | others))

    def job(self) -> dict[str, Any]:
        return {"token_ids": list(self.token_ids)} | self.others

    @property
    def own_count(self) -> int:
        """The most tokens that vLLM takes from its own cache: full blocks, and one token is always computed."""
        return (len(self) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def whole_count(self) -> int:
        """The most that may come from the store: of a prompt that is all there, vLLM computes the last token again."""
        return len(self) // BLOCK_TOKENS * BLOCK_TOKENS if self.own_count else 0


class Reference:
    """What vLLM itself says, without us: computed, or with so many tokens from its own prefix cache."""

    def __init__(self, start: Callable[[], Engine]) -> None:
        """`start` is called for the first answer that is not known yet."""
        self._start = start
        self._engine: Engine | None = None
        self._known: dict[tuple[Any, ...], Answer] = {}

    def answer(self, prompt: Prompt, *, cached_count: int = 0) -> Answer:
        key = (prompt.token_ids, cached_count)
        if key not in self._known:
            if self._engine is None:
                self._engine = self._start()
            self._engine.forget()
            if cached_count:
                self._engine.ask(prompt.altered_behind(cached_count), token_count=1)
            [answer] = self._engine.ask(prompt)
            assert answer.cached_count == cached_count, "vLLM has not taken its own blocks"
            self._known[key] = answer
        return self._known[key]

    def rest(self) -> None:
        """Ends its engine until there is something to answer again."""
        if self._engine is not None:
            self._engine.kill()
            self._engine = None


_SEEDS = itertools.count(1_000_000)


def probe_prompt() -> Prompt:
    """Nobody else's: for finding out whether the store works, without touching what a test is about."""
    return Prompt.random(BLOCK_TOKENS + 1, seed=next(_SEEDS))
