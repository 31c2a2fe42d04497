"""Records made of the arguments of a command: every value is read, or refused, before anything is opened."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...kernel_templates.batch import Batch
from ...kernel_templates.errors import GpuError, InputError, SpecError, VariantError
from ...kernel_templates.gpu import INTERPRETER, TARGETS, Gpu
from ...kernel_templates.outcome import BestConfig
from ...kernel_templates.registry import template_of, why_invalid
from ...kernel_templates.spec import DTYPES, FP8_DTYPES, AttentionSpec
from ...kernel_templates.task import Task
from ...kernel_templates.variant import Variant

if TYPE_CHECKING:
    from ...db.answer import Chain
    from ...db.lookup.table import ConfigTable
    from ...db.store import Store

# Name of Triton's interpreter in `--gpu`.
INTERPRETER_WORD = "interpreter"
DEFAULT_PAGE_SIZE = 16
DEFAULT_SUITE = "serving"
# Values of `--kv-dtype` and `--q-dtype`; "auto" is the layer's own.
KV_DTYPES = ("auto", *FP8_DTYPES)


def model_layers(
    model: str, tp: int, dtype: str | None, kv_dtype: str | None, q_dtype: str | None, tree: bool
) -> dict[AttentionSpec, int]:
    """Return the distinct attention layers of `model` on one of `tp` GPUs, and how many of each it has.

    With `tree`, they verify trees of tokens.

    Raises `ModelError` or `SpecError`.
    """
    for option, value, accepted in (
        ("--dtype", dtype, DTYPES), ("--kv-dtype", kv_dtype, KV_DTYPES), ("--q-dtype", q_dtype, KV_DTYPES),
    ):  # fmt: skip
        if value is not None and value not in accepted:
            raise SpecError(f"{option} {value!r} is not supported; accepted are {', '.join(accepted)}")
    from ...search_spaces import models

    layers = models.model_layers(model, tp, dtype, kv_dtype, q_dtype)
    return {replace(spec, has_tree_mask=True): count for spec, count in layers.items()} if tree else layers


def refuse_beside(option: str, **others: object) -> None:
    """Raise `InputError` for the first of `others` that was given: options that do not go with `option`."""
    for name, value in others.items():
        if value is not None and value is not False:
            raise InputError(f"--{name.replace('_', '-')} does not go with {option}")


def page_sizes(texts: Sequence[str]) -> tuple[int, ...]:
    """Return the page sizes in `texts`, each one size or several joined by commas. Raises `InputError`."""
    words = [word.strip() for text in texts for word in text.split(",")] or [str(DEFAULT_PAGE_SIZE)]
    return tuple(dict.fromkeys(page_size(word) for word in words))


def page_size(text: str | None) -> int:
    """Return the page size in `text`, 16 for None. Raises `InputError`."""
    word = str(DEFAULT_PAGE_SIZE) if text is None else text.strip()
    if not word.isascii() or not word.isdigit() or len(word) > 6 or int(word) < 1 or int(word) % 16:
        raise InputError(f"page size {word!r} cannot be used; accepted is any multiple of 16, such as 16, 128 or 528")
    return int(word)


def batches(texts: Sequence[str], suite: str | None) -> tuple[Batch, ...]:
    """Return the batches of `texts` and of `suite`, each once. Raises `BatchError` or `ModelError`."""
    named = tuple(Batch.parse(text) for text in texts)
    if suite is not None:
        from ...search_spaces.suites import suite as read_suite

        named += read_suite(suite)
    return tuple(dict.fromkeys(named))


def default_batches(gpu: Gpu) -> tuple[Batch, ...]:
    """Return the batches to tune when none is named: small ones for the interpreter, those of serving for a GPU."""
    from ...search_spaces.suites import INTERPRETER_BATCHES
    from ...search_spaces.suites import suite as read_suite

    return tuple(map(Batch.parse, INTERPRETER_BATCHES)) if gpu.is_interpreter else read_suite(DEFAULT_SUITE)


def stored(
    configs: Iterable[BestConfig], specs: Sequence[AttentionSpec] | None = None, gpu: str | None = None
) -> list[BestConfig]:
    """Return the `configs` for one of `specs` and for the GPU called `gpu`; None means any."""
    return [
        config for config in configs
        if (specs is None or config.shape.spec in specs) and (gpu is None or _is_name_of(gpu, config.gpu))
    ]


def open_store(db: str | None, *, create: bool = False) -> Store:
    """Open the database `db`, None meaning the user's; without `create` only to read. Raises `StoreError`."""
    from ...db import Store, default_path

    return Store.open(default_path() if db is None else db, create=create)


