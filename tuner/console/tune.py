"""The command that searches: tune."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from ...kernel_templates.errors import InputError, NothingValidError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import JobError
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.task import Task
from ...search_spaces.models import kind_of
from ..sampling.samplers import DEFAULT_SAMPLER, SAMPLERS, check_sampler
from . import options, request

if TYPE_CHECKING:
    from ..measure.gpu_state import GpuProcess
    from ..measure.rates import Rates
    from ..run import Runner
    from ..settings import Reason, Settings, TaskResult

TRIALS_WITHOUT_GPU = 12
SECONDS_WITHOUT_GPU = 120.0
TRIALS = 30
RATES_LIMIT_S = 120.0
# Of the time for a run, what measuring the rates, ending the processes and writing the result take, and at most this
# share of it.
ENDING_S = 2.0
ENDING_SHARE = 0.1


def tune(
    model: options.Model = None,
    tp: options.Tp = 1,
    dtype: options.Dtype = None,
    kv_dtype: options.KvDtype = None,
    q_dtype: options.QDtype = None,
    tree: options.Tree = False,
    spec: options.Spec = None,
    batch: options.Batches = None,
    suite: options.Suite = None,
    page_size: options.PageSizes = None,
    from_misses: Annotated[str | None, typer.Option(
        "--from-misses", metavar="FILE", help="The shapes that lookups on this GPU found nothing tuned for, in the "
                                              "place of a model, batches and page sizes.")] = None,
    gpu: options.GpuName = None,
    trials: Annotated[int | None, typer.Option(
        parser=options.whole_number, metavar="NUMBER", help="Variants to try for each layer, batch and page size.",
        show_default=f"{TRIALS}, without a GPU {TRIALS_WITHOUT_GPU}")] = None,
    seconds: Annotated[float | None, typer.Option(
        "--seconds", parser=options.positive_seconds, metavar="SECONDS", help="Time for the whole run.",
        show_default=f"no limit, without a GPU {SECONDS_WITHOUT_GPU:g}")] = None,
    seed: options.Seed = 0,
    sampler: Annotated[str, typer.Option(metavar="|".join(SAMPLERS), help="What chooses the variants to try.")]
        = DEFAULT_SAMPLER,
    cross: Annotated[bool, typer.Option(
        "--cross", help="Then try what won one batch on all others of its layer and page size: what report portfolio "
                        "needs to know.")] = False,
    warm: options.Warm = False,
    eager: options.Eager = False,
    db: options.Database = None,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Only say what would be tried, and how long it would take.")] = False,
    replay: Annotated[str | None, typer.Option(
        metavar="NAME|FILE", help="Search a recording instead of a GPU: all that it holds of the layers, batches and "
                                  "page sizes named. Nothing is stored.")] = None,
    json: options.Json = False,
) -> None:
    """Search for the fastest variants, and store the best.

    Each layer, batch and page size is a search of its own; of a model with windowed and full layers both are tuned.
    Without a GPU the kernels run through Triton's interpreter, on small batches: that shows that they are right, and
    its times are no GPU's.

    \b
    Example:
      attention-tuner tune --model llama-3-8b --batch 1x512@16384,63x1@32768 --page-size 16,128
    """
    from ..settings import Settings

    begun = time.monotonic()
    check_sampler(sampler)
    if replay is not None:
        from .commands_replay import Wanted, replay_recording

        request.refuse_beside(
            "--replay", from_misses=from_misses, gpu=gpu, db=db, warm=warm, eager=eager, dry_run=dry_run, cross=cross)
        has_layer = model or spec or tp != 1 or dtype or kv_dtype or q_dtype or tree
        layers = request.layers(model, tp, dtype, spec, kv_dtype, q_dtype, tree) if has_layer else ()
        wanted = Wanted(layers, batch or (), suite, page_size or ())
        asked = Settings(trials or TRIALS, seconds, seed, sampler)
        replay_recording(replay, wanted, asked, json)
        return
    if from_misses is None:
        specs = request.layers(model, tp, dtype, spec, kv_dtype, q_dtype, tree)
        pages = request.page_sizes(page_size or ())
        named = request.batches(batch or (), suite)
        on = request.machine(gpu) if dry_run else request.runnable(gpu)
        tasks = request.tasks(specs, named or request.default_batches(on), pages)
    else:
        if model or tp != 1 or dtype or kv_dtype or q_dtype or tree or spec or batch or suite or page_size:
            raise InputError("--from-misses says itself which layers, batches and page sizes to tune; give it without "
                             "options that name others")
        specs = ()
        on = request.machine(gpu) if dry_run else request.runnable(gpu)
        tasks = request.missed_tasks(from_misses, on)
    settings = Settings(
        trials=trials or (TRIALS_WITHOUT_GPU if on.is_interpreter else TRIALS),
        seconds=seconds or (SECONDS_WITHOUT_GPU if on.is_interpreter else None),
        seed=seed,
        sampler=sampler,
        regime=request.regime(warm, eager),
        cross=cross,
    )
    _name_kinds(model, specs)
    if dry_run:
        _forecast(tasks, on, settings, json)
        return
    _tune(tasks, on, settings, Request(db, json, begun))


def _name_kinds(model: str | None, specs: Sequence[AttentionSpec]) -> None:
    """Tell, of a model whose layers differ, of which kinds they are: each is tuned."""
    from . import output as report

    if len(specs) > 1:
        kinds = " and ".join(f"{kind_of(spec)} ({spec.key()})" for spec in specs)
        report.note(f"{model} has {len(specs)} kinds of attention layers, and each is tuned: {kinds}")


def _forecast(tasks: Sequence[Task], gpu: Gpu, settings: Settings, as_json: bool) -> None:
    from ..costs import assumptions, forecast, total_compiles, total_seconds
    from ..processes.compile import default_processes
    from . import documents
    from . import output as report

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


@dataclass(frozen=True, slots=True)
class Request:
    """How a search was asked for: its database, the form of its result, and when, by `time.monotonic`."""

    db: str | None
    as_json: bool
    begun: float


def _tune(tasks: Sequence[Task], gpu: Gpu, settings: Settings, asked: Request) -> None:
    from ...db import Store, default_path
    from ...db.engine import shown_name
    from ...db.lookup.leave_one_out import measure_losses
    from ..run import executor_on
    from ..tune import refuse_large, refuse_long
    from ..tune import tune as search
    from . import documents
    from . import output as report
    from .progress import TuneProgress

    # Before the database is opened, which may make it.
    if gpu.is_interpreter:
        refuse_long(tasks, settings)
    else:
        refuse_large(tasks)
    with Store.open(default_path() if asked.db is None else asked.db) as store:
        name = store.name
        with contextlib.closing(executor_on(gpu)) as executor:
            foreign = _foreign(executor.uuid)
            ending_s = min(ENDING_S, ENDING_SHARE * (settings.seconds or math.inf))
            executor = replace(executor, aside_s=time.monotonic() - asked.begun + ending_s)
            with TuneProgress(gpu) as listener:
                results = search(tasks, gpu, store, settings, executor, listener)
            if all(result.best is None for result in results):
                raise NothingValidError(_why_nothing(gpu, settings, results))
            if not gpu.is_interpreter:
                measure_losses(store, gpu.name)
            deadline = asked.begun + (settings.seconds or math.inf)
            rates = None if executor.racer is None else _rates(executor.racer, deadline)
    if asked.as_json:
        report.print_json({
            "gpu": gpu.name,
            "database": name,
            "settings": settings.as_json(),
            "foreign_processes": [asdict(process) for process in foreign],
            "rates": rates and asdict(rates),
            "results": [documents.result_document(result, rates) for result in results],
        })
        return
    report.print_results(gpu, results, rates)
    best = next(result.task for result in results if result.best is not None)
    where = f" --db {shown_name(asked.db)}" if asked.db else ""
    report.say(f"stored in {name}; look it up with: attention-tuner lookup --spec {best.spec.key()} "
               f"--batch {best.batch} --page-size {best.page_size}{where}")


def _foreign(uuid: str | None) -> list[GpuProcess]:
    """What others run on the card, which is told of; asked before a worker starts, which might seem another's too."""
    from ..measure.gpu_state import foreign_processes, foreign_sentence
    from . import output as report

    found = [] if uuid is None else foreign_processes(uuid, {os.getpid()})
    if found:
        report.note(foreign_sentence(found))
    return found


