"""The cases of the full check: a variant must pass them for its layer, whatever batch it won on.

In every case the output, the partial results, and the cache slots and pages of no sequence hold NaN before the launch.
Pages are handed out at random, and every row of the output is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...kernel_templates.batch import MAX_SEQUENCES, SHORT_QUERY, Batch
from ...kernel_templates.errors import InputError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.registry import template_of
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.task import Task
from ...kernel_templates.variant import Variant
from ..costs import interpreted_seconds

Way = Literal["once", "twice", "padded", "reserved", "after another", "fixed"]
"""The way to launch a case: once; twice, with outputs that must be equal bit for bit; with the padded grid of a
captured graph; in room reserved for more; by a launcher that has just run another batch; or with a fixed split of the
keys."""

Past = Literal["", "q", "cache", "partials"]
"""The tensor of a case that has offsets beyond 32 bits."""

# The longest accepted check of a variant through the interpreter.
INTERPRETED_LIMIT_S = 300.0
# Seconds of a case there, in addition to its tiles.
INTERPRETED_CASE_S = 0.1
SEEDS = 3
# No template has tiles of more rows.
LARGEST_TILE = 128
# The interpreter takes 5 ms for 16 keys, so larger windows are checked on a GPU only.
INTERPRETED_KEYS = 512
FRESH_PROCESSES = 3
# The most keys of a segment of short and of long sequences: few, so that even small batches are cut.
FIXED_SPLIT = (128, 256)
NEEDS_GPU = "it needs a GPU"
# Elements that a signed 32-bit offset reaches.
OFFSETS = 2**31

_LAUNCHES = {"twice": 2, "after another": 3}
_TILE_EDGES = tuple(edge + step for edge in (16, 32, 64, 128) for step in (-1, 0, 1))
_MIXED = ((33, 47), (9, 0), (1, 70), (1, 131), (4, 30), (2, 15))
_LARGE = ((512, 4000), *((1, 4096 + 97 * index) for index in range(32)), *((4, 2000 + index) for index in range(4)))

Sequences = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Case:
    """One launch of the full check, or a few."""

    name: str
    batch: Batch
    seed: int = 0
    way: Way = "once"
    # K and V are views of one tensor.
    packed: bool = False
    # NaN follows each row of q, K, V and the output.
    guard: bool = False
    # The log-sum-exp is written and judged too.
    lse: bool = False
    # Tokens of context that are the same pages for all sequences.
    shared_prefix: int = 0
    # Scores are in the thousands.
    large_logits: bool = False
    past: Past = ""
    needs_gpu: bool = False
    # The reason why the case is not run for the variant.
    skip: str = ""


def cases_of(spec: AttentionSpec, variant: Variant, seed: int = 0) -> tuple[Case, ...]:
    """The cases for a layer and the variant's page size, small ones first, with inputs drawn from `seed` on.

    They also depend on the variant's partial results, and on its template if that writes no log-sum-exp.
    """
    cases = (*_small_cases(spec, variant.page_size, seed), *_large_cases(spec, variant.page_size, seed),
             *_cases_past_32_bits(spec, variant, seed))
    return cases if template_of(variant).writes_lse else tuple(map(_without_lse, cases))


def compiled_cases(spec: AttentionSpec, variant: Variant) -> tuple[Case, ...]:
    """One case for each code that the cases launch."""
    run = (case for case in cases_of(spec, variant) if not case.skip and case.batch == Batch(_MIXED))
    return tuple({case.lse: case for case in run}.values())


def fresh_cases(seed: int = 0) -> tuple[Case, ...]:
    """The cases that are each run in a process of their own."""
    return tuple(
        Case(f"fresh process {number}", Batch(_LARGE), seed, needs_gpu=True)
        for number in range(1, FRESH_PROCESSES + 1)
    )


def sanitizer_case(seed: int = 0) -> Case:
    """The case that is run under compute-sanitizer."""
    return Case("compute-sanitizer", Batch(_MIXED), seed, needs_gpu=True)


def interpreted_check_seconds(spec: AttentionSpec, variant: Variant) -> float:
    """Estimated seconds of the full check of `variant` through the interpreter."""
    return sum(
        INTERPRETED_CASE_S
        + _LAUNCHES.get(case.way, 1) * interpreted_seconds(Task(spec, case.batch, variant.page_size), variant)
        for case in cases_of(spec, variant) if not case.needs_gpu
    )


def refuse_slow(spec: AttentionSpec, variant: Variant, gpu: Gpu) -> None:
    """Raise `InputError` if the interpreter would take too long for the full check of `variant`."""
    seconds = interpreted_check_seconds(spec, variant) if gpu.is_interpreter else 0.0
    if seconds > INTERPRETED_LIMIT_S:
        raise InputError(f"the full check of layer {spec.key()!r} with pages of {variant.page_size} is too large for "
                         f"Triton's interpreter: it would take about {seconds:.0f} s a variant, and "
                         f"{INTERPRETED_LIMIT_S:.0f} s are accepted; give a layer of fewer heads or smaller pages")


def _without_lse(case: Case) -> Case:
    """The case for a template that writes no log-sum-exp: skipped if it is about nothing else."""
    if case.way == "twice":
        return replace(case, lse=False)
    return replace(case, skip="its template writes none") if case.lse else case


def _decodes(kv_lens: Sequence[int]) -> Batch:
    """Sequences of one query token with these numbers of keys."""
    return Batch(tuple((1, kv_len - 1) for kv_len in kv_lens))


def _around(edge: int) -> Batch:
    return _decodes([edge + step for step in (-1, 0, 1) if edge + step > 0])


def _small_cases(spec: AttentionSpec, page_size: int, seed: int) -> list[Case]:
    mixed = Batch(_MIXED)
    longer = max(SHORT_QUERY + 1, LARGEST_TILE // spec.group_size + 2)
    shared = 2 * max(page_size, 32)
    cases = [
        Case("one token, no context", Batch(((1, 0),)), seed),
        Case("lengths at tile edges", _decodes(_TILE_EDGES), seed),
        Case("lengths at page edges", _around(page_size), seed),
        Case("more segments than tiles", Batch(((1, 40), (9, 23), (2, 1))), seed),
        Case("verification", Batch(((2, 14), (8, 8), (5, 60), (4, 125), (3, 0))), seed),
        Case("chunks without context", Batch(((9, 0), (16, 0), (17, 0), (33, 0))), seed),
        Case("chunks at tile edges", Batch(((31, 33), (32, 32), (33, 31))), seed),
        Case("a query longer than a tile", Batch(((longer, 7),)), seed),
        Case("sequences without query tokens", Batch(((0, 20), (1, 33), (0, 0), (12, 5), (0, 64))), seed),
        Case("many sequences", Batch(tuple((1, 7 * index % 61) for index in range(32))), seed),
        *(Case(f"mixed batch, seed {n}", mixed, n) for n in range(seed, seed + SEEDS)),
        Case("K and V packed in one tensor", mixed, seed, packed=True),
        Case("NaN after every row", mixed, seed, guard=True),
        Case("log-sum-exp", mixed, seed, lse=True),
        Case("pages that sequences share", Batch(((1, shared), (1, shared + 5), (12, shared + 3), (4, shared + 30))),
             seed, shared_prefix=shared),
        Case("large logits", mixed, seed, large_logits=True),
        Case("the same call twice", mixed, seed, way="twice", lse=True),
        Case("a padded grid", mixed, seed, way="padded"),
        Case("reserved room", mixed, seed, way="reserved"),
        Case("after another batch", mixed, seed, way="after another"),
        Case("a fixed split", Batch(((33, 300), (1, 400), (4, 130), (2, 15))), seed, way="fixed"),
    ]
    if spec.sliding_window is not None:
        window = spec.sliding_window
        cases.append(Case("lengths at window edges", Batch((*_around(window).sequences, (1, 2 * window), (20, window))),
                          seed, needs_gpu=window > INTERPRETED_KEYS))
    if spec.has_tree_mask:
        cases.append(Case("trees of tokens", Batch(((2, 30), (8, 45), (33, 17), (64, 5), (65, 9))), seed))
    return cases


def _large_cases(spec: AttentionSpec, page_size: int, seed: int) -> list[Case]:
    large = Batch(_LARGE)
    powers = _decodes([2**power + step for power in range(8, 16) for step in (-1, 0, 1)])
    pages = _decodes([count * page_size + step for count in (2, 3, 7, 64) for step in (-1, 0, 1)])
    chunks = Batch(((512, 1500), (2048, 0), (1000, 3001), (129, 16384), (1, 5000)))
    many = Batch(tuple((1, 37 * index % 300) for index in range(4096)))
    cases = [
        Case("lengths at powers of two", powers, seed),
        Case("lengths at many pages' edges", pages, seed),
        Case("long chunks", chunks, seed),
        Case("thousands of sequences", many, seed),
        Case("long contexts", Batch(((1, 131071), (1, 65536), (4, 100000))), seed),
        Case("a million tokens of context", _decodes([2**20]), seed),
        *(Case(f"large mixed batch, seed {n}", large, n) for n in range(seed, seed + SEEDS)),
        Case("large pages that sequences share", Batch(((1, 8192), (1, 9000), (256, 8500), (4, 8200))), seed,
             shared_prefix=-(-4096 // page_size) * page_size),
        Case("NaN after every row, large batch", large, seed, guard=True),
        Case("log-sum-exp, large batch", large, seed, lse=True),
        Case("large logits, large batch", large, seed, large_logits=True),
        Case("the same large call twice", large, seed, way="twice", lse=True),
        Case("a padded grid, large batch", large, seed, way="padded"),
        Case("reserved room, large batch", large, seed, way="reserved"),
        Case("after another large batch", large, seed, way="after another"),
        Case("a fixed split, large batch", large, seed, way="fixed"),
    ]
    return [_on_gpu(case) for case in cases]


def _cases_past_32_bits(spec: AttentionSpec, variant: Variant, seed: int) -> list[Case]:
    least_dim = min(spec.head_dim, spec.value_dim)
    chunk, context, query_len = 2048, 65536, 512
    chunks = _count(spec.num_q_heads * least_dim * chunk)
    contexts = _count(spec.num_kv_heads * least_dim * context)
    segments = template_of(variant).traits(variant).fixed_segments
    tiles = _count(spec.num_q_heads * spec.value_dim * segments * query_len)
    skip = "" if segments > 1 else "its partial results are a few for each multiprocessor, or none"
    cases = [
        Case("offsets past 2^31 in the cache", _decodes([context] * contexts), seed, past="cache"),
        Case("offsets past 2^31 in the queries", Batch(((chunk, 0),) * chunks), seed, past="q"),
        Case("offsets past 2^31 in the partial results",
             Batch(((query_len, LARGEST_TILE * segments),) * (1 if skip else tiles)), seed, past="partials",
             skip=skip),
    ]
    return [_on_gpu(case) for case in cases]


def _count(elements: int) -> int:
    """Number of sequences that together exceed 2^31 elements, with one to spare, at `elements` each."""
    return min(MAX_SEQUENCES, OFFSETS // elements + 2)


def _on_gpu(case: Case) -> Case:
    return replace(case, needs_gpu=True)
