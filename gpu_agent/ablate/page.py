"""The report as files: a plot, and one HTML page that has it inside. The one place here that needs matplotlib."""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from gpu_agent.ablate.report import HEADINGS, Report
from gpu_agent.ablate.settings import HARMLESS_PERCENT, Setting, Stage
from kvstore.errors import UnavailableError

PLOT_NAME = "ablate.png"
PAGE_NAME = "ablate.html"

_COLORS = {"V": "#1f6f8b", "K": "#e08e45", "K and V": "#a3557f"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:nth-child(-n+3), td:nth-child(-n+3), td:last-child { text-align: left; }
td:last-child { color: #4a7a2b; }
tr.first td { border-top: 2px solid #999; }
img { max-width: 100%; }
"""


def check_that_it_can_draw() -> None:
    """Before minutes of measuring, and not behind them."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError("--report needs matplotlib, which is not installed: pip install matplotlib")


def write_report(report: Report, folder: Path) -> list[Path]:
    """The files written."""
    plot = draw(report)
    plot_path, page_path = folder / PLOT_NAME, folder / PAGE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plot_path.write_bytes(plot)
        page_path.write_text(page(report, plot), encoding="utf-8")
    except OSError as error:
        raise UnavailableError(f"--report {folder} cannot be written: {error}") from error
    return [plot_path, page_path]


def page(report: Report, plot: bytes) -> str:
    """One file that needs no other."""
    title = escape(report.title())
    image = f"data:image/png;base64,{base64.b64encode(plot).decode()}"
    rows = []
    stage: Stage | None = None
    for setting, cells in report.rows():
        kind = ' class="first"' if stage is not None and setting.stage is not stage else ""
        stage = setting.stage
        rows.append(f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return "\n".join(
        (
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>',
            f"<h1>{escape(report.model)}</h1><p>{title}; text: {escape(', '.join(report.texts))}</p>",
            f'<img alt="Change of perplexity and divergence by setting" src="{image}">',
            f"<table><tr>{''.join(f'<th>{escape(heading)}</th>' for heading in HEADINGS)}</tr>",
            *rows,
            "</table>",
            *(f"<p>{escape(note)}</p>" for note in report.notes()),
            "</body></html>\n",
        )
    )


def draw(report: Report) -> bytes:
    """A PNG: what each setting costs, what it costs by layers, and what it saves."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mpl.rcParams["font.size"] = 9
    lowered = [setting for setting in report.scores if setting.lowered]
    whole = [setting for setting in lowered if setting.group is None]
    by_layers = [setting for setting in lowered if setting.group is not None]
    panels = [("all layers", whole), *([("by layers", by_layers)] if by_layers else [])]
    heights = [0.24 * len(settings) + 1 for _, settings in panels]
    figure = Figure(figsize=(9, sum(heights)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), 2, squeeze=False, height_ratios=heights)
    for (name, settings), (changes, divergences) in zip(panels, grid, strict=True):
        labels = [_label(setting) for setting in settings]
        scores = [report.scores[setting] for setting in settings]
        colors = [_color(setting) for setting in settings]
        changes.barh(
            labels,
            [score.change_percent for score in scores],
            xerr=[score.change_error_percent for score in scores],
            color=colors,
            error_kw={"ecolor": "#555", "elinewidth": 1},
        )
        changes.axvspan(-HARMLESS_PERCENT, HARMLESS_PERCENT, color="#7a9e4b", alpha=0.3, zorder=0)
        changes.set_xscale("symlog", linthresh=HARMLESS_PERCENT)
        changes.set_title(f"perplexity, {name}")
        changes.set_xlabel(f"change against exact, %; harmless up to {HARMLESS_PERCENT}")
        divergences.barh(labels, [score.kl_mean for score in scores], color=colors)
        divergences.plot([score.kl_p99 for score in scores], labels, "|", color="#555")
        divergences.set_xscale("log")
        divergences.set_title(f"KL divergence, {name}")
        divergences.set_xlabel("nats: mean (bar) and 99th percentile")
        for axes in (changes, divergences):
            axes.invert_yaxis()
    target = io.BytesIO()
    figure.savefig(target, format="png", metadata={"Software": None})
    return target.getvalue()


def _label(setting: Setting) -> str:
    return f"{_parts(setting.lowered)}, {setting.where}"


def _parts(lowered: Sequence[tuple[str, str]]) -> str:
    return " ".join(f"{plane} {precision}" for plane, precision in lowered)


def _color(setting: Setting) -> str:
    planes = [plane for plane, _ in setting.lowered]
    return _COLORS[" and ".join(planes)]
