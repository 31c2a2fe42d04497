"""Tables and a plot of the results of `bake_off.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The smallest loss drawn, because the axis is logarithmic.
LEAST = 1e-4


def table(document: Mapping[str, Any]) -> str:
    """The results as Markdown tables: by sampler, by task, and the measurements per task."""
    lines = ["| sampler | leads | ahead | runs | final mean | final worst | measurements to 2 % (median) | "
             "runs within 2 % | CPU ms a choice |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in document["entries"]:
        middle, cost = row["measurements_to_good"] or "∞", row["cpu_ms_a_measurement"]
        lines.append(f"| `{row['sampler']}` | {row['leads']} | {row['ahead']} | {row['runs']} | "
                     f"{row['final_mean']:.4f} | {row['final_worst']:.3f} | {middle} | {row['share_good']:.0%} | "
                     f"{cost:.1f} |")
    lines += ["", "| task | variants | timed | optimum ms | median / optimum | within 2 % |",
              "|---|---|---|---|---|---|"]  # fmt: skip
    for each, facts in document["tasks"].items():
        lines.append(f"| {each} | {facts['variants']} | {facts['timed']} | {facts['optimum_ms']:.4f} | "
                     f"{facts['median_ratio']:.2f} | {facts['good']} ({facts['share_good']:.1%}) |")
    lines += ["", f"| measurements to 2 % (median) | {' | '.join(document['tasks'])} |",
              "|---|" + "---|" * len(document["tasks"])]  # fmt: skip
    for row in document["entries"]:
        middles = (str(each["measurements_to_good"] or "∞") for each in row["tasks"].values())
        lines.append(f"| `{row['sampler']}`, {row['leads']}, {row['ahead']} ahead | {' | '.join(middles)} |")
    return "\n".join(lines)


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Draw the searches' losses by the number of measurements. Raises `ImportError` without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5.5))
    samplers = list(dict.fromkeys(row["sampler"] for row in document["entries"]))
    styles = {"structured": "-", "none": ":", "neighbours": "--"}
    ahead = document["entries"][0]["ahead"]
    for row in document["entries"]:
        if row["ahead"] != ahead:
            continue
        curves = [curve for task in row["tasks"].values() for curve in task["curves"]]
        marks = document["marks"][: min(map(len, curves))]
        look: dict[str, Any] = {"color": mpl.colormaps["tab10"](samplers.index(row["sampler"])),
                                "linestyle": styles[row["leads"]]}  # fmt: skip
        at = [[curve[i] or math.inf for curve in curves] for i in range(len(marks))]
        label = f"{row['sampler']}, {row['leads']}"
        left.plot(marks, [max(LEAST, statistics.mean(each) - 1) for each in at], label=label, **look)
        right.plot(marks, [sum(ratio <= document["good"] for ratio in each) / len(each) for each in at], **look)
    chance = statistics.mean(task["share_good"] for task in document["tasks"].values())
    right.axhline(chance, color="black", linewidth=1, label=f"variants within 2 % ({chance:.1%})")
    right.legend(fontsize=8)
    left.set_yscale("log")
    left.set_yticks((LEAST, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
                    ("none", "0.1 %", "0.2 %", "0.5 %", "1 %", "2 %", "5 %", "10 %", "20 %", "50 %", "100 %"))
    left.minorticks_off()
    left.set_ylabel("mean loss to the optimum")
    right.set_ylabel("searches within 2 % of the optimum")
    for axis in (left, right):
        axis.set_xlabel("measured variants")
        axis.grid(alpha=0.3)
    left.legend(fontsize=8, ncols=2)
    figure.suptitle(f"{document['grid']} on {document['gpu']}, {len(document['tasks'])} tasks")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
