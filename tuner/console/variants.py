"""The commands about single variants: generate, check and bench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

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
from . import options, request

# A variant that hangs is given up after this time; through the interpreter, one that is too large.
LIMIT_S = 300.0
# Of a space of a hundred thousand variants, what generate prints where nothing else is asked.
PRINTED = 20
STORED_FROM = ("exact", "bucket")


def generate(
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
    gpu: options.GpuName = None,
    limit: Annotated[int | None, typer.Option(
        parser=options.whole_number, metavar="NUMBER", help="Variants to print for each shape.",
        show_default=str(PRINTED))] = None,
    everything: Annotated[bool, typer.Option("--all", help="Print all variants.")] = False,
    json: options.Json = False,
) -> None:
    """List the valid variants for a batch.

    What was rejected is counted by reason, on stderr.

    \b
    Example:
      attention-tuner generate --model llama-3-8b --batch 1x512@16384,63x1@32768 --gpu sm_90 --limit 5
    """
    from ...search_spaces.space import survey
    from . import documents
    from . import output as report

    if everything and limit is not None:
        raise InputError(f"--all and --limit {limit} exclude each other; give one of them")
    most = None if everything else limit or PRINTED
    specs = request.layers(model, tp, dtype, spec, kv_dtype, q_dtype, tree)
    pages = request.page_sizes(page_size or ())
    named = request.batches(batch or (), suite)
    on = request.machine(gpu)
    tasks = request.tasks(specs, named or request.default_batches(on), pages)
    surveys = {task: survey(task.spec, BatchBucket.of(task.batch), task.page_size, on) for task in tasks}
    for task, found in surveys.items():
        if not found.valid:
            reasons = ", ".join(f"{count} because {reason}" for reason, count in found.rejected.most_common())
            raise NothingValidError(f"no variant is valid for {task.batch} of {task.spec.key()!r} with pages of "
                                    f"{task.page_size} on {on.name}: rejected were {reasons}")
    if json:
        report.print_json({
            "gpu": on.name,
            "shapes": [documents.survey_document(task, found, most) for task, found in surveys.items()],
        })
        return
    report.print_surveys(on, surveys, most)


def check(
    model: options.Model = None,
    tp: options.Tp = 1,
    dtype: options.Dtype = None,
    kv_dtype: options.KvDtype = None,
    q_dtype: options.QDtype = None,
    tree: options.Tree = False,
    spec: options.Spec = None,
    batch: options.OneBatch = None,
    page_size: options.OnePageSize = None,
    variant: options.VariantKey = None,
    full: Annotated[bool, typer.Option(
        "--full", help="All cases of the full check instead of one batch; what comes of them is stored.")] = False,
    best: Annotated[bool, typer.Option(
        "--best", help="With --full: the stored best configs that have not passed it yet.")] = False,
    gpu: options.GpuName = None,
    seed: options.Seed = 0,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Check a variant against the reference.

    It runs in a process of its own. Ends with status 1 when the result is wrong or it cannot run. With --full, its pass
    counts for every batch that it is the best for.

    \b
    Example:
      attention-tuner check --full --best
    """
    from . import output as report

    if full:
        given = [name for name, value in (("--batch", batch), ("--variant", best and variant),
                                          ("--page-size", best and page_size)) if value]
        if given:
            raise InputError(f"{given[0]} does not go with --full{' --best' if best else ''}, which has its own")
        specs = request.layers(model, tp, dtype, spec, kv_dtype, q_dtype, tree) if model or spec or not best else ()
        _check_full(_FullRequest(specs, None if best else (variant, page_size), gpu, seed, db), json)
        return
    if best or db is not None:
        raise InputError(f"{'--best' if best else '--db'} goes with --full only; a check of one batch is not stored")
    on, task = _one_task(request.layers(model, tp, dtype, spec, kv_dtype, q_dtype, tree), batch, page_size, gpu)
    chosen = _chosen(variant, task, on)
    outcome = _measure(MeasureJob(task, chosen, samples=1, seed=seed), on)
    report.print_outcome(task, on, outcome, timed=False, as_json=json)
    if not isinstance(outcome, Timed):
        raise typer.Exit(1)


