from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_tuner.kernel_templates import reference
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.inputs import make_tensors
from attention_tuner.kernel_templates.reference import attention, gather, paged_attention
from attention_tuner.kernel_templates.spec import AttentionSpec

SIZES = st.tuples(st.integers(1, 20), st.integers(0, 40), st.integers(1, 3), st.sampled_from([1, 2, 7]))


def inputs(query_len: int, context_len: int, kv_heads: int, group: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    kv_len = query_len + context_len
    shapes = ((query_len, kv_heads * group, 16), (kv_len, kv_heads, 16), (kv_len, kv_heads, 16))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context_len: int, scale: float) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    mask = torch.ones(q.shape[0], k.shape[1], dtype=torch.bool).tril(context_len)
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask, scale=scale)
    return out.transpose(0, 1)


def torch_lse(q: torch.Tensor, k: torch.Tensor, context_len: int, scale: float) -> torch.Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("ihd,jhd->ihj", q, k) * scale
    hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(context_len + 1)
    return torch.logsumexp(scores.masked_fill(hidden[:, None], -torch.inf), dim=-1)


@settings(deadline=None, max_examples=60)
@given(SIZES, st.sampled_from([0.05, 0.25, 1.0]), st.sampled_from([30, 400, reference.MAX_SCORES]))
def test_attention_is_torchs_in_blocks_of_any_size(sizes: tuple[int, int, int, int], scale: float, limit: int) -> None:
    q, k, v = inputs(*sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "MAX_SCORES", limit)
        out, lse = attention(q, k, v, sizes[1], scale)
    torch.testing.assert_close(out, torch_attention(q, k, v, sizes[1], scale), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch_lse(q, k, sizes[1], scale), rtol=1e-12, atol=1e-12)


def test_float32_stays_float32_and_close() -> None:
    q, k, v = inputs(9, 30, 2, 2)
    out, lse = attention(q.float(), k.float(), v.float(), 30, 0.25)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(out.double(), torch_attention(q, k, v, 30, 0.25), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_what_eager_attention_rounds(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs(6, 50, 1, 2))
    out, lse = attention(q, k, v, 50, 0.25)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    scores = torch.stack([q[:, head] @ k[:, 0].T for head in range(2)]) * 0.25
    scores = scores.masked_fill(torch.ones(6, 56, dtype=torch.bool).triu(51), -torch.inf)
    expected = torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype) @ v[:, 0]
    torch.testing.assert_close(out, expected.transpose(0, 1), rtol=torch.finfo(dtype).eps, atol=1e-3)
    error = (out.double() - torch_attention(*(x.double() for x in (q, k, v)), 50, 0.25)).abs().max()
    assert torch.finfo(dtype).eps / 50 < error < 4 * torch.finfo(dtype).eps


def test_tf32_is_forbidden_inside_and_restored_after(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(2, 3, 1, 1)
    seen: list[object] = []
    product = torch.bmm

    def watched(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return product(first, second)

    monkeypatch.setattr(torch, "bmm", watched)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        attention(q, k, v, 3, 0.25)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert set(seen) == {"ieee"}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page_size", [16, 48])
def test_paged_attention_is_each_sequences_own(page_size: int, packed: bool) -> None:
    spec = AttentionSpec(6, 2, 64)
    batch = Batch.parse("1x5@60,2x1@47,1x20@0")
    tensors = make_tensors(spec, batch, page_size, "cpu", seed=3, packed=packed)
    out, lse = paged_attention(tensors, batch, spec, torch.float64)
    assert out.shape == tensors.q.shape
    assert lse.shape == tensors.q.shape[:2]
    start = 0
    for index, (query_len, context_len) in enumerate(batch.sequences):
        rows = slice(start, start + query_len)
        places = [divmod(position, page_size) for position in range(query_len + context_len)]
        pages = tensors.block_table[index].tolist()
        k, v = (
            torch.stack([cache[pages[page], slot] for page, slot in places]).double()
            for cache in (tensors.k_cache, tensors.v_cache)
        )
        expected = torch_attention(tensors.q[rows].double(), k, v, context_len, spec.softmax_scale)
        torch.testing.assert_close(out[rows], expected, rtol=1e-10, atol=1e-10)
        start += query_len


def test_gather_reads_the_pages_in_the_order_of_the_table() -> None:
    cache = torch.arange(4 * 16, dtype=torch.float32).view(4, 16, 1, 1)
    keys = gather(cache, torch.tensor([2, 0, 3], dtype=torch.int32), 20).flatten()
    assert keys.tolist() == [*range(32, 48), *range(4)]
