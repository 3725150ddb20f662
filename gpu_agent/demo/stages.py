"""The four stages, one after another, each in fresh processes that share nothing but the daemon."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpu_agent.demo.processes import DemoError, Worker, running_daemon
from gpu_agent.demo.prompts import TOKENS_PER_BLOCK
from gpu_agent.demo.report import Pressure, Report, Stage
from kvstore_client.client import Client

_KILL_ATTEMPTS = 4
_KILL_AT_SHARE = 0.2
_VRAM_SHARE = 0.4

Progress = Callable[[str, str], None]
"""Told the stage and what it is doing, in words for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: str | None
    """A Hugging Face folder or name; None for the demo's own model."""
    document: str | None
    prompt_tokens: int
    answer_tokens: int
    memory_capacity: str
    vram_cap_bytes: int | None
    """None for a share of what the sequence needs."""


def run_stages(settings: Settings, folder: Path, progress: Progress) -> Report:
    """Runs everything with temporary files in `folder`; raises `DemoError` when a stage cannot be run."""
    with _Runner(folder, progress) as runner:
        return _run_stages(settings, folder, runner)


def _run_stages(settings: Settings, folder: Path, runner: _Runner) -> Report:
    # A part of the document per stage that needs an unknown one; the killed process gets a half, and more than one try.
    half_tokens = settings.prompt_tokens // 2
    prepared = runner.run(
        "model",
        {
            "kind": "prepare",
            "model": settings.model,
            "document": settings.document,
            "token_counts": [settings.prompt_tokens] * 2 + [half_tokens] * _KILL_ATTEMPTS,
        },
    )
    runner.model = prepared["model"]
    shared, pressed, *lost = prepared["prompts"]
    with running_daemon(folder, memory_capacity=settings.memory_capacity) as daemon:
        common = {"address": daemon.address, "answer_tokens": settings.answer_tokens}
        computed = str(folder / "cold.safetensors")
        cold = runner.stage(
            "cold",
            common | {"kind": "answer", "ids": shared["first"], "save_kv": computed, "compare_kv": None},
        )
        warm = runner.stage(
            "warm, other process",
            common | {"kind": "answer", "ids": shared["second"], "save_kv": None, "compare_kv": computed},
        )
        job = {"kind": "pressure", "first_ids": pressed["first"], "ids": pressed["second"]}
        limits = {"vram_cap_bytes": settings.vram_cap_bytes, "vram_share": _VRAM_SHARE}
        pressured = runner.stage("pressure", common | job | limits)
        killed = _kill_in_mid_offload(runner, common, lost, folder=folder)
        after_kill = runner.stage(
            "after kill -9",
            common | {"kind": "answer", "ids": killed.second_ids, "save_kv": None, "compare_kv": killed.kv_file},
            is_last=True,
        )
    return Report(
        model=Path(prepared["model"]).name if settings.model is None else settings.model,
        document=prepared["document"],
        document_tokens=shared["document_tokens"],
        tokens_per_block=TOKENS_PER_BLOCK,
        cold=cold.stage,
        warm=warm.stage,
        pressured=pressured.stage,
        after_kill=after_kill.stage,
        pressure=Pressure(**{name: pressured.result[name] for name in Pressure.__slots__}),
        killed_at_blocks=killed.stored_count,
        killed_block_count=killed.block_count,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    stage: Stage
    result: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Killed:
    stored_count: int
    block_count: int
    second_ids: list[int]
    kv_file: str


class _Runner:
    """Starts the workers. Each loads its model while the one before it, no longer timed, checks its answers."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.model: str | None = None
        self._folder = folder
        self._progress = progress
        self._worker_count = 0
        self._next: Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._next is not None:
            with self._next:
                self._next.kill()

    def load_next(self) -> None:
        """Has a worker load the model for whatever comes next."""
        if self._next is None:
            self._worker_count += 1
            self._next = Worker(model=self.model, log_file=self._folder / f"worker-{self._worker_count}.log")

    def start(self, job: dict[str, Any]) -> Worker:
        self.load_next()
        worker, self._next = self._next, None
        assert worker is not None, "load_next() has just made one"
        worker.give(job)
        return worker

    def run(self, name: str, job: dict[str, Any], *, is_last: bool = False) -> dict[str, Any]:
        with self.start(job) as worker:
            for event in worker.events():
                match event["event"]:
                    case "result":
                        return event
                    case "timed":
                        if not is_last:
                            self.load_next()
                    case _:
                        self._progress(name, event["text"])
        raise AssertionError("events() ends with a result or raises")

    def stage(self, name: str, job: dict[str, Any], *, is_last: bool = False) -> _Ran:
        started_s = time.monotonic()
        result = self.run(name, job, is_last=is_last)
        fields = ("prompt_tokens", "tokens_reused", "ttft_s", "stored_blocks", "is_identical", "max_abs_kv_error")
        stage = Stage(
            name=name,
            compared_blocks=result["compared_blocks"],
            seconds=time.monotonic() - started_s,
            **{field: result[field] for field in fields},
        )
        return _Ran(stage=stage, result=result)

    def report(self, name: str, text: str) -> None:
        self._progress(name, text)


def _kill_in_mid_offload(
    runner: _Runner, common: dict[str, Any], prompts: list[dict[str, Any]], *, folder: Path
) -> _Killed:
    """Kills a process while the daemon has some of its blocks and not all; tries again when it was too quick."""
    name = "kill -9 in mid-offload"
    killed: _Killed | None = None
    for attempt, prompt in enumerate(prompts):
        kv_file = str(folder / f"killed-{attempt}.safetensors")
        job = {"kind": "offload", "address": common["address"], "save_kv": kv_file}
        with runner.start(job | {"ids": prompt["first"]}) as worker, Client(common["address"]) as client:
            runner.load_next()
            stored_before = client.stats().committed_count
            block_count = 0
            for event in worker.events():
                if event["event"] == "offloading":
                    block_count = event["block_count"]
                    break
                if event["event"] == "result":
                    raise DemoError("the process to be killed ended by itself")
                runner.report(name, event["text"])
            goal_count = max(1, int(block_count * _KILL_AT_SHARE))
            while (count := client.stats().committed_count - stored_before) < goal_count and worker.is_running:
                pass
            worker.kill()
            count = client.stats().committed_count - stored_before
        killed = _Killed(
            stored_count=count, block_count=block_count, second_ids=list(prompt["second"]), kv_file=kv_file
        )
        if 0 < count < block_count:
            break
    assert killed is not None, prompts
    return killed