def bench(
    model: options.Model = None,
    tp: options.Tp = 1,
    dtype: options.Dtype = None,
    kv_dtype: options.KvDtype = None,
    q_dtype: options.QDtype = None,
    tree: options.Tree = False,
    spec: options.Spec = None,
    batch: options.OneBatch = None,
    page_size: options.OnePageSize = None,
    variant: options.VariantKey = None,
    stored: Annotated[bool, typer.Option("--stored", help="The best variant that is stored for the batch.")] = False,
    samples: Annotated[int, typer.Option(
        parser=options.whole_number, metavar="NUMBER", help="Samples to take.")] = 20,
    warm: options.Warm = False,
    eager: options.Eager = False,
    gpu: options.GpuName = None,
    seed: options.Seed = 0,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Check a variant, then time it.

    That is the one given, the best one stored, or the default. Ends with status 1 when the result is wrong or the
    variant cannot run.

    \b
    Example:
      attention-tuner bench --model llama-3-8b --batch 1x512@16384,63x1@32768 --stored
    """
    from . import output as report

    if stored and variant is not None:
        raise InputError(f"--stored and --variant {variant!r} exclude each other; give one of them")
    on, task = _one_task(request.layers(model, tp, dtype, spec, kv_dtype, q_dtype, tree), batch, page_size, gpu)
    chosen = _stored(db, task, on) if stored else _chosen(variant, task, on)
    job = MeasureJob(task, chosen, samples, seed, request.regime(warm, eager))
    outcome = _measure(job, on)
    report.print_outcome(task, on, outcome, timed=True, as_json=json)
    if not isinstance(outcome, Timed):
        raise typer.Exit(1)


def _one_task(
    specs: Sequence[AttentionSpec], batch: str | None, page: str | None, gpu: str | None
) -> tuple[Gpu, Task]:
    """The machine and the one task that the options name. Raises `InputError`."""
    if len(specs) > 1:
        keys = " or ".join(repr(layer.key()) for layer in specs)
        raise InputError(f"the model has {len(specs)} kinds of layers; name one of them with --spec {keys}")
    page_size = request.page_size(page)
    named = request.batches([] if batch is None else [batch], None)
    on = request.runnable(gpu)
    return on, Task(specs[0], (named or request.default_batches(on))[0], page_size)


def _chosen(key: str | None, task: Task, gpu: Gpu) -> Variant:
    """The variant that `key` names, or the default. Raises `VariantError`."""
    from ...kernel_templates.heuristic import default_variant

    if key is None:
        default = default_variant(task.spec, task.batch, task.page_size)
        reason = why_invalid(default, task.spec, gpu)
        if reason:
            raise VariantError(f"the default variant {default.key()!r} cannot run layer {task.spec.key()!r} on "
                               f"{gpu.name}: {reason}; name another with --variant")
        return default
    return request.variant(key, task.spec, task.page_size, gpu)


def _stored(db: str | None, task: Task, gpu: Gpu) -> Variant:
    """The best variant stored for the task's bucket. Raises `InputError` when there is none."""
    from ...db import Store, load_table

    if db is not None:
        # A missing table answers by rule, but a name given here is meant to be there.
        Store.open(db, create=False).close()
    answer = load_table(db).lookup(task.spec, task.batch, task.page_size, gpu)
    if answer.source not in STORED_FROM:
        raise InputError(f"nothing is stored for {task.batch} of {task.spec.key()!r} with pages of {task.page_size} on "
                         f"{gpu.name}; tune it first, or leave --stored out to time the default")
    return answer.variant


@dataclass(frozen=True, slots=True)
class _FullRequest:
    """What `check --full` was asked for: `one` is a variant and a page size, None where the stored best are meant."""

    specs: Sequence[AttentionSpec]
    one: tuple[str | None, str | None] | None
    gpu: str | None
    seed: int
    db: str | None


def _check_full(asked: _FullRequest, as_json: bool) -> None:
    """Run full checks, store what came of each, and show it. Exits with status 1 when a variant failed."""
    from ...db import Store, default_path
    from ...db.engine import sqlite_path
    from ...kernel_templates.sources import environment
    from ..full_check.cases import refuse_slow
    from ..full_check.checks import Subject, run_full_checks, subjects_of
    from . import full_check_report

    if asked.one is not None:
        on, task = _one_task(asked.specs, None, asked.one[1], asked.gpu)
        subjects = [Subject(task.spec, _chosen(asked.one[0], task, on))]
        # Before a database is made.
        refuse_slow(subjects[0].spec, subjects[0].variant, on)
    else:
        on, subjects = request.runnable(asked.gpu), []
    where = default_path() if asked.db is None else asked.db
    if asked.one is None and (path := sqlite_path(where)) is not None and not path.exists():
        raise InputError(f"there is no database {str(path)!r}, so there is no best config to check; tune first")
    checks: list[FullCheck] = []
    with Store.open(where) as store:
        if asked.one is None:
            subjects = subjects_of(store, on, environment, asked.specs)
        for check in run_full_checks(subjects, on, environment, asked.seed, full_check_report.note_full_checks):
            store.put_full_check(check)
            checks.append(check)
        name = store.name
    full_check_report.print_full_checks(name, on, checks, as_json=as_json)
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def _measure(job: MeasureJob, gpu: Gpu) -> Timed | Wrong | Failed:
    from ..costs import interpreted_seconds
    from ..processes.worker import Worker
    from ..tune import refuse_large

    if not gpu.is_interpreter:
        refuse_large([job.task])
    # One launch is checked, and one is for the reference.
    estimate = (job.samples + 2) * interpreted_seconds(job.task)
    if gpu.is_interpreter and estimate > LIMIT_S:
        raise InputError(f"batch {str(job.task.batch)!r} is too large for Triton's interpreter: it would take about "
                         f"{estimate:.0f} s, and {LIMIT_S:.0f} s are accepted; give a smaller batch or fewer samples")
    with Worker.on(gpu) as worker:
        return worker.run(job, LIMIT_S)
