"""The search space of one shape: which variants can run, and why the others cannot."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from ..kernel_templates.batch import BatchBucket
from ..kernel_templates.errors import VariantError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.template import templates, why_invalid
from ..kernel_templates.variant import Variant


@dataclass(frozen=True, slots=True)
class Survey:
    """The distinct valid variants in the templates' order, and how many were rejected for each reason."""

    valid: tuple[Variant, ...]
    rejected: Counter[str]


def survey(
    spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu, names: Iterable[str] | None = None
) -> Survey:
    """Every variant that can differ for batches in `bucket`, sorted into valid and rejected.

    `names` limits the templates; None means all that are installed. Raises `VariantError` when one is unknown.
    """
    chosen = tuple(templates()) if names is None else tuple(dict.fromkeys(names))
    unknown = [name for name in chosen if name not in templates()]
    if unknown:
        raise VariantError(f"unknown template {unknown[0]!r}; installed are {', '.join(templates())}")
    # A template's variants depend on which parts a batch has, not on their sizes: few surveys serve a whole suite.
    parts = BatchBucket(*(min(size, 1) for size in astuple(bucket)))
    valid, rejected = _survey(spec, parts, page_size, gpu, chosen)
    return Survey(valid, Counter(dict(rejected)))


@functools.lru_cache(maxsize=8)
def _survey(
    spec: AttentionSpec, bucket: BatchBucket, page_size: int, gpu: Gpu, names: tuple[str, ...]
) -> tuple[tuple[Variant, ...], tuple[tuple[str, int], ...]]:
    valid: list[Variant] = []
    rejected: Counter[str] = Counter()
    for name in names:
        for variant in dict.fromkeys(templates()[name].variants(bucket, gpu, page_size)):
            reason = why_invalid(variant, spec, gpu)
            if reason is None:
                valid.append(variant)
            else:
                rejected[reason] += 1
    return tuple(valid), tuple(rejected.items())
