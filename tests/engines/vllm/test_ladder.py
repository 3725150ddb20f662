"""The same prompt gives the same tokens, wherever its blocks come from, and as much of it as can comes from the store.

Kinds of fault (users' reports): "fine cold, fine warm, garbage after a restart, HTTP 200 throughout", "root hash random
per process, so nothing is ever shared".

What vLLM itself makes of a prompt with the same number of tokens from its own prefix cache is what counts: computing
them anew gives other last bits, for it multiplies matrices of other shapes. In float32 these are too small to
matter, so that there tokens must be those of a run without any cache, too. vLLM never takes a whole prompt from its own
cache; where all of it comes from the store, tokens must be vLLM's own, and every rung's log-probabilities the first's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Client
from tests.conftest import DaemonProcess
from tests.engines.models import ensure_models
from tests.engines.nvme import damage_every_seventh
from tests.engines.rig import Answer

from .rig import BLOCK_TOKENS, Engine, Prompt, Reference, connect, probe_prompt


@dataclass(frozen=True)
class Case:
    model: str
    dtype: str
    block_counts: Sequence[int] = (1, 5)
    """Prompts are one token shorter than that many blocks, as long, and one longer."""
    settings: dict[str, Any] = field(default_factory=lambda: {"max_num_batched_tokens": 4 * BLOCK_TOKENS})
    """Longer prompts than that are computed in chunks."""

    def prompts(self) -> list[Prompt]:
        lengths = [count * BLOCK_TOKENS + more for count in self.block_counts for more in (-1, 0, 1)]
        return [Prompt.random(length, seed=length) for length in lengths]


_CASES = {
    "llama-bfloat16": Case("tiny-llama", "bfloat16"),
    "llama-float32": Case("tiny-llama", "float32"),
    # A window is 8 blocks: the longer prompts have left some behind.
    "hybrid-bfloat16": Case("tiny-hybrid", "bfloat16", block_counts=(1, 12)),
    "hybrid-float32": Case("tiny-hybrid", "float32", block_counts=(1, 12)),
    "gemma-bfloat16": Case("gemma-3-270m", "bfloat16", block_counts=(2, 20)),
}


_MARKS = {
    "llama-float32": pytest.mark.soak,
    "hybrid-bfloat16": pytest.mark.soak,
    "gemma-bfloat16": pytest.mark.skipif(
        "KVSTORE_TEST_GEMMA" not in os.environ, reason="KVSTORE_TEST_GEMMA=1 includes it"
    ),
}
"""Two of the small ones have every kind of group and both dtypes; starting engines takes most of the time."""


@pytest.fixture(params=[pytest.param(name, marks=_MARKS.get(name, ())) for name in _CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return _CASES[request.param]


class Ladder:
    """Climbs with one prompt after the other, and compares each with what vLLM says alone."""

    def __init__(self, case: Case, reference: Reference) -> None:
        self.prompts = case.prompts()
        self._is_exact = case.dtype == "float32"
        self._reference = reference
        self._whole: dict[Prompt, Answer] = {}
        """What the first rung made of the prompts that were all in the store."""

    def cold(self, engine: Engine, *, rung: str) -> None:
        self._compare(engine, rung, expected=lambda _: 0)

    def warm(self, engine: Engine, *, rung: str) -> None:
        self._compare(engine, rung, expected=lambda prompt: prompt.whole_count)

    def damaged(self, engine: Engine, *, rung: str) -> int:
        """Tokens that were cached, of all that could be."""
        return self._compare(engine, rung, expected=None)

    def _compare(self, engine: Engine, rung: str, *, expected: Callable[[Prompt], int] | None) -> int:
        answers = engine.ask_afresh(*self.prompts)
        for prompt, answer in zip(self.prompts, answers, strict=True):
            said = f"{rung}, a prompt of {len(prompt)} tokens"
            if expected is not None:
                assert answer.cached_count == expected(prompt), said
            alone = self._reference.answer(prompt, cached_count=min(answer.cached_count, prompt.own_count))
            if answer.cached_count <= prompt.own_count:
                assert _outcome(answer) == _outcome(alone), said
            else:
                assert answer.token_ids == alone.token_ids, said
                assert _outcome(answer) == _outcome(self._whole.setdefault(prompt, answer)), said
            if self._is_exact:
                assert answer.token_ids == self._reference.answer(prompt).token_ids, said
        return sum(answer.cached_count for answer in answers)


def _outcome(answer: Answer) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return answer.token_ids, answer.logprobs


@pytest.fixture
def nvme_path(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def nvme_daemon(start_daemon: Callable[..., DaemonProcess], nvme_path: Path) -> Iterator[DaemonProcess]:
    daemon = start_daemon("--memory-capacity", "256MiB", "--nvme-path", str(nvme_path), "--nvme-capacity", "1GiB")
    yield daemon
    daemon.kill()


def test_every_rung_gives_the_tokens_that_vllm_gives_alone(
    case: Case,
    start_engine: Callable[..., Engine],
    reference: Callable[..., Reference],
    nvme_daemon: DaemonProcess,
    nvme_path: Path,
) -> None:
    [model] = ensure_models(case.model)
    flag = connect(nvme_daemon.unix_address)

    def start() -> Engine:
        return start_engine(model, dtype=case.dtype, kv_transfer_config=flag, **case.settings)

    ladder = Ladder(case, reference(model, dtype=case.dtype, **case.settings))
    engine = start()
    assert (engine.group_count() > 1) == ("llama" not in case.model)
    engine.wait_warm(probe_prompt())
    ladder.cold(engine, rung="cold")
    ladder.warm(engine, rung="warm in the same process")
    engine.kill()

    engine = start()
    ladder.warm(engine, rung="warm in a new process")

    nvme_daemon.stop()  # writes to disk what is in memory
    nvme_daemon.start()
    _wait_reattached(engine)
    ladder.warm(engine, rung="warm from the disk")

    nvme_daemon.restart()
    _wait_reattached(engine)
    ladder.warm(engine, rung="warm from the disk, after kill -9 of the daemon")

    nvme_daemon.stop()
    assert damage_every_seventh(nvme_path) > 0
    nvme_daemon.start()
    _wait_reattached(engine)
    cached_count = ladder.damaged(engine, rung="every seventh block on disk is damaged")
    assert 0 < cached_count < sum(prompt.whole_count for prompt in ladder.prompts)
    with Client(nvme_daemon.address) as client:
        nvme = client.stats().nvme
        assert nvme is not None
        assert nvme.corrupt_count > 0
    ladder.warm(engine, rung="damaged blocks were computed and stored again")


@pytest.mark.parametrize(("name", "transport"), [("llama-float32", "grpc"), ("hybrid-bfloat16", "bulk")])
def test_blocks_from_another_node_give_the_same_tokens(
    name: str,
    transport: str,
    start_engine: Callable[..., Engine],
    reference: Callable[..., Reference],
    daemon: DaemonProcess,
) -> None:
    case = _CASES[name]
    [model] = ensure_models(case.model)
    ladder = Ladder(case, reference(model, dtype=case.dtype, **case.settings))
    flag = connect(daemon.address, transport=transport)

    engine = start_engine(model, dtype=case.dtype, kv_transfer_config=flag, **case.settings)
    engine.wait_warm(probe_prompt())
    ladder.cold(engine, rung="cold")
    ladder.warm(engine, rung=f"warm over {transport}")


def _wait_reattached(engine: Engine) -> None:
    """A daemon that was away is asked again after a cool-down of some seconds."""
    engine.wait_warm(probe_prompt())
