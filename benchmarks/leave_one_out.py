"""Measure the loss of a lookup for untuned shapes by leaving out each tuned shape in turn.

Times are from trials in the databases of `--db`, or from a `--recording`, which has every variant of its grid. With
`--measure` on a GPU, the answer, the best known variant and the default are raced. The table has a row for each reach
of a neighbour, beyond which the heuristic answers. `--into` writes the median losses to an export, as expected losses.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import record

from attention_tuner.db import Chain, Exported, Store, read_configs, shipped_configs, write_configs
from attention_tuner.db.answer import REACH, Source
from attention_tuner.db.lookup.leave_one_out import LeftOut, leave_one_out, pooled
from attention_tuner.db.losses import Loss
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.outcome import BestConfig, Timed, Timing
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.measure.jobs import RaceJob
from attention_tuner.tuner.measure.race import compare
from attention_tuner.tuner.recording import Recording
from attention_tuner.tuner.run import Executor
from attention_tuner.tuner.run import executor_on as command_executor

# With reach 0 only the heuristic answers.
REACHES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 16.0, math.inf)
RACE_LIMIT_S = 120.0

Times = Mapping[Variant, float]


def trial_times(databases: Sequence[str], configs: Sequence[BestConfig]) -> dict[BestConfig, Times]:
    """The median times of the trials in the setting of each config, the minimum over the databases.

    A config without trials has its own time only.
    """
    found: dict[BestConfig, dict[Variant, float]] = {config: {} for config in configs}
    for path in databases:
        with Store.open(path) as store:
            for config, times in found.items():
                for variant, ms in store.times(config).items():
                    times[variant] = min(ms, times.get(variant, math.inf))
    return {config: times or {config.variant: config.timing.median_ms} for config, times in found.items()}


def recorded_times(name: str, configs: Sequence[BestConfig]) -> dict[BestConfig, Times]:
    """The median times of all recorded variants in the setting of each config; empty if not recorded."""
    recording = Recording.load(name)
    found: dict[BestConfig, Times] = {}
    for config in configs:
        task = Task(config.shape.spec, Batch.parse(config.batch), config.variant.page_size)
        is_alike = (config.gpu.name, config.timing.regime) == (recording.gpu.name, recording.regime)
        outcomes = (recording.outcome(task, variant) for variant in recording.variants(task) if is_alike)
        found[config] = {each.variant: each.timing.median_ms for each in outcomes if isinstance(each, Timed)}
    return found


def default_of(config: BestConfig) -> Variant:
    """The variant that every search must beat."""
    return default_variant(config.shape.spec, Batch.parse(config.batch), config.variant.page_size)


def summary(reach: float, left_out: Sequence[LeftOut]) -> dict[str, Any]:
    """The losses of all shapes, and by source, with neighbours up to `reach`."""
    known = [each.loss for each in left_out if each.loss is not None]
    sources: dict[str, list[float]] = {}
    for each in left_out:
        if each.loss is not None:
            sources.setdefault(each.answer.source, []).append(each.loss)
    return {
        "reach": reach if math.isfinite(reach) else None,
        "shapes": len(left_out),
        "sources": dict(Counter(each.answer.source for each in left_out)),
        "never_timed": len(left_out) - len(known),
        "median": statistics.median(known) if known else None,
        "worst": max(known, default=None),
        "above_10_percent": sum(loss > 0.1 for loss in known),
        "median_by_source": {source: statistics.median(losses) for source, losses in sources.items()},
    }


def shape(each: LeftOut, times: Times) -> dict[str, Any]:
    """The result of a left-out shape as JSON values."""
    config, default_ms = each.config, times.get(default_of(each.config))
    return {
        "spec": config.shape.spec.key(), "page_size": config.variant.page_size, "batch": config.batch,
        "source": each.answer.source, "distance": each.answer.distance, "answer": each.answer.variant.key(),
        "best": config.variant.key(), "served_ms": each.served_ms, "best_ms": each.best_ms, "default_ms": default_ms,
        "loss": each.loss,
    }  # fmt: skip


def least_over_default(left_out: Sequence[LeftOut], times: Mapping[BestConfig, Times]) -> float | None:
    """The smallest ratio of the default's time to the answer's; below 1, an answer is slower than the default."""
    pairs = ((times[each.config].get(default_of(each.config)), each.served_ms) for each in left_out)
    return min((default / served for default, served in pairs if default and served), default=None)


def raced(each: LeftOut, rounds: int, executor: Executor) -> dict[str, Any]:
    """Race the answer for a shape against the variant tuned for it and the default."""
    config = each.config
    task = Task(config.shape.spec, Batch.parse(config.batch), config.variant.page_size)
    served, best, default = each.answer.variant, config.variant, default_of(config)
    entrants = tuple(dict.fromkeys((served, best, default)))
    racer = executor.racer or executor.worker
    result = racer.submit(RaceJob(task, entrants, rounds), RACE_LIMIT_S).result()
    times = {variant: timing for variant, timing in result.timings.items() if isinstance(timing, Timing)}
    failed = {variant.key(): str(result.timings[variant]) for variant in entrants if variant not in times}

    def against(other: Variant) -> dict[str, float | None] | None:
        if served == other:
            return record.fractions(None)
        return record.fractions(compare(times[served], times[other])) if {served, other} <= times.keys() else None

    return {"is_steady": result.is_steady, "failed": failed, "over_best": against(best),
            "over_default": against(default),
            "samples_ms": {variant.key(): timing.samples_ms for variant, timing in times.items()}}  # fmt: skip


def measured(left_out: Sequence[LeftOut], gpu: Gpu, rounds: int) -> list[dict[str, Any]]:
    """Race all shapes, in the order of `left_out`."""
    with contextlib.closing(command_executor(gpu)) as executor:
        return [raced(each, rounds, executor) for each in left_out]


def main() -> None:
    """Compute the losses, race if asked, write the JSON and print the tables."""
    parser = record.parser(__doc__)
    parser.add_argument("--db", nargs="*", default=[], metavar="DATABASE", help="databases with the trials to read")
    parser.add_argument("--recording", metavar="NAME", help="a recording with the times, instead of databases")
    parser.add_argument("--configs", metavar="EXPORT", help="the configs to leave out, by default those that ship")
    parser.add_argument("--measure", action="store_true", help="race each answer on the GPU that is here")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each race")
    parser.add_argument("--into", metavar="EXPORT", help="a JSON export to write the losses to")
    options: argparse.Namespace = parser.parse_args()
    if not options.db and not options.measure and not options.recording:
        sys.exit("this needs --db, --recording, or --measure and a GPU")
    if options.into and (options.measure or options.recording):
        parser.error("--into writes what --db alone tells, which neither --measure nor --recording is")
    gpu = record.required_gpu(interpreter=False) if options.measure else None
    configs = read_configs(options.configs).configs if options.configs else shipped_configs(gpu)
    times = recorded_times(options.recording, configs) if options.recording else trial_times(options.db, configs)
    # Each of hundreds of tables would warn about its missing shapes.
    logging.getLogger("attention_tuner").setLevel(logging.ERROR)
    by_reach = {reach: leave_one_out(configs, times.__getitem__, Chain(reach=reach)) for reach in REACHES}
    chosen = by_reach[REACH]
    expected = pooled(chosen)
    if options.into:
        write_losses(options.into, expected, configs, ("neighbour", "heuristic"))
    found: dict[str, Any] = {
        "databases": len(options.db), "recording": options.recording, "reach": REACH,
        "by_reach": [summary(reach, left_out) for reach, left_out in by_reach.items()],
        "losses": [asdict(loss) for loss in expected],
        "least_default_over_answer": least_over_default(chosen, times),
        "shapes": [shape(each, times[each.config]) for each in chosen],
    }  # fmt: skip
    if gpu is not None:
        for row, race in zip(found["shapes"], measured(chosen, gpu, options.rounds), strict=True):
            row["race"] = race
    record.write(options.out, found)
    show(found)


def write_losses(path: str, found: Sequence[Loss], configs: Sequence[BestConfig], sources: Sequence[Source]) -> None:
    """Replace, in the export at `path`, the losses of `sources` on the GPUs of `configs` by those found."""
    exported, gpus = read_configs(path), {config.gpu.name for config in configs}
    kept = [loss for loss in exported.losses if loss.gpu_name not in gpus or loss.source not in sources]
    write_configs(Exported(exported.configs, [*kept, *found]), path)


def percent(value: float | None) -> str:
    """Text of a share in percent."""
    return "-" if value is None else f"{value:.1%}"


def show(found: Mapping[str, Any]) -> None:
    """Print the results as tables."""
    record.print_table(("reach", "shapes", "sources", "not timed", "median loss", "worst", "above 10 %"), [
        ["any" if row["reach"] is None else f"{row['reach']:g}", str(row["shapes"]),
         " ".join(f"{count} {source}" for source, count in row["sources"].items()), str(row["never_timed"]),
         percent(row["median"]), percent(row["worst"]), str(row["above_10_percent"])] for row in found["by_reach"]])
    least = found["least_default_over_answer"]
    print(f"with reach {found['reach']:g}; the default takes at least {least or 0:.2f} times as long as the answer")
    columns = ("shape", "page", "source", "distance", "loss", "default / answer", "raced over best", "over default")
    record.print_table(columns, [
        [row["batch"][:28], str(row["page_size"]), row["source"], f"{row['distance'] or 0:g}", percent(row["loss"]),
         f"{row['default_ms'] / row['served_ms']:.2f}" if row["default_ms"] and row["served_ms"] else "-",
         *(percent((row.get("race", {}).get(name) or {}).get("median")) for name in ("over_best", "over_default"))]
        for row in found["shapes"]])


if __name__ == "__main__":
    main()
