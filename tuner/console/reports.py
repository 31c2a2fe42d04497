"""The commands that compare stored times: report portfolio and report pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...kernel_templates.batch import Batch
from ...kernel_templates.errors import InputError
from ...kernel_templates.spec import AttentionSpec
from . import options, output, request
from .text import batch_text, counted, milliseconds, percent, size_text, variant_text

if TYPE_CHECKING:
    from ..pages import Comparison
    from ..portfolio import LeftOut, Pick, Portfolio

# Kernels of the portfolio, kernels that the curve ends with, and the accepted loss in per cent.
KERNELS = 8
MOST_KERNELS = 16
LIMIT_PERCENT = 2.0
# Slowdown in per cent against the fastest page size that is accepted.
PAGE_PERCENT = 3.0

PICKS = ("batch", "variant", "time", "loss")


@options.command
def portfolio(
    layers: options.Layers,
    gpu: options.StoredGpu = None,
    kernels: Annotated[int, typer.Option(
        parser=options.whole_number, metavar="NUMBER", help="Kernels of the portfolio that is shown.")] = KERNELS,
    most: Annotated[int, typer.Option(
        parser=options.whole_number, metavar="NUMBER", help="Kernels that the curve ends with.")] = MOST_KERNELS,
    within: Annotated[float, typer.Option(
        parser=options.percentage, metavar="PERCENT", help="Loss that is accepted on every shape.",
    )] = LIMIT_PERCENT,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Show how few compiled kernels serve all tuned shapes, and what each shape loses.

    There is one report for each layer, page size, GPU and regime. Losses are those of stored trials; tune --cross times
    the winner of each shape on the others. Each shape is also left out and looked up in a portfolio of the others.

    \b
    Example:
      attention-tuner report portfolio --model llama-3-8b --kernels 4
    """
    from ..portfolio import choose, curve, fewest_kernels, groups, leave_one_out

    wanted = layers.specs_or_all()
    with request.open_store(db) as store:
        found = [group for group in groups(store, request.stored(store.best_configs(), wanted, gpu)) if group.shapes]
        name = store.name
    if not found:
        raise InputError(f"database {name!r} holds no best config of this kind with its trials; tune first")
    findings = [
        Findings(curve(group, most), choose(group, kernels), kernels, within, fewest_kernels(group, within / 100),
                 list(leave_one_out(group, kernels)))
        for group in found
    ]
    if json:
        output.print_json({"database": name, "groups": list(map(_findings_document, findings))})
    else:
        for each in findings:
            print_findings(each)


@dataclass(frozen=True, slots=True)
class Findings:
    """Results for one group of shapes."""

    curve: Sequence[Portfolio]
    portfolio: Portfolio
    # Kernels that the portfolio may have.
    size: int
    # Accepted loss in per cent, and the fewest kernels that keep it on every shape.
    limit: float
    fewest: int | None
    left_out: Sequence[LeftOut]

    @property
    def judged_losses(self) -> list[float]:
        """Losses of the shapes that were left out, where the answer had been timed."""
        return [each.loss for each in self.left_out if each.loss is not None]


def print_findings(found: Findings) -> None:
    """Write the curve of kernels against loss, the portfolio, and the losses of shapes left out."""
    group = found.portfolio.group
    output.say(f"{group.gpu.name}, {group.spec.key()}, pages of {group.page_size}, regime {group.regime}")
    output.print_table("kernels against loss", ("kernels", "variants", "shapes", "worst loss", "mean loss", "worst on"),
                       map(_curve_row, found.curve))
    output.print_table(f"served by {counted(len(found.portfolio.kernels), 'kernel')}", PICKS,
                       map(pick_row, found.portfolio.picks))
    fewest = "any number of kernels timed there" if found.fewest is None else counted(found.fewest, "kernel")
    output.say(f"of {counted(len(group.shapes), 'shape')} none loses more than {found.limit:.3g} % with {fewest}")
    if group.incomparable:
        output.say(f"{counted(group.incomparable, 'best config')} left out: the variant cannot run any more, or has no "
                   "trial of the latest environment; tune again")
    if found.judged_losses:
        output.say(_left_out_sentence(found))
    elif found.left_out:
        output.say("no shape could be judged by leaving it out: no answer had been timed there; tune with --cross")


def _left_out_sentence(found: Findings) -> str:
    losses = found.judged_losses
    worst = max(found.left_out, key=lambda each: each.loss or 0.0)
    by_rule = sum(each.source == "heuristic" for each in found.left_out)
    return (f"each shape left out and looked up in a portfolio of at most {counted(found.size, 'kernel')} for the "
            f"others: median loss {percent(statistics.median(losses))}, worst {percent(max(losses))} on "
            f"{batch_text(worst.shape.batch)}; {len(losses)} of {counted(len(found.left_out), 'answer')} had been "
            f"timed there, {by_rule} came from the heuristic")


def _curve_row(portfolio: Portfolio) -> tuple[str, ...]:
    worst = max(portfolio.picks, key=lambda pick: (pick.loss is None, pick.loss))
    return (str(len(portfolio.kernels)), str(portfolio.num_variants), str(len(portfolio.losses)),
            percent(portfolio.worst), percent(portfolio.mean), "" if worst.loss == 0 else batch_text(worst.shape.batch))


def pick_row(pick: Pick) -> tuple[str, ...]:
    """Return the row of a table for what serves a shape."""
    batch = batch_text(pick.shape.batch)
    if pick.variant is None:
        return batch, "none of them was timed here", "", percent(None)
    ms = pick.shape.timed[pick.variant].timing.median_ms
    return batch, variant_text(pick.variant), milliseconds(ms), percent(pick.loss)


