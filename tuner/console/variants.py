"""The commands about single variants: generate, check and bench."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ...kernel_templates.batch import BatchBucket
from ...kernel_templates.errors import InputError, NothingValidError, VariantError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import Failed, FullCheck, Timed, Wrong
from ...kernel_templates.registry import why_invalid
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.task import Task
from ...kernel_templates.variant import Variant
from ..measure.jobs import MeasureJob
from . import options, output, request
from .text import batch_text, count_list, counted, milliseconds, variant_text

if TYPE_CHECKING:
    from ...search_spaces.space import Survey
    from ..full_check.checks import Subject

# Time limit of one variant, which may hang; through the interpreter, the largest estimate that is accepted.
LIMIT_S = 300.0
# Variants that generate prints by default: a space holds a hundred thousand.
PRINTED = 20
STORED_FROM = ("exact", "bucket")


@options.command
def generate(
    layers: options.Layers,
    batches: options.Batches,
    page_size: options.PageSizes = None,
    gpu: options.GpuName = None,
    limit: Annotated[int | None, typer.Option(
        parser=options.whole_number, metavar="NUMBER", help="Variants to print for each shape.",
        show_default=str(PRINTED))] = None,
    everything: Annotated[bool, typer.Option("--all", help="Print all variants.")] = False,
    json: options.Json = False,
) -> None:
    """List the valid variants of a batch, and count the rejected ones by reason.

    \b
    Example:
      attention-tuner generate --model llama-3-8b --batch 1x512@16384,63x1@32768 --gpu sm_90 --limit 5
    """
    from ...search_spaces.space import survey

    if everything and limit is not None:
        raise InputError(f"--all and --limit {limit} exclude each other; give one of them")
    most = None if everything else limit or PRINTED
    specs, pages, named = layers.specs(), request.page_sizes(page_size or ()), batches.named()
    on = request.any_gpu(gpu)
    tasks = request.tasks(specs, named or request.default_batches(on), pages)
    surveys = {task: survey(task.spec, BatchBucket.of(task.batch), task.page_size, on) for task in tasks}
    for task, found in surveys.items():
        if not found.valid:
            reasons = ", ".join(f"{count} because {reason}" for reason, count in found.rejected.most_common())
            raise NothingValidError(f"no variant is valid for {task.batch} of {task.spec.key()!r} with pages of "
                                    f"{task.page_size} on {on.name}: rejected were {reasons}")
    if json:
        output.print_json({"gpu": on, "shapes": [{
            **output.encode(task), "valid": len(found.valid), "valid_by_template": _by_template(found),
            "rejected": found.rejected, "variants": found.valid[:most],
        } for task, found in surveys.items()]})  # fmt: skip
        return
    print_surveys(on, surveys, most)


def _by_template(found: Survey) -> Counter[str]:
    return Counter(variant.template for variant in found.valid)


def print_surveys(gpu: Gpu, surveys: Mapping[Task, Survey], limit: int | None) -> None:
    """Write the valid variants on stdout, one key a line, and the counts on stderr."""
    for task, found in surveys.items():
        output.note(f"{task.spec.key()}, {batch_text(task.batch)}, pages of {task.page_size} on {gpu.name}: "
                    f"{len(found.valid)} valid ({count_list(_by_template(found))}), {found.rejected.total()} rejected"
                    + ("" if limit is None or limit >= len(found.valid) else f"; the first {limit} valid ones follow"))
        for reason, count in found.rejected.most_common():
            output.note(f"  {count} rejected because {reason}")
        for variant in found.valid[:limit]:
            output.say(variant.key())


@options.command
def check(
    layers: options.Layers,
    batch: options.OneBatch = None,
    page_size: options.OnePageSize = None,
    variant: options.VariantKey = None,
    full: Annotated[bool, typer.Option(
        "--full", help="Run all cases of the full check instead of one batch, and store the result.")] = False,
    best: Annotated[bool, typer.Option(
        "--best", help="With --full: check the stored best configs that have not passed yet.")] = False,
    gpu: options.GpuName = None,
    seed: options.Seed = 0,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Check a variant against the reference, in a process of its own.

    Ends with status 1 when the result is wrong or the variant cannot run. A passed full check counts for every batch
    that the variant is the best for.

    \b
    Example:
      attention-tuner check --full --best
    """
    if not full:
        if best or db is not None:
            raise InputError(f"{'--best' if best else '--db'} goes with --full only; one batch's check is not stored")
        on, task = _one_task(layers.specs(), batch, page_size, gpu)
        _measure(MeasureJob(task, _chosen(variant, task, on), samples=1, seed=seed), on, timed=False, as_json=json)
        return
    from ..full_check.checks import Subject

    request.refuse_beside("--full --best" if best else "--full", batch=batch, variant=variant if best else None,
                          page_size=page_size if best else None)
    if best:
        specs = layers.specs_or_all() or ()
        on = request.running_gpu(gpu)
        request.require_file(db)
        subjects = None
    else:
        specs = layers.specs()
        on, task = _one_task(specs, None, page_size, gpu)
        subjects = [Subject(task.spec, _chosen(variant, task, on))]
    _check_full(on, specs, subjects, seed, (db, json))


