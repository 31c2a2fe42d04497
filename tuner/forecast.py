"""What a run will take, before anything is compiled or run: variants, compiles and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..kernel_templates.batch import BatchBucket
from ..kernel_templates.default import default_variant
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.limits import Body
from ..kernel_templates.template import template_of
from ..kernel_templates.variant import Variant
from ..search_spaces.space import Survey, survey
from .task import Task

# Measured with Triton 3.6 to 3.9 on one core of a server: what the interpreter takes for each tile of keys.
INTERPRETED_TILE_S = 0.005
# Of a trial, the reference, the check, the time and the race take this many launches.
LAUNCHES_PER_TRIAL = 4
COMPILE_S = 5.0
MEASURE_S = 1.0
RACE_S = 15.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """For one task: the `survey` of its space, the variants it would try first, and their distinct kernels."""

    task: Task
    survey: Survey
    trials: tuple[Variant, ...]
    compiles: frozenset[str]
    seconds: float

    @property
    def valid_by_template(self) -> Counter[str]:
        """How many variants of each template are valid."""
        return Counter(variant.template for variant in self.survey.valid)


def assumptions(gpu: Gpu, processes: int) -> str:
    """What the estimated time rests on, in one sentence."""
    if gpu.is_interpreter:
        return (f"the estimate assumes {LAUNCHES_PER_TRIAL} launches a trial, each of the default variant, at "
                f"{INTERPRETED_TILE_S * 1e3:g} ms a tile of keys")
    return (f"the estimate assumes {COMPILE_S:g} s a compile, {processes} at a time, {MEASURE_S:g} s a trial "
            f"and {RACE_S:g} s a race, and no compiled kernel in the cache")


def forecast(task: Task, gpu: Gpu, trials: int, sampler: str, seed: int) -> Forecast:
    """What tuning `task` on `gpu` will take, with the variants that the search asks for while it is told nothing.

    Imports Optuna. Raises `InputError` for an unknown `sampler`.
    """
    from .study import Study

    found = survey(task.spec, BatchBucket.of(task.batch), task.page_size, gpu)
    study = Study(found.valid, [default_variant(task.spec, task.batch, task.page_size)], sampler, seed)
    asked = tuple(variant for _ in range(trials) if (variant := study.ask()) is not None)
    if gpu.is_interpreter:
        seconds = len(asked) * LAUNCHES_PER_TRIAL * interpreted_seconds(task)
        return Forecast(task, found, asked, frozenset(), seconds)
    kernels = frozenset(f"{task.spec.key()} {template_of(variant).code_key(variant)}" for variant in asked)
    return Forecast(task, found, asked, kernels, MEASURE_S * len(asked) + RACE_S)


def total_compiles(forecasts: Sequence[Forecast]) -> int:
    """The distinct kernels of all tasks together: batches of one layer and page size share theirs."""
    return len({kernel for each in forecasts for kernel in each.compiles})


def total_seconds(forecasts: Sequence[Forecast], processes: int) -> float:
    """What all tasks take together, with `processes` that compile while the GPU measures."""
    # Compiling and measuring go on side by side: the longer of them counts.
    return max(sum(each.seconds for each in forecasts), total_compiles(forecasts) * COMPILE_S / processes)


def interpreted_seconds(task: Task) -> float:
    """What one launch of the default variant takes through the interpreter, by its tiles of keys."""
    from ..kernel_templates.plan import cut_tiles

    variant = default_variant(task.spec, task.batch, task.page_size)
    body = Body(variant.number("block_m"), variant.number("block_n"))
    tiles = cut_tiles(task.batch, task.spec.group_size, body, body)
    return INTERPRETED_TILE_S * task.spec.num_kv_heads * int((-(-tiles.stop // body.block_n)).sum())
