"""Draws what run.py has measured: `python bench/engines/plot.py bench/results/engines.json docs/engines.svg`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

LABELS = {
    "new_process_alone": "new process, computed",
    "new_process_kvstore": "new process, loaded by kvstore",
    "same_process_alone": "same process, computed",
    "same_process_kvstore": "same process, loaded by kvstore",
    "same_process_native_offload": "same process, vLLM's own offload",
    "same_process_lmcache": "same process, LMCache",
    "local_prefix": "limit: vLLM's own prefix cache, nothing loaded",
}
OURS, OTHERS, LIMIT = "#1f6f8b", "#e08e45", "#999999"


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    result = json.loads(source.read_text())
    medians_s, samples_s = result["median_s"], result["samples_s"]
    names = [name for name in LABELS if name in medians_s]
    # Text stays text, and ids do not change from one drawing to the next.
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "engines", "font.size": 9}
    figure, (first_tokens, pairs) = plt.subplots(
        2, figsize=(8, 0.42 * len(names) + 2.6), layout="constrained", height_ratios=(len(names), 2.4)
    )
    colors = [OURS if "kvstore" in name else LIMIT if name == "local_prefix" else OTHERS for name in names]
    bars = first_tokens.barh(range(len(names)), [medians_s[name] for name in names], 0.6, color=colors)
    first_tokens.bar_label(bars, [f"{medians_s[name]:.3f} s" for name in names], padding=3, fontsize=7)
    first_tokens.set_yticks(range(len(names)), [LABELS[name] for name in names])
    first_tokens.invert_yaxis()
    first_tokens.margins(x=0.12)
    first_tokens.set_xlabel(
        f"seconds until the first token, {result['prompt_tokens']:,} tokens, {result['model']}; {result['machine']}"
    )
    ratios = [
        alone / ours
        for alone, ours in zip(samples_s["batch_alone_took_s"], samples_s["batch_kvstore_took_s"], strict=True)
    ]
    pairs.plot(ratios, [0] * len(ratios), "|", color=OURS, markersize=14)
    pairs.axvline(result["cost_at_zero_hit"], color=OURS, label=f"median {result['cost_at_zero_hit']:.3f}")
    pairs.axvline(1.0, color="#555555", linestyle="--", linewidth=1, label="no cost")
    pairs.set_yticks([])
    pairs.set_xlabel("throughput with the flag over that without it, new prompts only, pair by pair")
    pairs.legend(loc="upper left", frameon=False, fontsize=7)
    for axes in (first_tokens, pairs):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
