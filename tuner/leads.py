"""Leads: variants to try first for a task, times expected from other batches, and rivals of a stored winner."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ..db.store import Store
from ..kernel_templates.batch import Batch, BatchBucket
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.heuristic import candidates, default_variant
from ..kernel_templates.outcome import BestConfig, StaticFacts, Timed
from ..kernel_templates.registry import template_of, why_invalid
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from .run import Run
from .sampling.points import beside

# Winners of the nearest tuned batches that are tried before the sampler chooses.
NEIGHBOURS = 3
# A variant slower than the best by this ratio on another batch will not win here.
WORTH_TRYING = 1.5
# Fastest other variants that a stored winner is raced against.
RUNNERS_UP = 2


def neighbours(task: Task, run: Run) -> tuple[Variant, ...]:
    """Stored winners of the batches nearest to that of `task`, as they would run there."""
    bucket = BatchBucket.of(task.batch)
    runnable = [c.variant for c in _nearest(task, run) if why_invalid(c.variant, task.spec, run.gpu) is None]
    return tuple(dict.fromkeys(template_of(v).settle(v, bucket) for v in runnable[:NEIGHBOURS]))


def first_variants(
    task: Task, gpu: Gpu, near: Sequence[Variant], valid: Collection[Variant]
) -> tuple[Variant, ...]:
    """The default, if it can run, then those of `near` and of the heuristic's candidates that are in `valid`."""
    default = default_variant(task.spec, task.batch, task.page_size)
    likely = dict.fromkeys((*near, *candidates(task.spec, BatchBucket.of(task.batch), task.page_size, gpu)))
    # Through the interpreter most of them are the same variant again.
    found = tuple(variant for variant in likely if variant in valid)
    return (default, *found) if why_invalid(default, task.spec, gpu) is None else found


def proven(task: Task, run: Run) -> list[Variant]:
    """Variants that this run has compiled and that did well on its other batches, those of the nearest first."""
    builds = run.builds
    if builds is None:
        return []
    settled = dict.fromkeys(_successful(task, run))
    return [v for v in settled if _fits(v, task, run.gpu, builds.result(task, v))]


def log_ratios(task: Task, run: Run) -> dict[Variant, float]:
    """Logarithm of each variant's time over the best time, on the nearest tuned batches of the layer."""
    batches = dict.fromkeys(Batch.parse(config.batch) for config in _nearest(task, run))
    others = [Task(task.spec, batch, task.page_size) for batch in batches if batch != task.batch]
    # A batch that this run has searched need not be stored as tuned.
    others = list(dict.fromkeys([*_searched(task, run), *others]))
    others.sort(key=lambda other: BatchBucket.of(other.batch).distance(BatchBucket.of(task.batch)))
    return merged_ratios(task, (_times_ms(other, run) for other in others[:NEIGHBOURS]))


def merged_ratios(task: Task, near: Iterable[Mapping[Variant, float]]) -> dict[Variant, float]:
    """Merge the times in ms of several batches, the nearest first, into logarithms of ratios to each batch's best.

    A variant that was timed on several batches counts as on the first. Variants are as they would run for `task`.
    """
    bucket, found = BatchBucket.of(task.batch), dict[Variant, float]()
    for times in near:
        best_ms = min(times.values(), default=math.nan)
        for variant, ms in times.items():
            found.setdefault(template_of(variant).settle(variant, bucket), math.log(ms / best_ms))
    return found


def rivals(config: BestConfig, store: Store, gpu: Gpu, most: int) -> list[Variant]:
    """Variants to race a stored winner with: the default, itself, its runners-up and its neighbours, valid on `gpu`.

    At most `most`. Times are those of the latest stored trials, whatever environment they were measured in. Neighbours
    that were timed come first, the fastest before the others, then those that need no other kernel than the winner's.
    """
    winner, times = config.variant, _latest_times_ms(config, store)
    default = default_variant(config.shape.spec, Batch.parse(config.batch), winner.page_size)
    ranked = sorted((v for v in times if v not in (winner, default)), key=times.__getitem__)
    near = sorted(one_step(winner, config, gpu), key=lambda v: (times.get(v, math.inf), not _shares_code(v, winner)))
    found = dict.fromkeys([default, winner, *ranked[:RUNNERS_UP], *near])
    return [variant for variant in found if not why_invalid(variant, config.shape.spec, gpu)][:most]


def one_step(variant: Variant, config: BestConfig, gpu: Gpu) -> Iterator[Variant]:
    """Valid variants that differ from `variant` in one dimension: by one step if its choices have an order."""
    template, bucket = template_of(variant), config.shape.bucket
    for name, choices in template.grid(bucket, gpu).items():
        value = variant.as_dict()[name]
        for choice in beside(value, choices) if value in choices else ():
            other = template.settle(variant.replace(**{name: choice}), bucket)
            if other != variant and not why_invalid(other, config.shape.spec, gpu):
                yield other


def _nearest(task: Task, run: Run) -> list[BestConfig]:
    """Stored best configs of the layer and page size, the batch nearest to that of `task` first."""
    bucket = BatchBucket.of(task.batch)
    return sorted(run.history.best_configs(task), key=lambda config: config.shape.bucket.distance(bucket))


def _times_ms(task: Task, run: Run) -> dict[Variant, float]:
    if task in run.timed:
        return {variant: timing.median_ms for variant, timing in run.timed[task].items()}
    outcomes = (record.outcome for record in run.history.trials(task))
    return {timed.variant: timed.timing.median_ms for timed in outcomes if isinstance(timed, Timed)}


def _searched(task: Task, run: Run) -> list[Task]:
    """Other batches of the layer that this run has searched."""
    return [t for t, timed in run.timed.items()
            if timed and t != task and (t.spec, t.page_size) == (task.spec, task.page_size)]


def _fits(variant: Variant, task: Task, gpu: Gpu, compiled: object) -> bool:
    is_launchable = isinstance(compiled, StaticFacts) and compiled.shared_bytes <= gpu.shared_memory_bytes
    return is_launchable and why_invalid(variant, task.spec, gpu) is None


def _successful(task: Task, run: Run) -> Iterator[Variant]:
    """Variants that did well on the run's other batches, the fastest of the nearest batch first."""
    bucket = BatchBucket.of(task.batch)
    for other in sorted(_searched(task, run), key=lambda t: BatchBucket.of(t.batch).distance(bucket)):
        times = {variant: timing.median_ms for variant, timing in run.timed[other].items()}
        limit_ms = WORTH_TRYING * min(times.values(), default=0.0)
        for variant in sorted(times, key=times.__getitem__):
            if times[variant] <= limit_ms:
                yield template_of(variant).settle(variant, bucket)


def _shares_code(variant: Variant, other: Variant) -> bool:
    return template_of(variant).code_key(variant) == template_of(other).code_key(other)


def _latest_times_ms(config: BestConfig, store: Store) -> dict[Variant, float]:
    """Latest median time in ms of each variant in the setting of `config`."""
    found: dict[Variant, float] = {}
    for trial in store.trials(config.shape.spec, config.variant.page_size, config.gpu, config.batch):
        outcome = trial.outcome
        if trial.setting.regime == config.timing.regime:
            found.pop(outcome.variant, None)
            if isinstance(outcome, Timed):
                found[outcome.variant] = outcome.timing.median_ms
    return found
