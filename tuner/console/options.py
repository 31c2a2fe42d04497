"""Options shared by the commands, each declared once, and groups of them that a command takes as one argument."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ...kernel_templates.errors import InputError
from ...kernel_templates.outcome import Regime
from ...kernel_templates.spec import DTYPES, AttentionSpec
from . import request

if TYPE_CHECKING:
    from ...kernel_templates.batch import Batch
    from ...kernel_templates.gpu import Gpu
    from ..settings import Settings

MAX_NUMBER = 2**32 - 1
TRIALS = 30
TRIALS_WITHOUT_GPU = 12
SECONDS_WITHOUT_GPU = 120.0


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make `function` a command for typer: each parameter that is a group below becomes the options of the group."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        group = groups.get(parameter.name)
        members = () if group is None else inspect.signature(group, eval_str=True).parameters.values()
        parameters += members or (parameter.replace(annotation=hints[parameter.name]),)

    @functools.wraps(function)
    def _run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        function(**given)

    keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    _run.__signature__ = inspect.Signature(keyword_only)  # pyright: ignore[reportAttributeAccessIssue]
    _run.__annotations__ = {each.name: each.annotation for each in parameters}
    return _run


def _whole_number(least: int) -> Callable[[str], int]:
    def _read(text: str) -> int:
        # Python refuses thousands of digits with an error of its own, so the length is bounded first.
        word = str(text)
        if word.isdecimal() and len(word) <= len(str(MAX_NUMBER)) and least <= int(word) <= MAX_NUMBER:
            return int(word)
        raise typer.BadParameter(f"{text!r} cannot be used; accepted is a whole number from {least} to {MAX_NUMBER}")

    return _read


whole_number = _whole_number(1)
seed_number = _whole_number(0)


def positive_seconds(text: str) -> float:
    """Read a time in seconds. Raises `typer.BadParameter`."""
    seconds = _number(text)
    if math.isfinite(seconds) and seconds > 0:
        return seconds
    raise typer.BadParameter(f"{text!r} cannot be used; accepted is a positive number of seconds")


def percentage(text: str) -> float:
    """Read a share in per cent. Raises `typer.BadParameter`."""
    percent = _number(str(text).removesuffix("%"))
    if 0 <= percent <= 100:
        return percent
    raise typer.BadParameter(f"{text!r} cannot be used; accepted is a number of per cent from 0 to 100")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def database(text: str) -> str:
    """Read the path or URL of a database. Raises `typer.BadParameter` for a folder."""
    if os.path.isdir(os.path.expanduser(text)):
        raise typer.BadParameter(f"{text!r} is a folder; accepted is the path of a database in it, or a URL")
    return text


PageSizes = Annotated[list[str] | None, typer.Option(
    "--page-size", metavar="TOKENS", help="Tokens per KV page, a multiple of 16. Repeat it or join values by commas.",
    show_default="16")]
OnePageSize = Annotated[str | None, typer.Option(
    "--page-size", metavar="TOKENS", help="Tokens per KV page, a multiple of 16.", show_default="16")]
OneBatch = Annotated[str | None, typer.Option(
    "--batch", metavar="COUNTxQUERY@CONTEXT,...", help="Sequences of one launch, such as 1x512@16384,63x1@32768.",
    show_default="the first of the suite")]
GpuName = Annotated[str | None, typer.Option(
    "--gpu", metavar="NAME", help=f"Name of a GPU, a target such as sm_90, or {request.INTERPRETER_WORD}.",
    show_default="the one present")]
StoredGpu = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Only configs stored for this GPU.")]
VariantKey = Annotated[str | None, typer.Option(
    "--variant", metavar="KEY", help="A variant as generate prints it.", show_default="the default variant")]
Database = Annotated[str | None, typer.Option(
    "--db", parser=database, metavar="PATH|URL", help="The database.", show_default="in the user's data folder")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, on stdout.")]
Seed = Annotated[int, typer.Option(parser=seed_number, metavar="NUMBER", help="Seed of the search and of the inputs.")]


@dataclass(frozen=True, slots=True)
class Layers:
    """Options that name attention layers."""

    model: Annotated[str | None, typer.Option(
        metavar="NAME|PATH", help="A preset such as llama-3-8b, or the path of a Hugging Face config.json.")] = None
    tp: Annotated[int, typer.Option(
        parser=whole_number, metavar="GPUS", help="GPUs that share the heads of --model.")] = 1
    dtype: Annotated[str | None, typer.Option(
        metavar="|".join(DTYPES), help="dtype of --model.", show_default="as in its config")] = None
    kv_dtype: Annotated[str | None, typer.Option(
        metavar="|".join(request.KV_DTYPES), help="dtype of the KV cache of --model.",
        show_default="as the checkpoint was quantized, else --dtype")] = None
    q_dtype: Annotated[str | None, typer.Option(
        metavar="|".join(request.KV_DTYPES), help="dtype of the queries beside an 8-bit KV cache.",
        show_default="auto: --dtype")] = None
    tree: Annotated[bool, typer.Option(
        "--tree", help="The queries of --model are trees of speculative tokens, with a mask.")] = False
    spec: Annotated[str | None, typer.Option(
        metavar="KEY", help="One layer instead of a model, such as num_q_heads=8,num_kv_heads=1,head_dim=128.")] = None

    def specs(self) -> tuple[AttentionSpec, ...]:
        """Return the distinct attention layers on one GPU; raises as `counts` does."""
        return tuple(self.counts())

    def specs_or_all(self) -> tuple[AttentionSpec, ...] | None:
        """Return the layers as `specs` does, or None when no option is given: a filter that lets all layers pass."""
        return None if self == Layers() else self.specs()

    def counts(self) -> dict[AttentionSpec, int]:
        """Return the distinct attention layers on one GPU, and how many of each the model has; one with --spec.

        Raises `ModelError` or `SpecError`, and `InputError` unless exactly one of --model and --spec is given, or when
        another option goes with --spec.
        """
        if self.model is not None and self.spec is not None:
            raise InputError("--model and --spec exclude each other; give one of them")
        options = self._model_options()
        if self.spec is not None:
            if options:
                raise InputError(f"{options[0]} does not go with --spec, which names the whole layer as one GPU has it")
            return {AttentionSpec.parse(self.spec): 1}
        if self.model is None:
            missing = "a layer is missing" if not options else f"{options[0]} describes a layer, and no layer is named"
            raise InputError(f"{missing}; add --model, such as --model llama-3-8b, or --spec")
        return request.model_layers(self.model, self.tp, self.dtype, self.kv_dtype, self.q_dtype, self.tree)

    def _model_options(self) -> list[str]:
        values = {"--tp": None if self.tp == 1 else self.tp, "--dtype": self.dtype, "--kv-dtype": self.kv_dtype,
                  "--q-dtype": self.q_dtype}  # fmt: skip
        return [f"{name} {value}" for name, value in values.items() if value is not None] + ["--tree"] * self.tree


@dataclass(frozen=True, slots=True)
class Batches:
    """Options that name batches."""

    batch: Annotated[list[str] | None, typer.Option(
        metavar="COUNTxQUERY@CONTEXT,...",
        help="Sequences of one launch, such as 1x512@16384,63x1@32768. Can be repeated.")] = None
    suite: Annotated[str | None, typer.Option(
        metavar="NAME|PATH", help="A list of batches: a suite such as serving or hybrid, or the path of one.")] = None

    def named(self) -> tuple[Batch, ...]:
        """Return the batches of --batch and --suite, each once. Raises `BatchError` or `ModelError`."""
        return request.batches(self.batch or (), self.suite)


@dataclass(frozen=True, slots=True)
class Clock:
    """Options of the timing regime."""

    warm: Annotated[bool, typer.Option(
        "--warm", help="Time on a GPU with the tensors in L2 instead of evicted.")] = False
    eager: Annotated[bool, typer.Option(
        "--eager", help="Time single launches on a GPU instead of a CUDA graph with its padded grid.")] = False

    @property
    def regime(self) -> Regime:
        """The regime to time in on a GPU."""
        return Regime("eager" if self.eager else "graph", "warm" if self.warm else "cold")


@dataclass(frozen=True, slots=True)
class Search:
    """Options that bound and seed a search."""

    trials: Annotated[int | None, typer.Option(
        parser=whole_number, metavar="NUMBER", help="Variants to try for each layer, batch and page size.",
        show_default=f"{TRIALS}, without a GPU {TRIALS_WITHOUT_GPU}")] = None
    seconds: Annotated[float | None, typer.Option(
        parser=positive_seconds, metavar="SECONDS", help="Time limit of the whole run.",
        show_default=f"none, without a GPU {SECONDS_WITHOUT_GPU:g}")] = None
    seed: Seed = 0

    def settings(self, gpu: Gpu, **more: Any) -> Settings:
        """Return the settings of a search on `gpu`, with `more` of them."""
        from ..settings import Settings

        trials = self.trials or (TRIALS_WITHOUT_GPU if gpu.is_interpreter else TRIALS)
        seconds = self.seconds or (SECONDS_WITHOUT_GPU if gpu.is_interpreter else None)
        return Settings(trials=trials, seconds=seconds, seed=self.seed, **more)
