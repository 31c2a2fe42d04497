"""The commands about the database: show, lookup, export and import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ...kernel_templates.errors import InputError
from ...kernel_templates.outcome import BestConfig
from . import options, output, request
from .reports import PICKS, pick_row, portfolio_document
from .text import batch_text, count_list, counted, milliseconds, percent, variant_text

if TYPE_CHECKING:
    from ...db.answer import Answer
    from ...db.lookup.merge import Choice
    from ..portfolio import Portfolio

# Dropped configs that are named one by one.
DROPPED = 10


@options.command
def show(
    layers: options.Layers,
    gpu: options.StoredGpu = None,
    failures: Annotated[bool, typer.Option("--failures", help="Also count why trials failed.")] = False,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Show the stored best configs, and the number of trials by outcome.

    \b
    Example:
      attention-tuner show --model llama-3-8b --failures
    """
    wanted = layers.specs_or_all()
    with request.open_store(db) as store:
        configs = request.stored(store.best_configs(), wanted, gpu)
        counts = store.trial_counts()
        reasons = store.failure_counts() if failures else Counter[tuple[str, str, str]]()
        name = store.name
    if json:
        told = {"failures": output.encode_reasons(reasons)} if failures else {}
        output.print_json({"database": name, "trials": counts, **told, "configs": configs})
        return
    print_configs(configs)
    output.say(f"{name}: {counts.total()} trials" + (f" ({count_list(counts)})" if counts else ""))
    output.print_failures(reasons)


def print_configs(configs: Sequence[BestConfig]) -> None:
    """Write a table of best configs for each GPU, layer and regime."""
    groups: dict[str, list[BestConfig]] = {}
    for each in configs:
        title = f"{each.gpu.name}, {each.shape.spec.key()}, regime {each.timing.regime}"
        groups.setdefault(title, []).append(each)
    for title, members in groups.items():
        output.print_table(title, ("batch", "page", "best variant", "time", "speed-up", "verdict", "check"), [(
            batch_text(each.batch), str(each.variant.page_size), variant_text(each.variant),
            milliseconds(each.timing.median_ms), f"{each.speedup:.2f}x", each.verdict.value,
            "full" if each.full_check else "quick",
        ) for each in members])  # fmt: skip


