"""Draws the rows of a result file as bars:  plot.py RESULTS.json [...]  writes RESULTS.png beside each.

A bar is the rate of qkv or of a peer as a fraction of the case's measured limit, so that cases of one suite share an
axis.
"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = ["#1b5e5a", "#c8842d", "#8a8fa3", "#b05050"]


def draw(path):
    rows = json.loads(path.read_text())
    rows = [row for row in rows if row["limit"] or row["peers"]]
    if not rows:
        return
    names = ["qkv", *sorted({peer for row in rows for peer in row["peers"]})]
    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.2 * sum(1 + len(row["peers"]) for row in rows) + 0.1 * len(rows)))
    ticks, y, longest = [], 0.0, 1.0
    for row in rows:
        bars = {"qkv": row["qkv"], **row["peers"]}
        # Without a limit the best of the row is the whole.
        whole = row["limit"] or max(bars.values())
        ticks.append(y + (len(bars) - 1) / 2)
        for name, rate in bars.items():
            bar = axes.barh(y, rate / whole, 0.9, color=COLORS[names.index(name) % len(COLORS)])
            longest = max(longest, rate / whole)
            axes.bar_label(bar, [f" {rate:.0f} {row['unit']}"], fontsize=7)
            y += 1
        y += 0.5
    for i, name in enumerate(names):
        axes.barh(0, 0, color=COLORS[i % len(COLORS)], label=name)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(ticks, [row["case"] for row in rows], fontsize=8)
    axes.set_ylim(y, -1)
    axes.set_xlim(0, 1.2 * longest)
    axes.set_xlabel(
        "fraction of the measured limit (matrix product for FLOP/s, reads or copies for GB/s), else of the longest",
        fontsize=8,
    )
    axes.set_title(f"{path.stem} on {path.parent.name}, commit {rows[0]['commit']}", fontsize=9)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=120)
    print(f"drawn: {target}")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        draw(pathlib.Path(argument))
