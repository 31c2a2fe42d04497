"""The command that searches: tune, on a GPU, through the interpreter or on a recording."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...kernel_templates.errors import InputError, NothingValidError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import JobError
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.task import Task
from ..sampling.samplers import DEFAULT_SAMPLER, SAMPLERS, check_sampler
from . import options, output, request
from .text import (
    baseline_text,
    batch_text,
    count_list,
    counted,
    grouped,
    milliseconds,
    percent,
    seconds,
    total,
    variant_text,
)

if TYPE_CHECKING:
    from ..measure.gpu_state import GpuProcess
    from ..measure.rates import Rates
    from ..recording import Recording
    from ..replay import Replayed
    from ..run import Runner
    from ..settings import Reason, Settings, TaskResult

# Tasks that a message lists.
LISTED = 8


@options.command
def tune(
    layers: options.Layers,
    batches: options.Batches,
    search: options.Search,
    clock: options.Clock,
    page_size: options.PageSizes = None,
    from_misses: Annotated[str | None, typer.Option(
        "--from-misses", metavar="FILE",
        help="Tune what lookups on this GPU missed, from this file, instead of a model's layers.")] = None,
    gpu: options.GpuName = None,
    sampler: Annotated[str, typer.Option(metavar="|".join(SAMPLERS), help="Chooses the variants to try.")]
        = DEFAULT_SAMPLER,
    cross: Annotated[bool, typer.Option(
        "--cross", help="Then try the winner of each batch on the others of its layer and page size, for report "
                        "portfolio.")] = False,
    db: options.Database = None,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Only show what would be tried, and the estimated time.")] = False,
    replay: Annotated[str | None, typer.Option(
        metavar="NAME|FILE", help="Search a recording instead of a GPU, and store nothing.")] = None,
    json: options.Json = False,
) -> None:
    """Search for the fastest variants, and store the best.

    Each layer, batch and page size is searched separately. A model with windowed and full layers has both tuned.
    Without a GPU the kernels run through Triton's interpreter on small batches: this checks that they are right, but
    their times say nothing about a GPU.

    \b
    Example:
      attention-tuner tune --model llama-3-8b --batch 1x512@16384,63x1@32768 --page-size 16,128
    """
    from ..settings import Settings

    begun = time.monotonic()
    check_sampler(sampler)
    if replay is not None:
        request.refuse_beside("--replay", from_misses=from_misses, gpu=gpu, db=db, warm=clock.warm, eager=clock.eager,
                              dry_run=dry_run, cross=cross)
        settings = Settings(search.trials or options.TRIALS, search.seconds, search.seed, sampler)
        _replay(replay, layers, batches, page_size or (), settings, json)
        return
    find_gpu = request.any_gpu if dry_run else request.running_gpu
    if from_misses is None:
        specs, pages, named = layers.specs(), request.page_sizes(page_size or ()), batches.named()
        on = find_gpu(gpu)
        tasks = request.tasks(specs, named or request.default_batches(on), pages)
    else:
        if layers != options.Layers() or batches != options.Batches() or page_size:
            raise InputError("--from-misses says itself which layers, batches and page sizes to tune; give it without "
                             "options that name others")
        on = find_gpu(gpu)
        tasks = request.missed_tasks(from_misses, on)
    settings = search.settings(on, sampler=sampler, regime=clock.regime, cross=cross)
    if layers.model is not None:
        _note_kinds(layers.model, tasks)
    if dry_run:
        _forecast(tasks, on, settings, json)
    else:
        _tune(tasks, on, settings, _Request(db, json, begun))


def _note_kinds(model: str, tasks: Sequence[Task]) -> None:
    """Name the kinds of a model's layers where there are several: each is tuned."""
    from ...search_spaces.models import kind_of

    specs = list(dict.fromkeys(task.spec for task in tasks))
    if len(specs) > 1:
        kinds = " and ".join(f"{kind_of(spec)} ({spec.key()})" for spec in specs)
        output.note(f"{model} has {len(specs)} kinds of attention layers, and each is tuned: {kinds}")


