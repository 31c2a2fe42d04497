"""The options that several commands share, each declared once."""

from __future__ import annotations

import math
import os
from typing import Annotated

import typer

from ...kernel_templates.spec import DTYPES
from .request import INTERPRETER_WORD, KV_DTYPES

MAX_SEED = 2**32 - 1


def whole_number(text: str) -> int:
    """The number from 1 that `text` is. Raises `typer.BadParameter`."""
    if _is_decimal(text) and 1 <= int(text) <= MAX_SEED:
        return int(text)
    raise typer.BadParameter(f"{text!r} cannot be used; accepted is a whole number from 1 to {MAX_SEED}")


def seed_number(text: str) -> int:
    """The seed that `text` is. Raises `typer.BadParameter`."""
    if _is_decimal(text) and int(text) <= MAX_SEED:
        return int(text)
    raise typer.BadParameter(f"{text!r} cannot be used; accepted is a whole number from 0 to {MAX_SEED}")


def positive_seconds(text: str) -> float:
    """The time in seconds that `text` is. Raises `typer.BadParameter`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isfinite(seconds) and seconds > 0:
        return seconds
    raise typer.BadParameter(f"{text!r} cannot be used; accepted is a positive number of seconds")


def percentage(text: str) -> float:
    """The share in per cent that `text` is. Raises `typer.BadParameter`."""
    try:
        percent = float(str(text).removesuffix("%"))
    except ValueError:
        percent = math.nan
    if 0 <= percent <= 100:
        return percent
    raise typer.BadParameter(f"{text!r} cannot be used; accepted is a number of per cent from 0 to 100")


def database(text: str) -> str:
    """The path or URL of a database that `text` is. Raises `typer.BadParameter` for a folder."""
    if os.path.isdir(os.path.expanduser(text)):
        raise typer.BadParameter(f"{text!r} is a folder; accepted is the path of a database in it, or a URL")
    return text


Model = Annotated[str | None, typer.Option(
    metavar="NAME|PATH", help="A preset such as llama-3-8b, or the path of a Hugging Face config.json.")]
Spec = Annotated[str | None, typer.Option(
    metavar="KEY", help="One attention layer instead of a model's, such as "
                        "num_q_heads=8,num_kv_heads=1,head_dim=128.")]
Tp = Annotated[int, typer.Option(
    parser=whole_number, metavar="GPUS", help="GPUs that the model's heads are divided among.")]
Dtype = Annotated[str | None, typer.Option(
    metavar="|".join(DTYPES), help="Replaces the model's own.", show_default="the model's")]
KvDtype = Annotated[str | None, typer.Option(
    "--kv-dtype", metavar="|".join(KV_DTYPES), help="What the KV cache of a model holds.",
    show_default="what its checkpoint was quantized for, or else the dtype")]
QDtype = Annotated[str | None, typer.Option(
    "--q-dtype", metavar="|".join(KV_DTYPES), help="What the queries are in, beside a cache in 8 bits.",
    show_default="auto, which is the dtype")]
Tree = Annotated[bool, typer.Option(
    "--tree", help="Query tokens of a model's layers are trees of speculative tokens, with a mask among them.")]
Batches = Annotated[list[str] | None, typer.Option(
    "--batch", metavar="COUNTxQUERY@CONTEXT,...",
    help="Sequences of one launch, such as 1x512@16384,63x1@32768. Can be repeated.")]
OneBatch = Annotated[str | None, typer.Option(
    "--batch", metavar="COUNTxQUERY@CONTEXT,...", help="Sequences of one launch, such as 1x512@16384,63x1@32768.")]
Suite = Annotated[str | None, typer.Option(
    metavar="NAME|PATH", help="A named list of batches, such as serving or hybrid, or the path of one.")]
PageSizes = Annotated[list[str] | None, typer.Option(
    "--page-size", metavar="TOKENS", help="Tokens per KV page, a multiple of 16. Can be repeated or joined by commas.",
    show_default="16")]
OnePageSize = Annotated[str | None, typer.Option(
    "--page-size", metavar="TOKENS", help="Tokens per KV page, a multiple of 16.", show_default="16")]
GpuName = Annotated[str | None, typer.Option(
    "--gpu", metavar="NAME", help=f"A GPU's name, a target such as sm_90, or {INTERPRETER_WORD}.",
    show_default="the one present")]
VariantKey = Annotated[str | None, typer.Option(
    "--variant", metavar="KEY", help="A variant as generate prints it.", show_default="the default variant")]
Database = Annotated[str | None, typer.Option(
    "--db", parser=database, metavar="PATH|URL", help="The database.", show_default="in the user's data folder")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
Seed = Annotated[int, typer.Option(
    parser=seed_number, metavar="NUMBER", help="Makes the search and the inputs repeatable.")]
Warm = Annotated[bool, typer.Option(
    "--warm", help="Time over one set of tensors, which stays in L2, not over sets that have left it. On a GPU only.")]
Eager = Annotated[bool, typer.Option(
    "--eager", help="Time launches one by one, not in a CUDA graph with its padded grid. On a GPU only.")]


def _is_decimal(text: str) -> bool:
    # The length is bounded before Python, which refuses thousands of digits with an error of its own, reads them.
    return str(text).isdecimal() and len(str(text)) <= len(str(MAX_SEED))
