"""Hit rate over capacity, drawn; the one place that needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import UnavailableError
from kvstore_server.simulate.suite import Cell

_COLORS = ("#1f6f8b", "#e08e45", "#7a9e4b", "#a3557f", "#5b6abf", "#8c6d46", "#4f9d9d", "#c25b56")
_LIMIT = "#999999"


def check_that_it_can_draw() -> None:
    """Before hours of replays, and not behind them."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError(
            "--plot needs matplotlib, which is not installed: pip install 'kvstore[plot]', "
            "in a checkout of this project pip install '.[plot]'"
        )


def draw(cells: Sequence[Cell], target: Path) -> None:
    """One panel for each trace. The format is what the file's name ends in."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Text stays text, and ids do not change from one drawing to the next.
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "simulate", "font.size": 9}
    names = list(dict.fromkeys(cell.about.name for cell in cells))
    figure = Figure(figsize=(7, 3.2 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(len(names), squeeze=False).flat, names, strict=True):
        row = sorted((cell for cell in cells if cell.about.name == name), key=lambda cell: cell.capacity_blocks)
        about = row[0].about
        block_bytes = about.block_bytes
        places = [
            100 * cell.capacity_blocks / about.unique_blocks
            if block_bytes is None
            else cell.capacity_blocks * block_bytes / (1 << 30)
            for cell in row
        ]
        axes.axhline(about.infinite_percent, color=_LIMIT, linestyle=":", label="infinite cache")
        axes.plot(places, [cell.clairvoyant_percent for cell in row], color=_LIMIT, marker=".", label="clairvoyant")
        for policy, color in zip(row[0].figures, _COLORS * len(row[0].figures), strict=False):
            rates = [cell.figures[policy].token_hit_rate_percent for cell in row]
            axes.plot(places, rates, color=color, marker=".", label=policy)
        axes.set_xscale("log")
        axes.set_xticks(places, [f"{place:.3g}" for place in places], minor=False)
        axes.minorticks_off()
        axes.set_title(name)
        axes.set_xlabel("capacity, % of unique blocks" if block_bytes is None else "capacity, GiB")
        axes.set_ylabel("token hit rate, %")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