def _forecast(tasks: Sequence[Task], gpu: Gpu, settings: Settings, as_json: bool) -> None:
    from ..costs import assumptions, forecast, total_compiles, total_seconds
    from ..processes.compile import default_processes

    forecasts = [forecast(task, gpu, settings.trials, settings.sampler, settings.seed) for task in tasks]
    processes = default_processes()
    compiles, total_s = total_compiles(forecasts), total_seconds(forecasts, processes)
    if as_json:
        output.print_json({
            "gpu": gpu, "compiles": compiles, "seconds": total_s, "assumptions": assumptions(gpu, processes),
            "tasks": [{
                **output.encode(each.task), "valid": len(each.survey.valid),
                "valid_by_template": each.valid_by_template, "rejected": each.survey.rejected,
                "trials": len(each.trials), "compiles": len(each.compiles), "seconds": each.seconds,
            } for each in forecasts],
        })  # fmt: skip
        return
    for title, members in _by_layer(gpu, forecasts).items():
        output.print_table(title, ("batch", "page", "valid variants", "trials", "compiles", "time"), [(
            batch_text(each.task.batch), str(each.task.page_size),
            " + ".join(f"{count} {name}" for name, count in each.valid_by_template.items()),
            str(len(each.trials)), str(len(each.compiles)), seconds(each.seconds),
        ) for each in members])  # fmt: skip
    output.say(f"together {compiles} compiles, about {seconds(total_s)}; {assumptions(gpu, processes)}")
    if gpu.is_interpreter:
        output.say(output.INTERPRETER_NOTE)


@dataclass(frozen=True, slots=True)
class _Request:
    """Destination of the results, and the moment the command began, by `time.monotonic`."""

    db: str | None
    as_json: bool
    begun: float


def _tune(tasks: Sequence[Task], gpu: Gpu, settings: Settings, asked: _Request) -> None:
    from ...db.engine import shown_name
    from ...db.lookup.leave_one_out import measure_losses
    from ..run import executor_on
    from ..settings import Budget
    from ..tune import refuse
    from ..tune import tune as search

    # Refused before the database is opened, which may create it.
    refuse(tasks, gpu, settings)
    with request.open_store(asked.db, create=True) as store:
        name = store.name
        with contextlib.closing(executor_on(gpu)) as executor:
            foreign = _foreign(executor.uuid)
            closing_s = Budget.seconds_to_close(settings.seconds)
            executor = replace(executor, aside_s=time.monotonic() - asked.begun + closing_s)
            with output.TuneProgress(gpu) as listener:
                results = search(tasks, gpu, store, settings, executor, listener)
            if all(result.best is None for result in results):
                raise NothingValidError(_why_nothing(gpu, settings, results))
            if not gpu.is_interpreter:
                measure_losses(store, gpu.name)
            deadline = asked.begun + (settings.seconds or math.inf)
            rates = None if executor.racer is None else _rates(executor.racer, deadline)
    if asked.as_json:
        output.print_json({
            "gpu": gpu, "database": name, "settings": settings, "foreign_processes": foreign, "rates": rates,
            "results": [result_document(result, rates) for result in results],
        })  # fmt: skip
        return
    print_results(gpu, results, rates)
    best = next(result.task for result in results if result.best is not None)
    where = f" --db {shown_name(asked.db)}" if asked.db else ""
    output.say(f"stored in {name}; look it up with: attention-tuner lookup --spec {best.spec.key()} "
               f"--batch {best.batch} --page-size {best.page_size}{where}")


def _foreign(uuid: str | None) -> list[GpuProcess]:
    """Return, and note on stderr, the processes of others on the GPU.

    Called before a worker starts, which would otherwise count as another's process.
    """
    from ..measure.gpu_state import foreign_processes, foreign_sentence

    found = [] if uuid is None else foreign_processes(uuid, {os.getpid()})
    if found:
        output.note(foreign_sentence(found))
    return found


def _rates(runner: Runner, deadline: float) -> Rates | None:
    """Measure the peak rates of the GPU; return None where that fails or does not end by `deadline`."""
    from ..measure.rates import RatesJob
    from ..settings import Budget

    try:
        if (left_s := deadline - time.monotonic()) > 0 and runner.ready(left_s):
            return runner.submit(RatesJob(), Budget.rates_limit_s, deadline).result()
        reason = "there was no time left"
    except JobError as error:
        reason = str(error)
    output.note(f"the GPU's rates could not be measured, so no share of the floor is shown: {reason}")
    return None


def result_document(result: TaskResult, rates: Rates | None) -> dict[str, Any]:
    """Return the JSON object of a task's result, with its share of the floor where the rates are known."""
    return {**output.encode(replace(result, reasons=grouped(result.reasons))),
            "measured_per_second": result.measured_per_second, "floor_share": _floor_share(result, rates)}


