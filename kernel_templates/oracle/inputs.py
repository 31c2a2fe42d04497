"""Inputs in which one key too many or too few changes a whole row of the output; `needles` explains the method.

Everything that must not be read is NaN: the output, physical page 0, the last page, slots after a sequence's last key,
all keys of a sequence without query tokens, and with `guard` the elements after each row of q, K, V and the output.
Values of a head, such as its sink, differ so much between neighbours that a kernel which takes the neighbour's is
caught. Half of the sinks weigh about as much as all needles of a row, half as much as all keys that a random query
attends to. ALiBi slopes fade the longest sequence by e^1 to e^3, so that its first keys still count; every fifth slope
is a model's.
"""

from __future__ import annotations

import itertools
import math
import random

import torch

from ..batch import TREE_TOKENS, Batch
from ..launch.launcher import Tensors, query_start_locs
from ..spec import AttentionSpec
from .needles import (
    LATTICE_KEYS,
    LATTICE_STEP,
    Keys,
    needle_keys,
    needle_scores,
    plant_keys,
    plant_queries,
    query_size,
)

# Elements after each row. TMA needs rows a multiple of 16 bytes apart.
GUARD = 16
# Scales have three binary digits, like needles, so that a scaled key is exact in every dtype.
_K_SCALES, _V_SCALES = (0.5, 0.75, 1.25), (0.75, 1.25, 0.5)
# Their products with the scales of K differ between neighbours too, and make no needle too large for e4m3.
_Q_SCALES = (1.5, 0.75, 1.25)
_CHUNK = 2**26


def make_tensors(
    spec: AttentionSpec,
    batch: Batch,
    page_size: int,
    device: torch.device | str,
    seed: int,
    packed: bool = False,
    needles: bool = True,
    *,
    guard: bool = False,
    shared_prefix: int = 0,
    lse: bool = False,
) -> Tensors:
    """Random inputs for `batch`, made on `device`, in a random order of pages. Memory that must not be read is NaN.

    With `packed`, K and V are views of one tensor [num_pages, num_kv_heads, page_size, head_dim + value_dim]. Without
    `needles` all of q, K and V is random, which is enough for timing. With `guard` each row of q, K, V and the output
    is followed by `GUARD` elements of NaN. Sequences with at least `shared_prefix` context tokens share the whole pages
    of these tokens. With `lse` there is a tensor of NaN for it. The block table has one column more than the longest
    sequence needs; its entries past a sequence's pages name page 0.
    """
    generator = torch.Generator(device).manual_seed(seed)
    block_table, num_pages = _block_table(batch, page_size, seed, shared_prefix)
    room = GUARD if guard else 0
    k_cache, v_cache = _random_cache(spec, (num_pages, page_size), generator, packed, room)
    q = _random(spec.dtype, (batch.num_tokens, spec.num_q_heads, spec.head_dim), generator, room)
    q *= query_size(spec)
    features = _features(spec, batch, seed)
    if needles:
        plant_queries(spec, batch, q, features.get("tree_mask"))
        keys = needle_keys(spec, batch, page_size)
        places = _places(keys, block_table, k_cache)
        plant_keys(spec, keys.needle_class, places, (k_cache, v_cache), _needle_scale(spec, features))
    if spec.has_fp8_queries:
        q = _guarded(getattr(torch, spec.q_dtype), tuple(q.shape), q.device, room).copy_(q.div_(query_size(spec)))
    for cache in (k_cache, v_cache):
        cache[[0, -1]] = torch.nan
        cache[_places(_unused_slots(batch, page_size), block_table, cache)] = torch.nan
    outputs = {"lse": torch.full(q.shape[:2], torch.nan, device=device)} if lse else {}
    return Tensors(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table.to(device),
        query_start_loc=torch.tensor(query_start_locs(batch), dtype=torch.int32, device=device),
        kv_lens=torch.tensor(batch.kv_lens, dtype=torch.int32, device=device),
        out=_guarded(getattr(torch, spec.dtype), (*q.shape[:2], spec.value_dim), q.device, room).fill_(torch.nan),
        **{name: tensor.to(device) for name, tensor in features.items()},
        **outputs,
    )


def tree_words(query_len: int, draw: random.Random) -> list[int]:
    """The words, in int64, of a random tree of query tokens, each of which sees itself and its ancestors.

    Parents come before their children, and some tokens have none. A sequence that does not use its words has all 0.
    """
    words = [0] * query_len
    for token in range(query_len if 1 < query_len <= TREE_TOKENS else 0):
        parent = draw.randrange(-1, token)
        words[token] = (words[parent] if parent >= 0 else 0) | 1 << token
    return [word - 2**TREE_TOKENS if word >> (TREE_TOKENS - 1) else word for word in words]


