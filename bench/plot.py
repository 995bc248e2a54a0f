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
    names = ["qkv", *sorted({peer for row in rows for peer in row["peers"]})]
    height = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(11, 0.9 + 0.34 * len(rows) * max(1, len(names) * 0.7)))
    for i, name in enumerate(names):
        for y, row in enumerate(rows):
            rate = row["qkv"] if name == "qkv" else row["peers"].get(name)
            if rate is None:
                continue
            # Without a limit the best of the row is the whole.
            whole = row["limit"] or max([row["qkv"], *row["peers"].values()])
            bar = axes.barh(y + i * height, rate / whole, height, color=COLORS[i % len(COLORS)])
            axes.bar_label(bar, [f" {rate:.0f} {row['unit']}"], fontsize=7)
    for i, name in enumerate(names):
        axes.barh(0, 0, color=COLORS[i % len(COLORS)], label=name)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks([y + 0.4 - height / 2 for y in range(len(rows))], [row["case"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("fraction of the measured limit (SGEMM for GFLOP/s, read or copy loop for GB/s)", fontsize=8)
    axes.set_title(f"{path.stem} on {path.parent.name}, commit {rows[0]['commit']}", fontsize=9)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=120)
    print(f"drawn: {target}")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        draw(pathlib.Path(argument))