@options.command
def bench(
    layers: options.Layers,
    clock: options.Clock,
    batch: options.OneBatch = None,
    page_size: options.OnePageSize = None,
    variant: options.VariantKey = None,
    stored: Annotated[bool, typer.Option("--stored", help="Time the best variant stored for the batch.")] = False,
    samples: Annotated[int, typer.Option(
        parser=options.whole_number, metavar="NUMBER", help="Samples to take.")] = 20,
    gpu: options.GpuName = None,
    seed: options.Seed = 0,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Check a variant, then time it.

    Ends with status 1 when the result is wrong or the variant cannot run.

    \b
    Example:
      attention-tuner bench --model llama-3-8b --batch 1x512@16384,63x1@32768 --stored
    """
    if stored and variant is not None:
        raise InputError(f"--stored and --variant {variant!r} exclude each other; give one of them")
    on, task = _one_task(layers.specs(), batch, page_size, gpu)
    chosen = _stored(db, task, on) if stored else _chosen(variant, task, on)
    _measure(MeasureJob(task, chosen, samples, seed, clock.regime), on, timed=True, as_json=json)


def _one_task(
    specs: Sequence[AttentionSpec], batch: str | None, page: str | None, gpu: str | None
) -> tuple[Gpu, Task]:
    """Return the GPU and the one task that the options name. Raises `InputError`."""
    if len(specs) > 1:
        keys = " or ".join(repr(layer.key()) for layer in specs)
        raise InputError(f"the model has {len(specs)} kinds of layers; name one of them with --spec {keys}")
    page_size = request.page_size(page)
    named = request.batches([] if batch is None else [batch], None)
    on = request.running_gpu(gpu)
    return on, Task(specs[0], (named or request.default_batches(on))[0], page_size)


def _chosen(key: str | None, task: Task, gpu: Gpu) -> Variant:
    """Return the variant that `key` names, or the default. Raises `VariantError`."""
    from ...kernel_templates.heuristic import default_variant

    if key is not None:
        return request.variant(key, task.spec, task.page_size, gpu)
    default = default_variant(task.spec, task.batch, task.page_size)
    if reason := why_invalid(default, task.spec, gpu):
        raise VariantError(f"the default variant {default.key()!r} cannot run layer {task.spec.key()!r} on {gpu.name}: "
                           f"{reason}; name another with --variant")
    return default


def _stored(db: str | None, task: Task, gpu: Gpu) -> Variant:
    """Return the best variant stored for the task's bucket. Raises `InputError` when there is none."""
    answer = request.load_table(db).lookup(task.spec, task.batch, task.page_size, gpu)
    if answer.source not in STORED_FROM:
        raise InputError(f"nothing is stored for {task.batch} of {task.spec.key()!r} with pages of {task.page_size} on "
                         f"{gpu.name}; tune it first, or leave --stored out to time the default")
    return answer.variant


def _measure(job: MeasureJob, gpu: Gpu, *, timed: bool, as_json: bool) -> None:
    """Run the job, print its outcome, and exit with status 1 unless it is timed."""
    from ..costs import interpreted_seconds
    from ..processes.worker import Worker
    from ..settings import Settings
    from ..tune import refuse

    refuse([job.task], gpu, Settings())
    # The check and the reference take a launch each.
    estimate = (job.samples + 2) * interpreted_seconds(job.task)
    if gpu.is_interpreter and estimate > LIMIT_S:
        raise InputError(f"batch {str(job.task.batch)!r} is too large for Triton's interpreter: it would take about "
                         f"{estimate:.0f} s, and {LIMIT_S:.0f} s are accepted; give a smaller batch or fewer samples")
    with Worker.on(gpu) as worker:
        outcome = worker.run(job, LIMIT_S)
    print_outcome(job.task, gpu, outcome, timed=timed, as_json=as_json)
    if not isinstance(outcome, Timed):
        raise typer.Exit(1)


def print_outcome(task: Task, gpu: Gpu, outcome: Timed | Wrong | Failed, *, timed: bool, as_json: bool) -> None:
    """Write the result of checking a variant and, if `timed`, of timing it."""
    if as_json:
        document = {"gpu": gpu, **output.encode(task), "outcome": type(outcome).__name__.lower(),
                    **output.encode(outcome)}  # fmt: skip
        output.print_json({key: value for key, value in document.items() if timed or key != "time"})
        return
    output.say(outcome.variant.key())
    output.say(f"  for {batch_text(task.batch)} of {task.spec.key()} on {gpu.name}")
    if isinstance(outcome, Failed):
        output.say(f"  failed at {outcome.stage}: {outcome.reason}")
        return
    worst = outcome.check.detail or f"its error is {outcome.check.worst_ratio:.3g} times its tolerance"
    output.say(f"  {'right' if outcome.check.passed else 'wrong'}; the worst row: {worst}")
    if isinstance(outcome, Timed) and timed:
        timing, (lower, upper) = outcome.timing, outcome.timing.quartiles_ms
        output.say(f"  {milliseconds(timing.median_ms)} (quartiles {milliseconds(lower)} and {milliseconds(upper)}, "
                   f"{len(timing.samples_ms)} samples, plan {milliseconds(timing.plan_ms)}), regime {timing.regime}")
        if gpu.is_interpreter:
            output.note(output.INTERPRETER_NOTE)


def _check_full(
    gpu: Gpu, specs: Sequence[AttentionSpec], subjects: Sequence[Subject] | None, seed: int,
    where: tuple[str | None, bool],
) -> None:
    """Run and store full checks, of the stored best configs for None, and exit with status 1 when one failed.

    `where` is the database, and True for JSON.
    """
    from ...kernel_templates.sources import environment
    from ..full_check.cases import refuse_slow
    from ..full_check.checks import run_full_checks, subjects_of

    for subject in subjects or ():
        # Refused before the database is opened, which may create it.
        refuse_slow(subject.spec, subject.variant, gpu)
    checks: list[FullCheck] = []
    with request.open_store(where[0], create=True) as store:
        chosen = subjects_of(store, gpu, environment, specs) if subjects is None else subjects
        for check in run_full_checks(chosen, gpu, environment, seed, _note_full_checks):
            store.put_full_check(check)
            checks.append(check)
        name = store.name
    print_full_checks(name, gpu, checks, as_json=where[1])
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def _note_full_checks(subjects: Sequence[Subject]) -> None:
    first = subjects[0]
    output.note(f"full check of {counted(len(subjects), 'variant')}: {first.spec.key()}, "
                f"pages of {first.variant.page_size}")


def print_full_checks(database: str, gpu: Gpu, checks: Sequence[FullCheck], *, as_json: bool) -> None:
    """Write a table of full checks for each layer, every failure, and the cases that were not run."""
    if as_json:
        output.print_json({"database": database, "gpu": gpu, "checks": [
            {**output.encode(each), "page_size": each.variant.page_size, "passed": each.passed,
             "failed_case": each.failure and each.failure.name} for each in checks]})
        return
    groups: dict[str, list[FullCheck]] = {}
    for each in checks:
        groups.setdefault(f"{gpu.name}, {each.spec.key()}", []).append(each)
    for title, members in groups.items():
        output.print_table(title, ("page", "variant", "result", "cases", "worst ratio", "in case"),
                           map(_full_check_row, members))
    unrun: dict[str, dict[str, None]] = {}
    for each in checks:
        if each.failure is not None:
            output.say(f"{each.variant.key()} failed {each.failure.name!r}: {each.failure.reason}")
        for case in each.cases:
            if case.state == "not run":
                unrun.setdefault(case.reason, {})[case.name] = None
    for reason, names in unrun.items():
        output.say(f"{counted(len(names), 'case')} not run, {reason}: {', '.join(names)}")
    passed = sum(each.passed for each in checks)
    output.say(f"{passed} of {counted(len(checks), 'variant')} passed, stored in {database}" if checks else
               f"every best config in {database} that can be checked here has passed")


def _full_check_row(check: FullCheck) -> tuple[str, ...]:
    result = "passed" if check.passed else "failed"
    if check.passed and check.unrun:
        result += f", {counted(check.unrun, 'case')} not run"
    passed, worst = sum(case.state == "passed" for case in check.cases), check.worst
    return (str(check.variant.page_size), variant_text(check.variant), result,
            f"{passed} of {len(check.cases) - check.unrun}",
            "" if worst is None else f"{worst.worst_ratio:.3g}", "" if worst is None else worst.name)