def _features(spec: AttentionSpec, batch: Batch, seed: int) -> dict[str, torch.Tensor]:
    """The tensors that the features of `spec` need, by name, on the CPU."""
    draw = random.Random(seed)
    noise = torch.tensor([draw.uniform(-0.25, 0.25) for _ in range(spec.num_q_heads)])
    tensors: dict[str, torch.Tensor] = {}
    visible = min(max(batch.kv_lens), spec.sliding_window or max(batch.kv_lens))
    if spec.has_fp8_cache:
        turn = (draw.randrange(3) + torch.arange(spec.num_kv_heads)) % 3
        tensors |= {"k_scale": torch.tensor(_K_SCALES)[turn], "v_scale": torch.tensor(_V_SCALES)[turn]}
        if spec.has_fp8_queries:
            tensors["q_scale"] = query_size(spec) * torch.tensor(_Q_SCALES)[turn]
    heads = torch.arange(spec.num_q_heads)
    if spec.has_alibi:
        gentle = (1 + heads % 3 + noise) / visible
        # Press et al. 2022, section 3: a geometric sequence that starts at, and has the ratio, 2^(-8 / heads).
        steep = 2.0 ** (-8 * (heads + 1) / spec.num_q_heads)
        tensors["alibi_slopes"] = torch.where(heads % 5 == 4, steep, gentle)
    if spec.has_sinks:
        scores = needle_scores(spec, _needle_scale(spec, tensors)).float().repeat_interleave(spec.group_size)
        of_needles = scores + math.log(1 + min(visible / LATTICE_STEP, LATTICE_KEYS))
        tensors["sinks"] = torch.where(heads % 2 == 0, of_needles, math.log(visible) + 0.5) + 4 * noise
    if spec.has_tree_mask:
        words = [word for query_len, _ in batch.sequences for word in tree_words(query_len, draw)]
        tensors["tree_mask"] = torch.tensor(words, dtype=torch.int64)
    return tensors


def _needle_scale(spec: AttentionSpec, features: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The factor by which fp8 scales change products of queries of `query_size` with keys as the cache holds them."""
    if "q_scale" in features:
        return features["q_scale"] / query_size(spec) * features["k_scale"]
    return features.get("k_scale")


def _unused_slots(batch: Batch, page_size: int) -> Keys:
    return Keys.of([
        (s, torch.arange(n if batch.sequences[s][0] else 0, math.ceil(n / page_size) * page_size), 0)
        for s, n in enumerate(batch.kv_lens)
    ])


def _block_table(batch: Batch, page_size: int, seed: int, shared_prefix: int) -> tuple[torch.Tensor, int]:
    """The block table and the number of physical pages."""
    counts = [math.ceil(kv_len / page_size) for kv_len in batch.kv_lens]
    prefix = shared_prefix // page_size
    sharing = [row for row, (q, c) in enumerate(batch.sequences) if q and c >= prefix * page_size]
    shared = [prefix if row in sharing[1:] else 0 for row in range(batch.num_seqs)]
    starts = list(itertools.accumulate((c - s for c, s in zip(counts, shared, strict=True)), initial=1))
    order = 1 + torch.randperm(starts[-1] - 1, generator=torch.Generator().manual_seed(seed))
    table = torch.zeros(batch.num_seqs, max(counts) + 1, dtype=torch.int32)
    for row, (start, count) in enumerate(zip(starts, counts, strict=False)):
        table[row, shared[row] : count] = order[start - 1 : start - 1 + count - shared[row]]
        if shared[row]:
            table[row, :prefix] = table[sharing[0], :prefix]
    return table, starts[-1] + 1


def _guarded(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, room: int) -> torch.Tensor:
    """An empty tensor whose rows have `room` elements of NaN after them."""
    storage = torch.empty(*shape[:-1], shape[-1] + room, dtype=dtype, device=device)
    storage[..., shape[-1] :] = torch.nan
    return storage[..., : shape[-1]]


def _random(dtype: str, shape: tuple[int, ...], generator: torch.Generator, room: int) -> torch.Tensor:
    tensor = _guarded(getattr(torch, dtype), shape, generator.device, room)
    if tensor.element_size() > 1:
        return tensor.normal_(generator=generator)
    # Torch draws no numbers in 8 bits: draw them in float16, in parts, so that they are never held all at once.
    step = max(1, _CHUNK // math.prod(shape[1:]))
    for start in range(0, shape[0], step):
        part = tensor[start : start + step]
        part.copy_(torch.empty(part.shape, dtype=torch.float16, device=part.device).normal_(generator=generator))
    return tensor


def _random_cache(
    spec: AttentionSpec, pages: tuple[int, int], generator: torch.Generator, packed: bool, room: int
) -> tuple[torch.Tensor, torch.Tensor]:
    k_dim, v_dim = spec.head_dim, spec.value_dim
    if packed:
        by_slot = _random(
            spec.cache_dtype, (pages[0], spec.num_kv_heads, pages[1], k_dim + v_dim), generator, room
        ).transpose(1, 2)
        return by_slot[..., :k_dim], by_slot[..., k_dim:]
    k, v = (_random(spec.cache_dtype, (*pages, spec.num_kv_heads, dim), generator, room) for dim in (k_dim, v_dim))
    return k, v


def _places(keys: Keys, block_table: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The physical page and the slot of each key, as indices into a cache."""
    page_size = cache.shape[1]
    pages = block_table[keys.sequence, keys.position // page_size].long()
    return pages.to(cache.device), (keys.position % page_size).to(cache.device)
