"""Comparison of page sizes: times of tuned batches, and cache memory lost to pages that are not full."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from ..kernel_templates.batch import MAX_TOKENS, Batch
from ..kernel_templates.errors import InputError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import BestConfig, Environment, Regime
from ..kernel_templates.registry import why_invalid
from ..kernel_templates.spec import AttentionSpec

_NUMBERS = re.compile(r"[0-9]+([\s,]+[0-9]+)*")


@dataclass(frozen=True, slots=True)
class PageSize:
    """The time and the memory that one page size costs."""

    page_size: int
    # The time of each batch in all layers.
    times_ms: tuple[float, ...]
    # All pages that the sequences need.
    held_bytes: int
    # The part of them that holds no token.
    lost_bytes: int

    @property
    def mean_ms(self) -> float:
        """The geometric mean of the batches' times."""
        return statistics.geometric_mean(self.times_ms)

    @property
    def sum_ms(self) -> float:
        """The sum of the batches' times."""
        return sum(self.times_ms)

    @property
    def lost_share(self) -> float:
        """The share of the pages' memory that holds no token."""
        return self.lost_bytes / self.held_bytes


@dataclass(frozen=True, slots=True)
class Comparison:
    """Page sizes compared on one GPU and in one regime."""

    gpu: Gpu
    regime: Regime
    # The batches that were tuned with all sizes.
    batches: tuple[Batch, ...]
    # In ascending order.
    sizes: tuple[PageSize, ...]
    # Batches that were tuned with some of the sizes, each with those that it lacks.
    left_out: Mapping[Batch, tuple[int, ...]]
    # True if not all were measured with the same Triton, torch and driver.
    is_mixed: bool = False

    def slowdown(self, size: PageSize) -> float:
        """The slowdown of `size` against the fastest size, as a share, by their geometric means."""
        return size.mean_ms / min(each.mean_ms for each in self.sizes) - 1

    def recommended(self, within: float) -> PageSize:
        """The size that loses the least memory among those at most `within` percent slower than the fastest."""
        eligible = [size for size in self.sizes if self.slowdown(size) <= within / 100]
        return min(eligible, key=lambda size: (size.lost_bytes, size.mean_ms))


def token_bytes(layers: Mapping[AttentionSpec, int]) -> int:
    """The bytes of the keys and values of one token in all layers; `layers` counts those of each spec."""
    return sum(count * spec.num_kv_heads * (spec.head_dim + spec.value_dim) * spec.kv_element_bytes
               for spec, count in layers.items())


def compare(
    configs: Iterable[BestConfig], layers: Mapping[AttentionSpec, int], pages: Sequence[int] = (),
    lengths: Sequence[int] = (),
) -> list[Comparison]:
    """Compare page sizes by the `configs` that can run, for each GPU and regime with two sizes or more.

    `layers` counts the layers of each spec in a model: the time of a batch is that of all layers. `pages` are the sizes
    to compare, by default all; `lengths` are those of the sequences in the cache, by default those of the batches.
    """
    times: dict[tuple[str, int, Regime], dict[tuple[Batch, int], dict[AttentionSpec, float]]] = {}
    gpus: dict[tuple[str, int, Regime], Gpu] = {}
    versions: dict[tuple[str, int, Regime], set[Environment]] = defaultdict(set)
    for config in configs:
        spec, page_size = config.shape.spec, config.variant.page_size
        if spec not in layers or (pages and page_size not in pages) or why_invalid(config.variant, spec, config.gpu):
            continue
        where = (config.gpu.name, config.gpu.num_sms, config.timing.regime)
        gpus[where] = config.gpu
        # Templates have different kernel sources.
        versions[where].add(replace(config.environment, kernel_hash=""))
        of_batch = times.setdefault(where, defaultdict(dict))[Batch.parse(config.batch), page_size]
        of_batch[spec] = layers[spec] * config.timing.median_ms
    found: list[Comparison] = []
    for where, by_batch in times.items():
        whole = {key: sum(ms.values()) for key, ms in by_batch.items() if len(ms) == len(layers)}
        comparison = _compared(gpus[where], where[-1], whole, token_bytes(layers), lengths)
        if len(comparison.sizes) > 1 and comparison.batches:
            found.append(replace(comparison, is_mixed=len(versions[where]) > 1))
    return found


def _compared(
    gpu: Gpu, regime: Regime, times_ms: Mapping[tuple[Batch, int], float], bytes_a_token: int, lengths: Sequence[int]
) -> Comparison:
    sizes = sorted({page_size for _, page_size in times_ms})
    lacking = {
        batch: tuple(size for size in sizes if (batch, size) not in times_ms)
        for batch in dict.fromkeys(batch for batch, _ in times_ms)
    }
    batches = tuple(batch for batch, missing in lacking.items() if not missing)
    held = lengths or [length for batch in batches for length in batch.kv_lens if length]

    def _of(size: int) -> PageSize:
        tokens = sum(-(-length // size) * size for length in held)
        return PageSize(size, tuple(times_ms[batch, size] for batch in batches), tokens * bytes_a_token,
                        (tokens - sum(held)) * bytes_a_token)

    left_out = {batch: missing for batch, missing in lacking.items() if missing}
    return Comparison(gpu, regime, batches, tuple(map(_of, sizes)), left_out)


def read_lengths(text: str) -> tuple[int, ...]:
    """Read lengths of sequences in tokens: numbers joined by commas, or the path of a file of them.

    The file holds whole numbers separated by commas or white space, or a JSON list. Raises `InputError`.
    """
    content = text
    if not _NUMBERS.fullmatch(text.strip()):
        try:
            content = Path(text).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise InputError(f"the lengths {text!r} are neither numbers such as 1000,2000 nor a file that can be read: "
                             f"{why}") from error
    found = _numbers(content.strip())
    if not found or not all(1 <= length <= MAX_TOKENS for length in found):
        raise InputError(f"{text!r} holds no lengths of sequences; expected whole numbers from 1 to {MAX_TOKENS} with "
                         "commas or white space between them, or a JSON list of them")
    return tuple(found)


def _numbers(content: str) -> list[int]:
    if _NUMBERS.fullmatch(content):
        # Python refuses to read very long numbers, which are no lengths anyway.
        return [int(word) if len(word) <= len(str(MAX_TOKENS)) else -1 for word in re.split(r"[\s,]+", content)]
    try:
        parsed: object = json.loads(content)
    except (ValueError, RecursionError):
        return []
    items = cast(list[object], parsed) if isinstance(parsed, list) else []
    return [item if type(item) is int else -1 for item in items]
