"""The command that searches: tune."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..kernel_templates.errors import JobError, NothingValidError
from ..kernel_templates.gpu import Gpu
from . import options, request
from .task import Task

if TYPE_CHECKING:
    from .jobs import Rates
    from .run import Executor, Reason, Settings, TaskResult

TRIALS_WITHOUT_GPU = 12
SECONDS_WITHOUT_GPU = 120.0
TRIALS = 30
RATES_LIMIT_S = 120.0


def tune(
    model: options.Model = None,
    tp: options.Tp = 1,
    dtype: options.Dtype = None,
    spec: options.Spec = None,
    batch: options.Batches = None,
    suite: options.Suite = None,
    page_size: options.PageSizes = None,
    gpu: options.GpuName = None,
    trials: Annotated[int | None, typer.Option(
        parser=options.whole_number, metavar="NUMBER", help="Variants to try for each layer, batch and page size.",
        show_default=f"{TRIALS}, without a GPU {TRIALS_WITHOUT_GPU}")] = None,
    seconds: Annotated[float | None, typer.Option(
        "--seconds", parser=options.positive_seconds, metavar="SECONDS", help="Time for the whole run.",
        show_default=f"no limit, without a GPU {SECONDS_WITHOUT_GPU:g}")] = None,
    seed: options.Seed = 0,
    sampler: Annotated[str, typer.Option(metavar="NAME", help="Which of Optuna's: tpe, random, gp or qmc.")] = "tpe",
    db: options.Database = None,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Only say what would be tried, and how long it would take.")] = False,
    json: options.Json = False,
) -> None:
    """Search for the fastest variants, and store the best.

    Each layer, batch and page size is a search of its own.
    Without a GPU the kernels run through Triton's interpreter, on small batches: that shows that they are right, and
    its times are no GPU's.

    \b
    Example:
      attention-tuner tune --model llama-3-8b --batch 1x512@16384,63x1@32768 --page-size 16,128
    """
    from .run import Settings

    specs = request.layers(model, tp, dtype, spec)
    pages = request.page_sizes(page_size or ())
    named = request.batches(batch or (), suite)
    sampler = request.sampler(sampler)
    on = request.machine(gpu) if dry_run else request.runnable(gpu)
    tasks = request.tasks(specs, named or request.default_batches(on), pages)
    settings = Settings(
        trials=trials or (TRIALS_WITHOUT_GPU if on.is_interpreter else TRIALS),
        seconds=seconds or (SECONDS_WITHOUT_GPU if on.is_interpreter else None),
        seed=seed,
        sampler=sampler,
    )
    if dry_run:
        _forecast(tasks, on, settings, json)
        return
    _tune(tasks, on, settings, db, json)


def _forecast(tasks: Sequence[Task], gpu: Gpu, settings: Settings, as_json: bool) -> None:
    from . import documents, report
    from .compile import default_processes
    from .forecast import assumptions, forecast, total_compiles, total_seconds

    forecasts = [forecast(task, gpu, settings.trials, settings.sampler, settings.seed) for task in tasks]
    processes = default_processes()
    if as_json:
        report.print_json({
            "gpu": gpu.name,
            "tasks": [documents.forecast_document(each) for each in forecasts],
            "compiles": total_compiles(forecasts),
            "seconds": total_seconds(forecasts, processes),
            "assumptions": assumptions(gpu, processes),
        })
        return
    report.print_forecasts(gpu, forecasts, processes)


def _tune(tasks: Sequence[Task], gpu: Gpu, settings: Settings, db: str | None, as_json: bool) -> None:
    from ..db import Store, default_path
    from . import documents, report
    from .tune import refuse_long
    from .tune import tune as search

    if gpu.is_interpreter:
        # Before the database is opened, which may make it.
        refuse_long(tasks, settings)
    with Store.open(default_path() if db is None else db) as store:
        name = store.name
        with contextlib.closing(_executor(gpu)) as executor, report.TuneProgress(gpu) as listener:
            results = search(tasks, gpu, store, settings, executor, listener)
    if all(result.best is None for result in results):
        raise NothingValidError(f"no variant was right and timed on {gpu.name}: {_reasons(results)}")
    rates = None if gpu.is_interpreter else _rates()
    if as_json:
        report.print_json({
            "gpu": gpu.name,
            "database": name,
            "settings": settings.as_json(),
            "rates": rates and asdict(rates),
            "results": [documents.result_document(result, rates) for result in results],
        })
        return
    report.print_results(gpu, results, rates)
    best = next(result.task for result in results if result.best is not None)
    report.say(f"stored in {name}; look it up with: attention-tuner lookup --spec {best.spec.key()} "
               f"--batch {best.batch} --page-size {best.page_size}" + (f" --db {db}" if db else ""))


def _executor(gpu: Gpu) -> Executor:
    """The processes that a run needs, none of them started yet."""
    from .cache import prune, triton_cache
    from .compile import CompilePool
    from .run import Executor
    from .worker import Worker

    if gpu.is_interpreter:
        return Executor(Worker(interpret=True))
    prune(triton_cache())
    return Executor(Worker(interpret=False), CompilePool())


def _rates() -> Rates | None:
    """What this machine's GPU can do at most, None where that cannot be measured now."""
    from . import report
    from .jobs import RatesJob
    from .worker import Worker

    try:
        with Worker(interpret=False) as worker:
            return worker.run(RatesJob(), RATES_LIMIT_S)
    except JobError as error:
        report.note(f"the GPU's rates could not be measured, so no share of the floor is shown: {error}")
        return None


def _reasons(results: Sequence[TaskResult]) -> str:
    counts: Counter[Reason] = Counter()
    for result in results:
        counts += result.reasons
    told = (f"{count} {outcome}{f' at {stage}' if stage else ''} because {reason}"
            for (outcome, stage, reason), count in counts.most_common())
    return "; ".join(told) or "no trial could be made"
