from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_tuner.runtime.merge import merge

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 40))


def part(scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Attention with these scores [num_tokens, num_q_heads, keys] over values [keys, num_q_heads, dim], and its lse."""
    columns = scores if sinks is None else torch.cat([scores, sinks.expand(*scores.shape[:2])[..., None]], dim=-1)
    lse = columns.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0)
    return torch.einsum("thk,khd->thd", weights, values), lse


def drawn(sizes: tuple[int, int, int], size: float, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    tokens, heads, keys = sizes
    generator = torch.Generator().manual_seed(tokens + 100 * heads + 1000 * keys)
    scores = size * torch.randn(tokens, heads, keys, generator=generator, dtype=dtype)
    values = torch.randn(keys, heads, 8, generator=generator, dtype=dtype)
    return scores, values, torch.randn(heads, generator=generator, dtype=dtype)


@settings(deadline=None, max_examples=100)
@given(SIZES, st.floats(0, 1), st.sampled_from([0.5, 10.0, 1000.0]), st.sampled_from(["none", "first", "second"]))
def test_two_parts_of_the_keys_are_the_whole(sizes: tuple[int, int, int], cut: float, size: float, sink: str) -> None:
    scores, values, sinks = drawn(sizes, size)
    keys = round(cut * sizes[2])
    first = part(scores[..., :keys], values[:keys], sinks if sink == "first" else None)
    second = part(scores[..., keys:], values[keys:], sinks if sink == "second" else None)
    out, lse = merge(*first, *second)
    expected, expected_lse = part(scores, values, None if sink == "none" else sinks)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(SIZES, st.lists(st.floats(0, 1), min_size=2, max_size=2))
def test_the_order_of_three_parts_does_not_matter(sizes: tuple[int, int, int], cuts: list[float]) -> None:
    scores, values, _ = drawn(sizes, 3.0)
    low, high = sorted(round(cut * sizes[2]) for cut in cuts)
    a, b, c = (part(scores[..., s], values[s]) for s in (slice(0, low), slice(low, high), slice(high, None)))
    for left, right in zip(merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_result_is_rounded_once(dtype: torch.dtype) -> None:
    scores, values, _ = drawn((5, 2, 30), 2.0, torch.float32)
    (out_a, lse_a), (out_b, lse_b) = (part(scores[..., s], values[s]) for s in (slice(0, 11), slice(11, 30)))
    out, lse = merge(out_a.to(dtype), lse_a, out_b.to(dtype), lse_b)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    whole, _ = part(scores, values)
    assert (out.double() - whole).abs().max() <= 2 * torch.finfo(dtype).eps * values.abs().max()


def test_a_part_that_sees_nothing_is_not_looked_at() -> None:
    scores, values, _ = drawn((4, 2, 6), 1.0)
    out, lse = part(scores, values)
    empty = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    for merged in (merge(out, lse, *empty), merge(*empty, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)


def test_two_parts_that_see_nothing_give_nothing() -> None:
    empty = torch.full((3, 2, 8), torch.nan), torch.full((3, 2), -torch.inf)
    out, lse = merge(*empty, *empty)
    assert not out.any()
    assert bool((lse == -torch.inf).all())
