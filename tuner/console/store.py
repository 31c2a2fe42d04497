"""The commands about what is stored: show, lookup, export and import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...kernel_templates.errors import InputError
from . import options, request


def show(
    model: options.Model = None,
    tp: options.Tp = 1,
    dtype: options.Dtype = None,
    kv_dtype: options.KvDtype = None,
    q_dtype: options.QDtype = None,
    tree: options.Tree = False,
    spec: options.Spec = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Only what is stored for this GPU.")] = None,
    failures: Annotated[bool, typer.Option("--failures", help="Also why trials failed, with counts.")] = False,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Show the stored best configs.

    And how many trials of which outcome the database holds.

    \b
    Example:
      attention-tuner show --model llama-3-8b --failures
    """
    from ...db import Store, default_path
    from . import documents
    from . import output as report

    wanted = request.layers(model, tp, dtype, spec, kv_dtype, q_dtype, tree) if model or spec else None
    with Store.open(default_path() if db is None else db, create=False) as store:
        configs = request.stored(store.best_configs(), wanted, gpu)
        counts = store.trial_counts()
        reasons = store.failure_counts() if failures else None
        name = store.name
    if json:
        report.print_json({
            "database": name,
            "trials": dict(counts),
            **({} if reasons is None else {"failures": documents.failures_document(reasons)}),
            "configs": [documents.config_document(config) for config in configs],
        })
        return
    report.print_configs(configs)
    report.print_trials(name, counts, reasons)