@options.command
def lookup(
    layers: options.Layers,
    batches: options.Batches,
    page_size: options.OnePageSize = None,
    gpu: options.GpuName = None,
    configs: Annotated[list[str] | None, typer.Option(
        "--configs", metavar="PATH", help="An export to answer from, after the database and before the shipped "
                                          "configs. Can be repeated.")] = None,
    like: Annotated[list[str] | None, typer.Option(
        "--like", metavar="NAME", help="A GPU of the same architecture whose configs may answer too. "
                                       "Can be repeated.")] = None,
    worst: Annotated[str, typer.Option(
        "--worst", metavar="exact|bucket|neighbour|heuristic",
        help="The worst source that may answer.")] = "heuristic",
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Print the variant to run for a batch, and the source of the answer.

    The source is exact (tuned on this batch), bucket (tuned on a batch of the same bucket), neighbour (tuned on the
    nearest bucket) or heuristic (nothing tuned fits).

    \b
    Example:
      attention-tuner lookup --model llama-3-8b --batch 1x512@16384,63x1@32768 --page-size 16
    """
    from ...db.answer import Chain

    # The record refuses a name that is no source.
    chain = Chain(cast("Any", worst), tuple(like or ()))
    specs, asked = layers.specs(), batches.named()
    if not asked:
        raise InputError("lookup needs a batch, such as --batch 1x512@16384,63x1@32768, or a --suite")
    page = request.page_size(page_size)
    table = request.load_table(db, configs or (), chain)
    on = request.any_gpu(gpu, [config.gpu for config in table.configs])
    answers = [(layer, each, table.lookup(layer, each, page, on)) for layer in specs for each in asked]
    if json:
        output.print_json({"gpu": on, "table": table.id, "answers": [{
            "spec": layer, "batch": each, "page_size": page, "template": answer.variant.template,
            "values": answer.variant.as_dict(), **output.encode(answer),
        } for layer, each, answer in answers]})  # fmt: skip
        return
    for layer, each, answer in answers:
        output.say(answer.variant.key())
        output.say(f"  for {batch_text(each)} of {layer.key()} on {on.name}")
        output.say(f"  source {answer.source}: {origin_text(answer)}")


def origin_text(answer: Answer) -> str:
    """Return whose config answered, and its times."""
    config = answer.config
    if config is None:
        return "nothing tuned fits, so the values are chosen by rule"
    whose = {"database": "in your database", "file": "in a file"}.get(answer.origin or "", "shipped")
    on = "" if answer.lender is None else f" on {answer.lender}"
    text = (f"{whose}, tuned{on} on {batch_text(config.batch)}, {milliseconds(config.timing.median_ms)} there, "
            f"{config.speedup:.2f}x over the default, regime {config.timing.regime}")
    if answer.loss:
        text += f"; such answers lose {percent(answer.loss)} in the median"
    return text + ("; stale: measured with another kernel source, Triton or driver" if answer.stale else "")


@options.command
def export(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to write; the folder for --format folder.")],
    gpu: options.StoredGpu = None,
    form: Annotated[str, typer.Option(
        "--format", metavar="json|folder",
        help="json: one file; folder: a JSON file for each layer, page size and GPU, as vLLM has them.")] = "json",
    merge: Annotated[bool, typer.Option(
        "--merge", help="Keep configs in FILE that the database has nothing better for.")] = False,
    provisional: Annotated[bool, typer.Option(
        "--provisional", help="Also export configs that have not passed the full check.")] = False,
    portfolio: Annotated[int | None, typer.Option(
        "--portfolio", parser=options.whole_number, metavar="NUMBER",
        help="Use at most this many compiled kernels for each layer and page size; see report portfolio.",
        show_default="the best variant of each shape")] = None,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Write the best configs that have passed the full check to a file or folder.

    FILE is replaced unless --merge is given; in a folder, files of other layers, page sizes and GPUs stay.

    \b
    Example:
      attention-tuner export llama-3-8b.json
    """
    from ...db import Exported, read_configs, write_configs
    from ...db.lookup.export import require_format
    from ...db.lookup.merge import Merge, merge_configs
    from ..portfolio import portfolios_of, served_configs

    require_format(form)
    if merge and portfolio is not None:
        raise InputError(f"--portfolio {portfolio} does not go with --merge: the configs in FILE would add kernels")
    before = read_configs(file) if merge and Path(file).expanduser().exists() else Exported([])
    with request.open_store(db) as store:
        found = request.stored(store.best_configs(), gpu=gpu)
        held = store.checked(before.configs)
        losses = store.losses()
        portfolios = [] if portfolio is None else portfolios_of(store, found, portfolio, checked=not provisional)
        if portfolio is not None:
            found = served_configs(store, portfolios)
        name = store.name
    configs = _exportable(found, name, file, gpu, provisional)
    left_out = len(found) - len(configs)
    result = merge_configs(configs, held) if merge else Merge(configs, [])
    if not (written := result.configs):
        raise InputError(f"no config of database {name!r} and of {file!r} can run any more, so {file!r} was not "
                         "written; tune first")
    write_configs(Exported(written, losses or before.losses), file, form)
    kept = len(set(written) - set(configs))
    quick = sum(not config.full_check for config in written)
    if json:
        output.print_json({"file": file, "configs": len(written), "kept": kept, "provisional": quick,
                           "left_out": left_out, "dropped": list(map(_dropped_document, result.choices)),
                           **_portfolios_document(portfolios)})
        return
    output.say(f"{len(written)} configs written to {file}" + (f", {kept} of them kept from before" if kept else ""))
    _note_dropped(result.choices)
    _print_portfolios(portfolios)
    _note_provisional(left_out, quick)


def _note_provisional(left_out: int, written: int) -> None:
    """Write on stderr how many provisional configs were left out of an export, and how many it holds."""
    if left_out:
        output.note(f"{left_out} provisional configs, which have passed only the quick check, were left out; run check "
                    "--full --best, or add them with --provisional")
    if written:
        output.note(f"{written} of the configs are provisional: they have passed only the quick check")


def _exportable(
    found: Sequence[BestConfig], database: str, file: str, gpu: str | None, provisional: bool
) -> list[BestConfig]:
    """Return the configs that may be exported. Raises `InputError` where there is none."""
    if not found:
        of = "" if gpu is None else f" of GPU {gpu!r}"
        raise InputError(f"database {database!r} holds no best config{of}, so {file!r} was not written; tune first")
    configs = [config for config in found if provisional or config.full_check]
    if not configs:
        raise InputError(f"none of the {len(found)} best configs of database {database!r} has passed the full check, "
                         f"so {file!r} was not written; run check --full --best, or add them with --provisional")
    return configs


def _portfolios_document(portfolios: Sequence[Portfolio]) -> dict[str, Any]:
    return {"portfolios": list(map(portfolio_document, portfolios))} if portfolios else {}


def _print_portfolios(portfolios: Sequence[Portfolio]) -> None:
    for each in portfolios:
        output.print_table(f"{each.group.gpu.name}, {each.group.spec.key()}, pages of {each.group.page_size}", PICKS,
                           map(pick_row, each.picks))
        output.say(f"{counted(len(each.kernels), 'kernel')} for {counted(len(each.losses), 'shape')}, worst loss "
                   f"{percent(max(each.losses, default=None))}, mean {percent(each.mean)}")


@options.command
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="An export in any format, or another database.")],
    merge: Annotated[bool, typer.Option(
        "--merge", help="Keep configs in the database that FILE has nothing better for.")] = False,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Store the best configs of an export, or of another database.

    A config replaces the stored one of its layer, batch, page size, GPU and regime; with --merge, only a worse one.

    \b
    Example:
      attention-tuner import llama-3-8b.json
    """
    from ...db import Exported, read_configs
    from ...db.engine import is_database
    from ...db.lookup.merge import import_configs

    if is_database(file):
        with request.open_store(file) as other:
            found = Exported(other.best_configs(), other.losses())
    else:
        found = read_configs(file)
    with request.open_store(db, create=True) as store:
        result = import_configs(store, found.configs, found.losses, keep_better=merge)
        name = store.name
    if json:
        dropped = list(map(_dropped_document, result.choices))
        output.print_json({"database": name, "configs": len(result.configs), "dropped": dropped})
        return
    output.say(f"{len(result.configs)} configs of {file} stored in {name}")
    _note_dropped(result.choices)


def _note_dropped(choices: Sequence[Choice]) -> None:
    """Write on stderr which configs a merge did not keep, and why: the first ones one by one."""
    for choice in choices[:DROPPED]:
        config = choice.dropped
        kept = "" if choice.kept is None else f" behind {choice.kept.variant.key()}"
        output.note(f"for {batch_text(config.batch)} at pages of {config.variant.page_size} on {config.gpu.name}, "
                    f"{config.variant.key()} was not kept{kept}: {choice.reason}")
    if len(choices) > DROPPED:
        output.note(f"and {len(choices) - DROPPED} more, which --json lists")


def _dropped_document(choice: Choice) -> dict[str, Any]:
    config = choice.dropped
    return {"spec": config.shape.spec, "batch": config.batch, "page_size": config.variant.page_size, "gpu": config.gpu,
            "variant": config.variant, "kept": choice.kept and choice.kept.variant, "reason": choice.reason}
