"""Portfolios of recorded tasks: the loss by number of kernels, with every variant timed on every batch."""

from __future__ import annotations

import argparse
from typing import Any

import record

from attention_tuner.kernel_templates.batch import Shape
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import BestConfig, Timed, Verdict
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner.portfolio import Group, Measured, Portfolio, TunedShape, curve, fewest_kernels
from attention_tuner.tuner.recording import Recording


def shape_of(recording: Recording, task: Task) -> TunedShape:
    """`task` as a tuned shape, with all recorded variants as trials and the optimum as best config."""
    at = recording.recorded_at[1]
    timed = {v: Measured(r.outcome.timing, recording.environments[v.template], at)
             for v, r in recording.trials[task].items() if isinstance(r.outcome, Timed)}  # fmt: skip
    variant = min(timed, key=lambda v: timed[v].timing.median_ms)
    default = default_variant(task.spec, task.batch, task.page_size)
    best = BestConfig(Shape.of(task.spec, task.batch), recording.gpu, variant, timed[variant].timing,
                      timed.get(default, timed[variant]).timing, Verdict.FAST, False, timed[variant].environment,
                      str(task.batch), at)  # fmt: skip
    return TunedShape(best, timed, frozenset(timed))


def group_of(recording: Recording, page_size: int) -> Group:
    """The tasks of `recording` with pages of `page_size`, which must be of one layer."""
    tasks = [task for task in recording.tasks if task.page_size == page_size]
    (spec,) = {task.spec for task in tasks}
    shapes = tuple(shape_of(recording, task) for task in tasks)
    return Group(spec, page_size, recording.gpu, recording.regime, shapes)


def about(portfolio: Portfolio) -> dict[str, Any]:
    """One point of the curve."""
    return {"kernels": list(portfolio.kernels), "worst": portfolio.worst, "mean": portfolio.mean,
            "losses": {pick.shape.best.batch: pick.loss for pick in portfolio.picks}}  # fmt: skip


def main(arguments: argparse.Namespace) -> None:
    """Find the portfolios, write the JSON and print the table."""
    group = group_of(Recording.load(arguments.recording), arguments.page_size)
    points = [about(each) for each in curve(group, arguments.most)]
    record.write(arguments.out, {
        "recording": arguments.recording, "page_size": group.page_size, "curve": points,
        "fewest_within_2_percent": fewest_kernels(group, 0.02),
    })  # fmt: skip
    record.print_table(("kernels", "worst loss", "mean loss"), [
        [str(len(each["kernels"])), f"{each['worst']:.2%}", f"{each['mean']:.2%}"] for each in points
    ])  # fmt: skip


if __name__ == "__main__":
    parser = record.parser(__doc__)
    parser.add_argument("--recording", required=True, metavar="NAME|PATH", help="a recording, by name or path")
    parser.add_argument("--page-size", type=int, default=16, help="page size of the tasks that share kernels")
    parser.add_argument("--most", type=int, default=8, help="the most kernels of the curve")
    main(parser.parse_args())