def lookup(
    model: options.Model = None,
    tp: options.Tp = 1,
    dtype: options.Dtype = None,
    kv_dtype: options.KvDtype = None,
    q_dtype: options.QDtype = None,
    tree: options.Tree = False,
    spec: options.Spec = None,
    batch: options.Batches = None,
    suite: options.Suite = None,
    page_size: options.OnePageSize = None,
    gpu: options.GpuName = None,
    configs: Annotated[list[str] | None, typer.Option(
        "--configs", metavar="PATH", help="An export to answer from too, behind the database and before what ships. "
                                          "Can be repeated.")] = None,
    like: Annotated[list[str] | None, typer.Option(
        "--like", metavar="NAME", help="Another GPU of the same architecture whose configs may answer where this one "
                                       "has none. Can be repeated.")] = None,
    worst: Annotated[str, typer.Option(
        "--worst", metavar="exact|bucket|neighbour|heuristic",
        help="Fail where only a worse source could answer.")] = "heuristic",
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Say which variant to run for a batch.

    That is the nearest tuned config that is valid here, of the database or of those that ship, and the answer says how
    near: exact (tuned on this batch), bucket (on one like it) or neighbour (on the nearest bucket, unless that leaves
    keys whole); or heuristic, where nothing tuned fits.

    \b
    Example:
      attention-tuner lookup --model llama-3-8b --batch 1x512@16384,63x1@32768 --page-size 16
    """
    from ...db import Store, load_table
    from . import documents
    from . import output as report

    chain = request.chain(worst, like or ())
    specs = request.layers(model, tp, dtype, spec, kv_dtype, q_dtype, tree)
    asked = request.batches(batch or (), suite)
    if not asked:
        raise InputError("lookup needs a batch, such as --batch 1x512@16384,63x1@32768, or a --suite")
    page = request.page_size(page_size)
    if db is not None:
        # A table without the database is no error in an engine, but a name given here is meant to be there.
        Store.open(db, create=False).close()
    table = load_table(db, files=configs or (), chain=chain)
    on = request.machine(gpu, [config.gpu for config in table.configs])
    answers = [(layer, each, table.lookup(layer, each, page, on)) for layer in specs for each in asked]
    if json:
        report.print_json({
            "gpu": on.name,
            "table": table.id,
            "answers": [documents.answer_document(*answer) for answer in answers],
        })
        return
    report.print_answers(on, answers)


def export(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file, or for --format folder the folder, to write.")],
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Only what is stored for this GPU.")] = None,
    form: Annotated[str, typer.Option(
        "--format", metavar="json|folder",
        help="json: one file; folder: a JSON file for each layer, page size and GPU, as vLLM has them.")] = "json",
    merge: Annotated[bool, typer.Option(
        "--merge", help="Keep what FILE holds where the database has nothing better, say why, and leave out what "
                        "cannot run any more.")] = False,
    provisional: Annotated[bool, typer.Option(
        "--provisional", help="Also configs that have not passed the full check.")] = False,
    portfolio: Annotated[int | None, typer.Option(
        "--portfolio", parser=options.whole_number, metavar="NUMBER",
        help="Only so many compiled kernels for each layer and page size: those with which the tuned shapes lose "
             "least, as report portfolio shows.", show_default="the best of each shape")] = None,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Write the best configs that have passed the full check to a file, or a folder of files.

    FILE is replaced, unless --merge is given; in a folder, files of other layers, page sizes and GPUs stay.

    \b
    Example:
      attention-tuner export llama-3-8b.json
    """
    from ...db import Exported, Store, default_path, read_configs, write_configs
    from ...db.lookup.export import require_format
    from ...db.lookup.merge import Merge, merge_configs
    from ..portfolio import portfolios_of, served_configs
    from . import documents, portfolio_report
    from . import output as report

    require_format(form)
    if merge and portfolio is not None:
        raise InputError(f"--portfolio {portfolio} does not go with --merge: what FILE holds would add kernels to it")
    before = read_configs(file) if merge and Path(file).expanduser().exists() else Exported([])
    with Store.open(default_path() if db is None else db, create=False) as store:
        found = request.stored(store.best_configs(), gpu=gpu)
        held = store.checked(before.configs)
        losses = store.losses()
        portfolios = [] if portfolio is None else portfolios_of(store, found, portfolio, checked=not provisional)
        if portfolio is not None:
            found = served_configs(store, portfolios)
        name = store.name
    if not found:
        of = "" if gpu is None else f" of GPU {gpu!r}"
        raise InputError(f"database {name!r} holds no best config{of}, so {file!r} was not written; tune first")
    configs = [config for config in found if provisional or config.full_check]
    left_out = len(found) - len(configs)
    if not configs:
        raise InputError(f"none of the {left_out} best configs of database {name!r} has passed the full check, so "
                         f"{file!r} was not written; run check --full --best, or add them with --provisional")
    result = merge_configs(configs, held) if merge else Merge(configs, [])
    written = result.configs
    if not written:
        raise InputError(f"no config of database {name!r} and of {file!r} can run any more, so {file!r} was not "
                         "written; tune first")
    write_configs(Exported(written, losses or before.losses), file, form)
    kept = len(set(written) - set(configs))
    quick = sum(not config.full_check for config in written)
    if json:
        report.print_json({"file": file, "configs": len(written), "kept": kept, "provisional": quick,
                           "left_out": left_out, **documents.choices_document(result.choices),
                           **portfolio_report.portfolios_document(portfolios)})
        return
    report.say(f"{len(written)} configs written to {file}" + (f", {kept} of which it held before" if kept else ""))
    report.note_choices(result.choices)
    portfolio_report.print_portfolios(portfolios)
    if left_out:
        report.note(f"{left_out} provisional configs, which have passed the quick check only, were left out; run check "
                    "--full --best, or add them with --provisional")
    if quick:
        report.note(f"{quick} of them have passed the quick check only, and say so")


def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="What export wrote, or another database.")],
    merge: Annotated[bool, typer.Option(
        "--merge", help="Keep what the database holds where FILE has nothing better, and say why.")] = False,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Store the best configs of a file or folder that export wrote, in any of its formats, or of another database.

    Each takes the place of one for the same layer, batch, page size, GPU and regime, with --merge only of a worse one.

    \b
    Example:
      attention-tuner import llama-3-8b.json
    """
    from ...db import Exported, Store, default_path, read_configs
    from ...db.engine import is_database
    from ...db.lookup.merge import Merge, merge_configs
    from . import documents
    from . import output as report

    if is_database(file):
        with Store.open(file, create=False) as other:
            found = Exported(other.best_configs(), other.losses())
    else:
        found = read_configs(file)
    with Store.open(default_path() if db is None else db) as store:
        held = store.best_configs() if merge else []
        result = merge_configs(held, found.configs) if merge else Merge(found.configs, [])
        configs = [config for config in result.configs if config not in held]
        store.put_best(*configs)
        known = {loss.gpu_name for loss in store.losses()}
        for gpu_name in {loss.gpu_name for loss in found.losses} - known:
            store.put_losses(gpu_name, [loss for loss in found.losses if loss.gpu_name == gpu_name])
        name = store.name
    if json:
        report.print_json({"database": name, "configs": len(configs), **documents.choices_document(result.choices)})
        return
    report.say(f"{len(configs)} configs of {file} stored in {name}")
    report.note_choices(result.choices)