def load_table(db: str | None, files: Sequence[str] = (), chain: Chain | None = None) -> ConfigTable:
    """Load the table of `db`, None meaning the user's database, of `files` and of what ships. Raises `StoreError`."""
    from ...db import Store
    from ...db import load_table as load
    from ...db.answer import Chain

    if db is not None:
        # An engine may run without a database, but one that is named here must exist.
        Store.open(db, create=False).close()
    return load(db, files=files, chain=chain or Chain())


def require_file(db: str | None) -> None:
    """Raise `InputError` when `db`, None meaning the user's database, names a file that does not exist."""
    from ...db import default_path
    from ...db.engine import sqlite_path

    path = sqlite_path(default_path() if db is None else db)
    if path is not None and not path.exists():
        raise InputError(f"there is no database {str(path)!r}, and so no best config; tune first")


def tasks(specs: Iterable[AttentionSpec], named: Iterable[Batch], pages: Iterable[int]) -> tuple[Task, ...]:
    """Return one task for each layer, batch and page size."""
    return tuple(Task(*each) for each in itertools.product(specs, named, pages))


def missed_tasks(path: str, gpu: Gpu) -> tuple[Task, ...]:
    """Return the tasks of the misses for `gpu` in the file at `path`, the most frequent first.

    Raises `StoreError` for any other file, and `InputError` for one without misses for this GPU.
    """
    from ...db.lookup.coverage import read_misses

    misses = read_misses(path)
    found = tuple(Task(miss.spec, miss.batch, miss.page_size) for miss in misses if miss.gpu_name == gpu.name)
    if not found:
        others = ", ".join(sorted({miss.gpu_name for miss in misses})) or "no GPU at all"
        raise InputError(f"{path!r} holds no miss of {gpu.name}: its misses are of {others}")
    return found


def any_gpu(name: str | None, others: Sequence[Gpu] = ()) -> Gpu:
    """Return the GPU called `name`: the present one, the interpreter, a target or one of `others`.

    None means the present GPU, or the interpreter without one. Imports torch. Raises `GpuError` for any other name.
    """
    if name is not None and name.lower() == INTERPRETER_WORD:
        return INTERPRETER
    from ...kernel_templates.launch.device import present_gpu

    present = present_gpu()
    if name is None:
        return present or INTERPRETER
    here = () if present is None else (present,)
    for gpu in (*here, *others, *TARGETS.values()):
        if _is_name_of(name, gpu):
            # The name of the present GPU's architecture means the GPU itself.
            return present if present is not None and present.arch == gpu.arch and gpu.name in TARGETS else gpu
    known = dict.fromkeys([*(gpu.name for gpu in (*here, *others)), *TARGETS, INTERPRETER_WORD])
    raise GpuError(f"unknown GPU {name!r}; accepted here are {', '.join(known)}")


def running_gpu(name: str | None) -> Gpu:
    """Return the GPU called `name`, which can run kernels now. Raises `GpuError` when it cannot."""
    from ...kernel_templates.launch.device import present_gpu

    present = present_gpu()
    with contextlib.suppress(GpuError):
        gpu = any_gpu(name)
        if gpu.name not in TARGETS:
            return gpu
    here = f"only {present.name} is" if present else "no GPU is"
    accepted = f"{present.name} and {INTERPRETER_WORD}" if present else INTERPRETER_WORD
    elsewhere = f", and {name} only for generate, lookup and tune --dry-run" if name in TARGETS else ""
    raise GpuError(f"GPU {name!r} is not present ({here}), so nothing can run on it; accepted here: "
                   f"{accepted}{elsewhere}")


def variant(text: str, spec: AttentionSpec, page: int, gpu: Gpu) -> Variant:
    """Return the variant that `text` names, valid for `spec` on `gpu` with pages of `page`. Raises `VariantError`."""
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
    if named.page_size != page:
        raise VariantError(f"variant {text!r} reads pages of {named.page_size}, and --page-size is {page}")
    reason = why_invalid(named, spec, gpu)
    if reason:
        raise VariantError(f"variant {text!r} cannot run layer {spec.key()!r} on {gpu.name}: {reason}")
    return named


def _is_name_of(name: str, gpu: Gpu) -> bool:
    return name.lower() in (gpu.name.lower(), gpu.slug.lower())