def _findings_document(found: Findings) -> dict[str, Any]:
    group, losses = found.portfolio.group, found.judged_losses
    return {
        "gpu": group.gpu, "regime": group.regime, "shapes": len(group.shapes), "incomparable": group.incomparable,
        "curve": list(map(_sizes, found.curve)), "limit": found.limit / 100, "fewest_kernels": found.fewest,
        "portfolio": portfolio_document(found.portfolio),
        "left_out": {
            "judged": len(losses),
            "median_loss": statistics.median(losses) if losses else None,
            "worst_loss": max(losses, default=None),
            "answers": [{"batch": each.shape.batch, "variant": each.variant, "source": each.source, "loss": each.loss}
                        for each in found.left_out],
        },
    }  # fmt: skip


def portfolio_document(portfolio: Portfolio) -> dict[str, Any]:
    """Return the JSON object of a portfolio: its kernels, and what serves each shape."""
    return {
        "spec": portfolio.group.spec, "page_size": portfolio.group.page_size, **_sizes(portfolio),
        "names": portfolio.kernels,
        "picks": [{
            "batch": pick.shape.batch, "variant": pick.variant, "best": pick.shape.best.variant, "loss": pick.loss,
            "median_ms": pick.variant and pick.shape.timed[pick.variant].timing.median_ms,
        } for pick in portfolio.picks],
    }  # fmt: skip


def _sizes(portfolio: Portfolio) -> dict[str, Any]:
    return {"kernels": len(portfolio.kernels), "variants": portfolio.num_variants, "shapes": len(portfolio.losses),
            "worst_loss": portfolio.worst, "mean_loss": portfolio.mean}


@options.command
def pages(
    layers: options.Layers,
    batches: options.Batches,
    page_size: Annotated[list[str] | None, typer.Option(
        "--page-size", metavar="TOKENS", help="Page sizes to compare. Repeat it or join values by commas.",
        show_default="all that are tuned")] = None,
    lengths: Annotated[str | None, typer.Option(
        metavar="TOKENS,...|PATH", help="Lengths of the sequences in the cache, or a file of them.",
        show_default="those of the batches")] = None,
    within: Annotated[float, typer.Option(
        parser=options.percentage, metavar="PERCENT",
        help="Slowdown against the fastest size that the recommended one may have.")] = PAGE_PERCENT,
    gpu: options.StoredGpu = None,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Compare the page sizes that a model is tuned with, and recommend one.

    A batch counts with the time of all layers of the model. A page size loses memory to the last page of each sequence,
    which is not full.

    \b
    Example:
      attention-tuner report pages --model llama-3-8b --suite serving
    """
    from ..pages import compare, read_lengths, token_bytes

    counts, named = layers.counts(), set(batches.named())
    sizes = request.page_sizes(page_size) if page_size else ()
    held = () if lengths is None else read_lengths(lengths)
    with request.open_store(db) as store:
        configs = [config for config in request.stored(store.best_configs(), tuple(counts), gpu)
                   if not named or Batch.parse(config.batch) in named]
        name = store.name
    comparisons = compare(configs, counts, sizes, held)
    if not comparisons:
        raise InputError(f"database {name!r} holds no batch of this kind that is tuned with two page sizes; tune it "
                         "with --page-size 16,128 first")
    if json:
        output.print_json({"layers": counts, "token_bytes": token_bytes(counts), "within": within / 100,
                           "comparisons": [_comparison_document(each, within) for each in comparisons]})
    else:
        for each in comparisons:
            print_comparison(each, counts, within)


def print_comparison(comparison: Comparison, layers: Mapping[AttentionSpec, int], within: float) -> None:
    """Write what every page size costs on a GPU, and the size that is recommended."""
    from ..pages import token_bytes

    names = " and ".join(f"{counted(count, 'layer')} of {spec.key()}" for spec, count in layers.items())
    output.say(f"{comparison.gpu.name}, regime {comparison.regime}: {names}, {size_text(token_bytes(layers))} a token")
    output.print_table(
        f"page sizes over {counted(len(comparison.batches), 'batch')}",
        ("page", "mean of the batches", "sum", "slower by", "memory lost", "of the cache"),
        [(str(one.page_size), milliseconds(one.mean_ms), milliseconds(one.sum_ms), percent(comparison.slowdown(one)),
          size_text(one.lost_bytes), f"{one.lost_share:.2%}") for one in comparison.sizes])
    for batch, missing in comparison.left_out.items():
        output.say(f"{batch_text(batch)} is left out: not tuned with pages of {' and '.join(map(str, missing))}")
    if comparison.is_mixed:
        output.say("Triton, torch or the driver differ between these measurements; verify --retune renews them")
    output.say(f"recommended are pages of {comparison.recommended(within).page_size}: they lose the least memory of "
               f"the sizes at most {within:g} % slower than the fastest in the geometric mean")


def _comparison_document(comparison: Comparison, within: float) -> dict[str, Any]:
    return {
        "gpu": comparison.gpu, "regime": comparison.regime, "batches": comparison.batches,
        "left_out": comparison.left_out, "mixed_versions": comparison.is_mixed,
        "recommended": comparison.recommended(within).page_size,
        "pages": [{
            "page_size": one.page_size, "times_ms": one.times_ms, "geometric_mean_ms": one.mean_ms,
            "sum_ms": one.sum_ms, "slowdown": comparison.slowdown(one), "held_bytes": one.held_bytes,
            "lost_bytes": one.lost_bytes, "lost_share": one.lost_share,
        } for one in comparison.sizes],
    }  # fmt: skip