def _rates(runner: Runner, deadline: float) -> Rates | None:
    """What this machine's GPU can do at most, None where that cannot be measured by `deadline`."""
    from ..measure.rates import RatesJob
    from . import output as report

    try:
        if (left_s := deadline - time.monotonic()) > 0 and runner.ready(left_s):
            return runner.submit(RatesJob(), RATES_LIMIT_S, deadline).result()
        reason = "there was no time left"
    except JobError as error:
        reason = str(error)
    report.note(f"the GPU's rates could not be measured, so no share of the floor is shown: {reason}")
    return None


def _why_nothing(gpu: Gpu, settings: Settings, results: Sequence[TaskResult]) -> str:
    from ..costs import fewest_seconds

    if settings.seconds is None or any(result.outcomes for result in results):
        return f"no variant was right and timed on {gpu.name}: {_reasons(results)}"
    # The estimate may be what was too low.
    needed = max(fewest_seconds([result.task for result in results], gpu, settings.trials), 2 * settings.seconds)
    return (f"the time ran out before any variant was finished on {gpu.name}: {settings.seconds:g} s were given, and "
            f"{len(results)} searches need about {math.ceil(needed)} s")


def _reasons(results: Sequence[TaskResult]) -> str:
    counts: Counter[Reason] = Counter()
    for result in results:
        counts += result.reasons
    told = (f"{count} {outcome}{f' at {stage}' if stage else ''}{'' if outcome == 'wrong' else f' because {reason}'}"
            for (outcome, stage, reason), count in counts.most_common())
    return "; ".join(told) or "no trial could be made"
