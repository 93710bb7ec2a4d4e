"""Draws a run's curves.

python -m scripts.reference_model.plot FOLDER OUT.png        (FOLDER holds steps.csv and evaluations.csv)
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib.pyplot as plt

PANELS = {
    "loss by head": ("steps", {"loss0": "main", "loss1": "head 1", "loss2": "head 2", "loss3": "head 3"}),
    "held-out commands": (
        "evaluations",
        {"gated_action": "action, gates on", "dense_action": "action, dense", "gated_reply": "reply, gates on"},
    ),
    "held-out text, perplexity": ("evaluations", {"gated_perplexity": "gates on", "dense_perplexity": "dense"}),
    "blocks kept": (
        "steps",
        {"keep_chat": "conversations", "keep_general": "general text", "keep_flips": "changed from row to row"},
    ),
    "accepted length (of 4)": ("evaluations", {"gated_length": "gates on", "dense_length": "dense"}),
    "tokens per second": ("steps", {"tokens_per_s": "training"}),
}


def columns(path: Path) -> dict[str, list[float]]:
    with path.open(newline="") as f:
        rows = list(csv.DictReader(f))
    return {name: [float(r[name]) for r in rows] for name in rows[0]}


def main(folder: Path, out: Path) -> None:
    data = {name: columns(folder / f"{name}.csv") for name in ("steps", "evaluations")}
    figure, axes = plt.subplots(2, 3, figsize=(15, 8))
    for ax, (title, (source, lines)) in zip(axes.flat, PANELS.items(), strict=True):
        for column, label in lines.items():
            ax.plot(data[source]["step"], data[source][column], label=label, linewidth=1.2)
        if "perplexity" in title:
            ax.set_yscale("log")
        ax.set_title(title)
        ax.set_xlabel("step")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