def _floor_share(result: TaskResult, rates: Rates | None) -> float | None:
    """Return the least time that the GPU's rates allow over the best time, None where either is unknown.

    The rates are those of a plain sum and a plain matrix product, so that the best kernels exceed 1 a little.
    """
    from ..measure.rates import floor_ms

    if result.best is None or rates is None:
        return None
    return floor_ms(result.task.spec, result.task.batch, rates) / result.best.timing.median_ms


def print_results(gpu: Gpu, results: Sequence[TaskResult], rates: Rates | None) -> None:
    """Write a table of the best variants, and the summary of the run."""
    columns = ("batch", "page", "best variant", "time", "speed-up", "verdict", *([] if rates is None else ["of floor"]))
    for title, members in _by_layer(gpu, results).items():
        output.print_table(title, columns, [_result_row(result, rates) for result in members])
        for result in members:
            if result.best is not None and (over := baseline_text(result, gpu)) != "the default":
                output.say(f"the speed-up on {batch_text(result.task.batch)}, pages of {result.task.page_size}, "
                           f"is over {over}")
    for sentence in _summary(results):
        output.say(sentence)
    if rates is not None:
        output.say(f"the floor is the time at {rates.read_tb_per_s:.2f} TB/s of reads and {rates.matmul_tflops:.0f} "
                   "TFLOP/s, both measured on this GPU")
    if gpu.is_interpreter:
        output.say(output.INTERPRETER_NOTE)
    output.print_failures(_reasons(results))


def _by_layer(gpu: Gpu, members: Sequence[Any]) -> dict[str, list[Any]]:
    """Group `members` by the title of their table, which names the GPU and the layer of their task."""
    groups: dict[str, list[Any]] = {}
    for member in members:
        groups.setdefault(f"{gpu.name}, {member.task.spec.key()}", []).append(member)
    return groups


def _result_row(result: TaskResult, rates: Rates | None) -> list[str]:
    best, cells = result.best, [batch_text(result.task.batch), str(result.task.page_size)]
    if best is None:
        return [*cells, "none was right and timed", "", "", "", *([] if rates is None else [""])]
    cells += [variant_text(best.variant), milliseconds(best.timing.median_ms), f"{best.speedup:.2f}x"]
    share = _floor_share(result, rates)
    return [*cells, best.verdict.value, *([] if share is None else [f"{share:.0%}"])]


def _summary(results: Sequence[TaskResult]) -> list[str]:
    """Return the sentences about the trials of a run, its time and the stored trials it could not use."""
    wall_s, tried, repeated = (total(results, name) for name in ("seconds", "tried", "repeated"))
    outcomes = sum((result.outcomes for result in results), Counter[str]())
    regimes = dict.fromkeys(str(result.best.timing.regime) for result in results if result.best is not None)
    told = [f"{tried} variants tried and {total(results, 'reused')} stored trials reused ({count_list(outcomes)}) in "
            f"{seconds(wall_s)}, regime {' and '.join(regimes)}"]
    if wall_s:
        twins = f", {repeated} of them with the result of a variant of equal code and launch" if repeated else ""
        told.append(f"measuring or checking took {total(results, 'measuring_seconds') / wall_s:.0%} of the time, and "
                    f"all compile processes were busy for {total(results, 'compiling_seconds') / wall_s:.0%}; "
                    f"{tried / wall_s:.1f} variants a second{twins}")
    if cross_s := total(results, "cross_seconds"):
        crossed = counted(int(total(results, "crossed")), "more trial")
        told.append(f"winners were tried on the other batches: {crossed} in {seconds(cross_s)}")
    outdated = sum((result.outdated for result in results), Counter[str]())
    return told + [f"{counted(count, 'stored trial')} not used: {reason}" for reason, count in outdated.most_common()]


def _reasons(results: Sequence[TaskResult]) -> Counter[Reason]:
    return sum((result.reasons for result in results), Counter[tuple[str, str, str]]())


def _why_nothing(gpu: Gpu, settings: Settings, results: Sequence[TaskResult]) -> str:
    from ..costs import fewest_seconds

    if settings.seconds is None or any(result.outcomes for result in results):
        told = (f"{count} {outcome}{f' at {stage}' if stage else ''}{'' if outcome == 'wrong' else f': {reason}'}"
                for (outcome, stage, reason), count in _reasons(results).most_common())
        return f"no variant was right and timed on {gpu.name}: {'; '.join(told) or 'no trial could be made'}"
    # Too low an estimate may have led here, so at least twice the time given is named.
    needed = max(fewest_seconds([result.task for result in results], gpu, settings.trials), 2 * settings.seconds)
    return (f"the time ran out before any variant was finished on {gpu.name}: {settings.seconds:g} s were given, and "
            f"{len(results)} searches need about {math.ceil(needed)} s")


