"""The installed templates, and the rule that decides if a variant is valid."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings

from .errors import TunerError, VariantError
from .gpu import Gpu
from .hopper.template import GLUON_HOPPER
from .spec import AttentionSpec
from .template import Template
from .triton_family.templates import FUSED, PERSISTENT, TWO_LAUNCH, UNIFIED
from .variant import Variant

ENTRY_POINTS = "attention_tuner.templates"


@functools.cache
def templates() -> dict[str, Template]:
    """Every installed template by name: this project's, then those of other packages.

    A template of another package that cannot be imported, or is no `Template`, is skipped with a warning: a broken
    package must not end an engine. Raises `TunerError` when two templates share a name.
    """
    found = {template.name: template for template in (UNIFIED, FUSED, TWO_LAUNCH, PERSISTENT, GLUON_HOPPER)}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        template = _load(point)
        if template is not None and found.setdefault(template.name, template) is not template:
            raise TunerError(f"two installed templates are called {template.name!r}")
    return found


def _load(point: importlib.metadata.EntryPoint) -> Template | None:
    try:
        template = point.load()
        reason = "it is no Template"
    except Exception as error:  # noqa: BLE001 - another package's code, which may raise anything as it is imported
        template, reason = None, f"{type(error).__name__}: {error}"
    if isinstance(template, Template):
        return template
    warnings.warn(f"template {point.name!r} ({point.value}) cannot be loaded and is set aside: {reason}", stacklevel=3)
    return None


def template_of(variant: Variant) -> Template:
    """The template of `variant`. Raises `VariantError` when it is not installed."""
    found = templates().get(variant.template)
    if found is None:
        raise VariantError(f"unknown template {variant.template!r}; installed are {', '.join(templates())}")
    return found


@functools.lru_cache(maxsize=65536)
def code_of(variant: Variant) -> str:
    """The key of a variant's code. Variants with the same key are compiled once for a layer and GPU."""
    return template_of(variant).code_key(variant)


def why_invalid(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> str | None:
    """The reason that `variant` cannot run layer `spec` on `gpu`; None if it can.

    Searches, lookups and tests all use this rule. The reasons are few and fixed texts, so that reports can count them.
    """
    template = templates().get(variant.template)
    if template is None:
        return "its template is not installed"
    values = variant.as_dict()
    if set(values) != {d.name for d in template.dimensions}:
        return "its dimensions are not the template's"
    if any(values[d.name] not in d.choices for d in template.dimensions):
        return "a value is not among the template's choices"
    return next((rule.reason for rule in template.rules if not rule.holds(variant, spec, gpu)), None)
