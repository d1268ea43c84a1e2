"""Draws what `python -m benchmarks.peers --json PATH` found: `python scripts/peers_picture.py PATH docs/peers.png`.

Each run is a line of its validation scores over the minutes of its steps; validations take no time, as in the benchmark.
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path

SIDES = {"ours": ("understudy", "#2166ac"), "trl": ("TRL's GRPO", "#b2182b")}
"""Side -> its name in the picture, and its colour."""


def main() -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.add_subplot(
        xlabel="minutes of training, on two CPU cores", ylabel="sums solved, of 63 unseen", ylim=(0.4, 1.0)
    )
    for side, (name, colour) in SIDES.items():
        for number, run in enumerate(report["runs"][side]):
            minutes = [0.0, *accumulate(seconds / 60 for seconds in run["step_s"])]
            points = [(minutes[step], score) for step, score in run["validation"]]
            axes.plot(
                *zip(*points, strict=True), color=colour, marker="o", markersize=3, label=name if not number else None
            )
    axes.axhline(0.8, color="grey", linewidth=0.8, linestyle=":")
    axes.set_title("SmolLM2-135M learns sums", fontsize=10)
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(sys.argv[2], dpi=130)


if __name__ == "__main__":
    main()
