"""The same prompt gives the same tokens, wherever its pages come from, and as much of it as can comes from the store.

An engine takes about a minute to start, so that one of them climbs many rungs. In float32 the tokens must be those of
the engine without any cache; log-probabilities must be, to the last bit, those with as many tokens from SGLang's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore_client import Client
from tests.conftest import DaemonProcess
from tests.engines.nvme import damage_every_seventh

from .rig import PAGE_TOKENS, Answer, Engine, Prompt

PROMPTS = [Prompt.random(length, seed=length) for length in (65, 319, 320, 321, 1024)]


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


class Ladder:
    """What the engine said without a store, and comparisons with it."""

    def __init__(self, engine: Engine) -> None:
        self._computed = engine.ask_afresh(*PROMPTS)
        assert [answer.cached_count for answer in self._computed] == [0] * len(PROMPTS), "it is not cold"
        self._local = [answer for prompt in PROMPTS for answer in engine.ask(prompt)]
        for prompt, answer in zip(PROMPTS, self._local, strict=True):
            assert (answer.cached_count, answer.stored_count) == (prompt.whole_count, 0), "SGLang's own cache"

    def check(self, answers: list[Answer], *, rung: str) -> None:
        for prompt, answer, computed in zip(PROMPTS, answers, self._computed, strict=True):
            assert answer.token_ids == computed.token_ids, f"{rung}, a prompt of {len(prompt)} tokens"

    def check_warm(self, engine: Engine, *, rung: str) -> None:
        answers = engine.ask_afresh(*PROMPTS)
        self.check(answers, rung=rung)
        for prompt, answer, local in zip(PROMPTS, answers, self._local, strict=True):
            said = f"{rung}, a prompt of {len(prompt)} tokens"
            assert answer.stored_count == answer.cached_count == prompt.whole_count, said
            assert answer.logprobs == local.logprobs, said

    def check_without(self, engine: Engine, *, rung: str) -> None:
        answers = engine.ask_afresh(*PROMPTS)
        self.check(answers, rung=rung)
        assert [answer.cached_count for answer in answers] == [0] * len(PROMPTS), rung


def test_every_rung_gives_the_tokens_that_sglang_gives_alone(
    models: dict[str, Path], start_engine: Callable[..., Engine], nvme_daemon: DaemonProcess, nvme_path: Path
) -> None:
    model, address = models["tiny-llama"], nvme_daemon.unix_address
    engine = start_engine(model, address=address)
    ladder = Ladder(engine)
    engine.wait_stored(*PROMPTS)
    ladder.check_warm(engine, rung="warm in the same process")

    nvme_daemon.pause()
    ladder.check_without(engine, rung="the daemon hangs")
    nvme_daemon.resume()
    engine.wait_attached()
    engine.wait_stored(*PROMPTS)

    nvme_daemon.stop()  # writes to disk what is in memory
    nvme_daemon.start()
    engine.wait_attached()
    ladder.check_warm(engine, rung="warm from the disk")

    nvme_daemon.restart()
    engine.wait_attached()
    ladder.check_warm(engine, rung="warm from the disk, after kill -9 of the daemon")

    nvme_daemon.stop()
    assert damage_every_seventh(nvme_path) > 0
    nvme_daemon.start()
    engine.wait_attached()
    answers = engine.ask_afresh(*PROMPTS)
    ladder.check(answers, rung="every seventh block on disk is damaged")
    assert 0 < sum(answer.stored_count for answer in answers) < sum(prompt.whole_count for prompt in PROMPTS)
    with Client(nvme_daemon.address) as client:
        nvme = client.stats().nvme
        assert nvme is not None
        assert nvme.corrupt_count > 0
    engine.wait_stored(*PROMPTS)
    nvme_daemon.stop()
    nvme_daemon.start()
    engine.wait_attached()

    engine.forget()
    engine.begin(*PROMPTS)
    nvme_daemon.kill()
    ladder.check(engine.end(), rung="the daemon dies while prompts are loaded")
    ladder.check_without(engine, rung="the daemon is dead")
    engine.kill()

    nvme_daemon.start()
    engine = start_engine(model, address=address, hicache_mem_layout="page_first_direct")
    ladder.check_warm(engine, rung="warm in a new process, whose pool lies in another order")

    assert engine.update_weights(models["tiny-llama-reseeded"])
    answers = engine.ask_afresh(*PROMPTS)
    assert [answer.cached_count for answer in answers] == [0] * len(PROMPTS), "pages of the weights before"
    assert "the model's weights were changed" in engine.log()


def test_ranks_that_find_and_load_different_pages_agree_and_go_on(
    models: dict[str, Path], start_engine: Callable[..., Engine], daemon: DaemonProcess
) -> None:
    """SGLang's own fault injection: each call to the store is late, and every third fails, on one rank or the other.

    Kind of fault: ranks disagree on a storage result and deadlock in a collective.
    """
    model = models["tiny-llama"]
    environment = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
    }
    engine = start_engine(model, address=daemon.unix_address, tp_size=2, environment=environment)
    computed = engine.ask_afresh(*PROMPTS)
    stored_count = 0
    for _ in range(4):
        answers = engine.ask_afresh(*PROMPTS)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in computed]
        assert all(answer.stored_count % PAGE_TOKENS == 0 for answer in answers)
        stored_count += sum(answer.stored_count for answer in answers)
    assert stored_count > 0, "of 20 prompts not one was found by both ranks"
