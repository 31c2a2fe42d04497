"""The commands that decide from what is stored: `report portfolio` and `report pages`."""

from __future__ import annotations

from typing import Annotated

import typer

from ...kernel_templates.batch import Batch
from ...kernel_templates.errors import InputError
from . import options, request

# Kernels of a portfolio, the most that the curve goes to, and the loss in per cent that is worth as much as none.
KERNELS = 8
MOST_KERNELS = 16
LIMIT_PERCENT = 2.0
# How much slower than the fastest page size, in per cent, one may be to be recommended.
PAGE_PERCENT = 3.0

app = typer.Typer(
    help="""Say what follows from what is stored: which few kernels suffice, and which page size to serve with.

\b
Example:
  attention-tuner report pages --model llama-3-8b --suite serving
""",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@app.command()
def portfolio(
    model: options.Model = None,
    tp: options.Tp = 1,
    dtype: options.Dtype = None,
    kv_dtype: options.KvDtype = None,
    q_dtype: options.QDtype = None,
    tree: options.Tree = False,
    spec: options.Spec = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Only what is stored for this GPU.")] = None,
    kernels: Annotated[int, typer.Option(
        parser=options.whole_number, metavar="NUMBER", help="Kernels of the portfolio that is shown.")] = KERNELS,
    most: Annotated[int, typer.Option(
        parser=options.whole_number, metavar="NUMBER", help="Kernels that the curve ends with.")] = MOST_KERNELS,
    within: Annotated[float, typer.Option(
        parser=options.percentage, metavar="PERCENT", help="The loss that is accepted on every shape.",
    )] = LIMIT_PERCENT,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Show how few compiled kernels serve all tuned shapes, and what each shape loses.

    Of each layer, page size, GPU and regime. Losses are of stored trials: tune --cross times what won one shape on the
    others. Each shape is also left out, and looked up in a portfolio that was chosen for the others.

    \b
    Example:
      attention-tuner report portfolio --model llama-3-8b --kernels 4
    """
    from ...db import Store, default_path
    from ..portfolio import choose, curve, fewest_kernels, groups, leave_one_out
    from . import portfolio_report

    wanted = request.layers(model, tp, dtype, spec, kv_dtype, q_dtype, tree) if model or spec else None
    with Store.open(default_path() if db is None else db, create=False) as store:
        configs = request.stored(store.best_configs(), wanted, gpu)
        found = [group for group in groups(store, configs) if group.shapes]
        name = store.name
    if not found:
        raise InputError(f"database {name!r} holds no best config of this kind with its trials; tune first")
    findings = [
        portfolio_report.Findings(
            curve(group, most), choose(group, kernels), kernels, within, fewest_kernels(group, within / 100),
            list(leave_one_out(group, kernels)))
        for group in found
    ]
    portfolio_report.print_findings(name, findings, as_json=json)


@app.command()
def pages(
    model: options.Model = None,
    tp: options.Tp = 1,
    dtype: options.Dtype = None,
    kv_dtype: options.KvDtype = None,
    q_dtype: options.QDtype = None,
    tree: options.Tree = False,
    spec: options.Spec = None,
    batch: options.Batches = None,
    suite: options.Suite = None,
    page_size: Annotated[list[str] | None, typer.Option(
        "--page-size", metavar="TOKENS", help="Only these. Can be repeated or joined by commas.",
        show_default="all that are tuned")] = None,
    lengths: Annotated[str | None, typer.Option(
        metavar="TOKENS,...|PATH", help="How long the sequences are that the cache holds, or a file of such numbers.",
        show_default="those of the batches")] = None,
    within: Annotated[float, typer.Option(
        parser=options.percentage, metavar="PERCENT",
        help="How much slower than the fastest the recommended size may be.")] = PAGE_PERCENT,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Only what is stored for this GPU.")] = None,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Compare the page sizes that a model is tuned with, and recommend one.

    A batch counts with the time of all the model's layers. Memory is lost to the last page of each sequence, which is
    not full.

    \b
    Example:
      attention-tuner report pages --model llama-3-8b --suite serving
    """
    from ...db import Store, default_path
    from ..pages import compare, read_lengths
    from . import pages_report

    layers = request.layer_counts(model, request.layers(model, tp, dtype, spec, kv_dtype, q_dtype, tree))
    named = set(request.batches(batch or (), suite))
    sizes = request.page_sizes(page_size) if page_size else ()
    held = () if lengths is None else read_lengths(lengths)
    with Store.open(default_path() if db is None else db, create=False) as store:
        configs = [config for config in request.stored(store.best_configs(), tuple(layers), gpu)
                   if not named or Batch.parse(config.batch) in named]
        name = store.name
    comparisons = compare(configs, layers, sizes, held)
    if not comparisons:
        raise InputError(f"database {name!r} holds no batch of this kind that is tuned with two page sizes; tune it "
                         "with --page-size 16,128 first")
    pages_report.print_comparisons(comparisons, layers, within, as_json=json)
