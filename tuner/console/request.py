"""What a command was asked for, as records: every value is read, or refused, here before anything is opened."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ...kernel_templates.batch import Batch
from ...kernel_templates.errors import GpuError, InputError, SpecError, VariantError
from ...kernel_templates.gpu import INTERPRETER, TARGETS, Gpu
from ...kernel_templates.outcome import BestConfig, Regime
from ...kernel_templates.registry import template_of, why_invalid
from ...kernel_templates.spec import DTYPES, FP8_DTYPES, AttentionSpec
from ...kernel_templates.task import Task
from ...kernel_templates.variant import Variant

if TYPE_CHECKING:
    from ...db.answer import Chain

# What `--gpu` calls Triton's interpreter.
INTERPRETER_WORD = "interpreter"
DEFAULT_PAGE_SIZE = 16
DEFAULT_SUITE = "serving"
# What `--kv-dtype` and `--q-dtype` take; "auto" is the layer's own.
KV_DTYPES = ("auto", *FP8_DTYPES)


def layers(
    model: str | None, tp: int, dtype: str | None, spec: str | None = None, kv_dtype: str | None = None,
    q_dtype: str | None = None, tree: bool = False,
) -> tuple[AttentionSpec, ...]:
    """The distinct attention layers of `model` on one of `tp` GPUs, or the one that `spec` names.

    With `tree` they verify trees of tokens, which no model's config says. Raises `ModelError` or `SpecError`, and
    `InputError` unless exactly one of the two is given, and for `tp`, `dtype`, `kv_dtype`, `q_dtype` or `tree` beside
    `spec`.
    """
    if (model is None) == (spec is None):
        given = "neither was given" if model is None else "both were given"
        raise InputError(f"a layer is named by either --model or --spec, and {given}; try --model llama-3-8b")
    if spec is not None:
        of_models = {"tp": None if tp == 1 else tp, "dtype": dtype, "kv-dtype": kv_dtype, "q-dtype": q_dtype}
        given = [f"--{name} {value}" for name, value in of_models.items() if value is not None]
        if tree:
            given.append("--tree")
        if given:
            raise InputError(f"{given[0]} does not go with --spec, which names a layer as one GPU has it, dtypes and "
                             "features and all")
        return (AttentionSpec.parse(spec),)
    assert model is not None
    for option, value, accepted in (
        ("--dtype", dtype, DTYPES), ("--kv-dtype", kv_dtype, KV_DTYPES), ("--q-dtype", q_dtype, KV_DTYPES),
    ):  # fmt: skip
        if value is not None and value not in accepted:
            raise SpecError(f"{option} {value!r} is not supported; accepted are {', '.join(accepted)}")
    from ...search_spaces.models import model_specs

    specs = model_specs(model, tp, dtype, kv_dtype, q_dtype)
    return tuple(replace(each, has_tree_mask=True) for each in specs) if tree else specs


def layer_counts(model: str | None, specs: Sequence[AttentionSpec]) -> dict[AttentionSpec, int]:
    """How many layers of each of `specs` a model has, one each without a model."""
    if model is None:
        return dict.fromkeys(specs, 1)
    from ...search_spaces.models import kind_of
    from ...search_spaces.models import layer_counts as count

    counts = count(model)
    return {spec: counts[kind_of(spec)] for spec in specs}


def refuse_beside(option: str, **others: object) -> None:
    """Raise `InputError` for the first of `others` that was given: options that do not go with `option`."""
    for name, value in others.items():
        if value is not None and value is not False:
            raise InputError(f"--{name.replace('_', '-')} does not go with {option}")


def page_sizes(texts: Sequence[str]) -> tuple[int, ...]:
    """The page sizes given, each option holding one or several joined by commas. Raises `InputError`."""
    words = [word.strip() for text in texts for word in text.split(",")] or [str(DEFAULT_PAGE_SIZE)]
    return tuple(dict.fromkeys(_page_size(word) for word in words))


def page_size(text: str | None) -> int:
    """The one page size that `text` names, 16 for None. Raises `InputError`."""
    return DEFAULT_PAGE_SIZE if text is None else _page_size(text.strip())


def batches(texts: Sequence[str], suite: str | None) -> tuple[Batch, ...]:
    """The batches given one by one and those of `suite`, each once; none when neither names any.

    Raises `BatchError` or `ModelError`.
    """
    named = tuple(Batch.parse(text) for text in texts)
    if suite is not None:
        from ...search_spaces.suites import suite as read_suite

        named += read_suite(suite)
    return tuple(dict.fromkeys(named))


def default_batches(gpu: Gpu) -> tuple[Batch, ...]:
    """What is tuned where no batch is named: small batches for the interpreter, those of serving for a GPU."""
    from ...search_spaces.suites import INTERPRETER_BATCHES
    from ...search_spaces.suites import suite as read_suite

    return tuple(map(Batch.parse, INTERPRETER_BATCHES)) if gpu.is_interpreter else read_suite(DEFAULT_SUITE)


def stored(
    configs: Iterable[BestConfig], specs: Sequence[AttentionSpec] | None = None, gpu: str | None = None
) -> list[BestConfig]:
    """Those of `configs` that are of one of `specs` and of the GPU called `gpu`, None meaning any."""
    return [
        config for config in configs
        if (specs is None or config.shape.spec in specs)
        and (gpu is None or gpu.lower() in (config.gpu.name.lower(), config.gpu.slug.lower()))
    ]


def tasks(specs: Iterable[AttentionSpec], named: Iterable[Batch], pages: Iterable[int]) -> tuple[Task, ...]:
    """One task for each layer, batch and page size."""
    return tuple(Task(*each) for each in itertools.product(specs, named, pages))


def chain(worst: str, like: Sequence[str]) -> Chain:
    """The fall-backs of a lookup, down to the source called `worst`. Raises `InputError` for a name that is none."""
    from ...db.answer import Chain

    # It is the record that refuses what is no source.
    return Chain(cast(Any, worst), tuple(like))


def missed_tasks(path: str, gpu: Gpu) -> tuple[Task, ...]:
    """The tasks of the misses in the file at `path` that were asked about `gpu`, the most frequent first.

    Raises `StoreError` when it is no such file, and `InputError` when it has none of this GPU.
    """
    from ...db.lookup.coverage import read_misses

    misses = read_misses(path)
    found = tuple(Task(miss.spec, miss.batch, miss.page_size) for miss in misses if miss.gpu_name == gpu.name)
    if not found:
        others = ", ".join(sorted({miss.gpu_name for miss in misses})) or "no GPU at all"
        raise InputError(f"{path!r} holds no miss of {gpu.name}: its misses are of {others}")
    return found


def regime(warm: bool, eager: bool) -> Regime:
    """The regime to time in on a GPU: what is served, a captured graph on cold memory, where nothing else is asked."""
    return Regime("eager" if eager else "graph", "warm" if warm else "cold")


def machine(name: str | None, others: Sequence[Gpu] = ()) -> Gpu:
    """The GPU that `name` means: for None the present one or the interpreter, else it, a target or one of `others`.

    Imports torch, to see what is present. Raises `GpuError` for a name that none of them has.
    """
    if name is not None and name.lower() == INTERPRETER_WORD:
        return INTERPRETER
    present = _present()
    if name is None:
        return present or INTERPRETER
    here = () if present is None else (present,)
    for gpu in (*here, *others, *TARGETS.values()):
        if name.lower() in (gpu.name.lower(), gpu.slug.lower()):
            # An architecture's name means the GPU itself where one of that architecture is present.
            return present if present is not None and present.arch == gpu.arch and gpu.name in TARGETS else gpu
    known = dict.fromkeys([*(gpu.name for gpu in (*here, *others)), *TARGETS, INTERPRETER_WORD])
    raise GpuError(f"unknown GPU {name!r}; accepted here are {', '.join(known)}")


def runnable(name: str | None) -> Gpu:
    """The GPU that `name` means, when kernels can run on it now. Raises `GpuError` when they cannot."""
    present = _present()
    with contextlib.suppress(GpuError):
        gpu = machine(name)
        if gpu.name not in TARGETS:
            return gpu
    here = f"only {present.name} is" if present else "no GPU is"
    accepted = f"{present.name} and {INTERPRETER_WORD}" if present else INTERPRETER_WORD
    elsewhere = f", and {name} only for generate, lookup and tune --dry-run" if name in TARGETS else ""
    raise GpuError(f"GPU {name!r} is not present on this machine ({here}), so nothing can run on it; accepted here: "
                   f"{accepted}{elsewhere}")


def variant(text: str, spec: AttentionSpec, page: int | None, gpu: Gpu) -> Variant:
    """The variant that `text` names, valid for `spec` on `gpu` and reading pages of `page` (any, for None).

    Raises `VariantError`.
    """
    named = Variant.parse(text)
    template = template_of(named)
    choices = {d.name: d.choices for d in template.dimensions}
    values = named.as_dict()
    if set(values) != set(choices):
        raise VariantError(f"variant {text!r} does not name the dimensions of template {template.name!r}, "
                           f"which are page_size, {', '.join(choices)}")
    for name, value in values.items():
        if value not in choices[name]:
            accepted = ", ".join(map(str, choices[name]))
            raise VariantError(f"variant {text!r} has {name}={value}; accepted are {accepted}")
    if page is not None and named.page_size != page:
        raise VariantError(f"variant {text!r} reads pages of {named.page_size}, and --page-size is {page}")
    reason = why_invalid(named, spec, gpu)
    if reason:
        raise VariantError(f"variant {text!r} cannot run layer {spec.key()!r} on {gpu.name}: {reason}")
    return named


def _page_size(word: str) -> int:
    if not word.isascii() or not word.isdigit() or len(word) > 6 or int(word) < 1 or int(word) % 16:
        raise InputError(f"page size {word!r} cannot be used; accepted is any multiple of 16, such as 16, 128 or 528")
    return int(word)


def _present() -> Gpu | None:
    from ...kernel_templates.launch.device import present_gpu

    return present_gpu()