def _replay(
    name: str, layers: options.Layers, batches: options.Batches, pages: Sequence[str], settings: Settings, as_json: bool
) -> None:
    """Search the recording called `name`, or at that path, and print how far the results are from its optima."""
    from ..recording import Recording
    from ..replay import replay

    begun = time.monotonic()
    specs = layers.specs_or_all()
    recording = Recording.load(name)
    tasks = recorded_tasks(recording, specs, batches, pages)
    title = f"recording {recording.grid} of {recording.gpu.name}, {recording.recorded_at[1][:10]}"
    with output.TuneProgress(recording.gpu, f"replaying {title}: no GPU is used, and nothing is stored") as listener:
        found = replay(recording, tasks, settings, listener)
    if all(each.result.best is None for each in found):
        raise NothingValidError(f"no variant was timed in the {title}")
    if as_json:
        output.print_json({
            "recording": name, "grid": recording.grid, "gpu": recording.gpu, "database": None,
            "settings": replace(settings, regime=recording.regime), "results": list(map(_replayed_document, found)),
        })  # fmt: skip
        return
    print_results(recording.gpu, [each.result for each in found], None)
    output.print_table(
        "as recorded, against the optimum",
        ("batch", "page", "found", "optimum", "slower by", "trials", "within 2 % after", "variants within 2 %"),
        [_replayed_row(recording, each) for each in found])
    if changed := recording.changed_templates():
        output.say(f"recorded with other kernel sources than the present ones: {', '.join(changed)}")
    output.say("the first variants tried were chosen with the shipped recording: on it, reaching the optimum soon says "
               "little about other shapes")
    output.say(f"replayed in {time.monotonic() - begun:.1f} s; the times above were recorded on {recording.gpu.name}. "
               "Nothing is stored")


def recorded_tasks(
    recording: Recording, specs: Sequence[AttentionSpec] | None, batches: options.Batches, page_texts: Sequence[str]
) -> tuple[Task, ...]:
    """Return the recorded tasks that the options name; all without options, and of a suite those that are recorded.

    Raises `InputError` for a layer, batch or page size that is not recorded.
    """
    each_named = request.batches(batches.batch or (), None)
    named, pages = batches.named(), request.page_sizes(page_texts) if page_texts else ()
    found = tuple(
        task for task in recording.tasks
        if (specs is None or task.spec in specs) and (not named or task.batch in named)
        and (not pages or task.page_size in pages)
    )  # fmt: skip
    for batch in each_named:
        if batch not in {task.batch for task in found}:
            raise _not_recorded(f"batch {str(batch)!r}", recording)
    for page in pages:
        if page not in {task.page_size for task in found}:
            raise _not_recorded(f"page size {page}", recording)
    if not found:
        layers = " and ".join(repr(spec.key()) for spec in specs or ())
        raise _not_recorded(f"any batch of suite {batches.suite!r}" if batches.suite else f"layer {layers}", recording)
    return found


def _not_recorded(what: str, recording: Recording) -> InputError:
    known = [f"{batch_text(task.batch)} at pages of {task.page_size}" for task in recording.tasks]
    more = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    layers = " and ".join(dict.fromkeys(task.spec.key() for task in recording.tasks))
    return InputError(f"recording {recording.grid!r} does not hold {what} as asked; it holds layer {layers} on "
                      f"{'; '.join(known[:LISTED])}{more}")


def _replayed_document(each: Replayed) -> dict[str, Any]:
    optimum = each.optimum
    return {
        **result_document(each.result, None),
        "optimum": optimum and {"variant": optimum.variant, "median_ms": optimum.timing.median_ms},
        "loss": each.loss, "trials": len(each.trials), "trials_to_2_percent": each.within(),
    }  # fmt: skip


def _replayed_row(recording: Recording, each: Replayed) -> tuple[str, ...]:
    from ..replay import near

    task, loss, after = each.result.task, each.loss, each.within()
    optimum_ms = each.optimum.timing.median_ms if each.optimum else 0.0
    found = ("nothing", "") if loss is None else (milliseconds(optimum_ms * (1 + loss)), percent(loss))
    share = near(recording, task) / len(recording.variants(task))
    return (batch_text(task.batch), str(task.page_size), found[0], milliseconds(optimum_ms) if each.optimum else "none",
            found[1], str(len(each.trials)), "never" if after is None else f"{after} trials", percent(share))
