"""Measure the losses of the configs that `tune` would store, by full replays of a recording.

The heuristic's candidates were chosen with the shipped recording, so its replays show the final loss but not the speed
of a search.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import record

from attention_tuner.tuner.recording import Recording
from attention_tuner.tuner.replay import replay
from attention_tuner.tuner.sampling.samplers import DEFAULT_SAMPLER, SAMPLERS
from attention_tuner.tuner.settings import Settings


def losses(job: tuple[str, str, int, int]) -> list[float | None]:
    """The loss of the stored config of each task of a recording, after a search with one sampler and seed."""
    path, sampler, seed, trials = job
    recording = Recording.load(path)
    return [each.loss for each in replay(recording, recording.tasks, Settings(trials, sampler=sampler, seed=seed))]


def about(path: str, sampler: str, found: list[list[float | None]]) -> dict[str, Any]:
    """The losses of one sampler: a row for each seed, a column for each task."""
    known = [loss for each in found for loss in each if loss is not None]
    tasks = Recording.load(path).tasks
    return {
        "sampler": sampler, "runs": len(known), "nothing": sum(loss is None for each in found for loss in each),
        "mean": statistics.mean(known), "worst": max(known), "good": sum(loss <= 0.02 for loss in known) / len(known),
        "losses": {f"{task.batch}, page {task.page_size}": [each[i] for each in found] for i, task in enumerate(tasks)},
    }  # fmt: skip


def main(arguments: argparse.Namespace) -> None:
    """Replay with every sampler and seed, write the JSON and print the table."""
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(arguments.processes) as pool:
        for sampler in arguments.samplers:
            jobs = [(arguments.recording, sampler, seed, arguments.trials) for seed in range(arguments.seeds)]
            rows.append(about(arguments.recording, sampler, list(pool.map(losses, jobs))))
    record.write(arguments.out, {"recording": arguments.recording, "trials": arguments.trials, "samplers": rows})
    record.print_table(("sampler", "runs", "mean loss", "worst", "within 2 %"), [
        [row["sampler"], str(row["runs"]), f"{row['mean']:.2%}", f"{row['worst']:.2%}", f"{row['good']:.0%}"]
        for row in rows
    ])  # fmt: skip


if __name__ == "__main__":
    parser = record.parser(__doc__)
    parser.add_argument("--recording", required=True, metavar="NAME|PATH", help="a recording, by name or path")
    parser.add_argument("--samplers", nargs="+", default=[DEFAULT_SAMPLER, "random"], choices=SAMPLERS,
                        help="samplers to compare")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=5, help="replays with each sampler")
    parser.add_argument("--trials", type=int, default=150, help="trials of each task")
    parser.add_argument("--processes", type=int, default=2, help="replays at the same time")
    main(parser.parse_args())
