"""Calls of vLLM's function as its own test makes them, with the expected output."""

from __future__ import annotations

from typing import Any

import torch

FP8 = torch.float8_e4m3fn
SEGMENTS = 16


def expected(
    call: dict[str, Any], query_lens: list[int], kv_lens: list[int], k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Eager attention in float32 with the arguments of `call`, over caches `k` and `v` in the dtype of the queries."""
    outputs: list[torch.Tensor] = []
    for index, (query, kv_len) in enumerate(zip(call["q"].float().split(query_lens), kv_lens, strict=True)):
        pages = call["block_table"][index, : -(-kv_len // k.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1)[:kv_len].float() for cache in (k, v))
        group = query.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, 1)) * call["softmax_scale"]
        if call["softcap"]:
            scores = call["softcap"] * torch.tanh(scores / call["softcap"])
        position = torch.arange(kv_len - len(query), kv_len, device=query.device)[:, None]
        key = torch.arange(kv_len, device=query.device)
        if call.get("alibi_slopes") is not None:
            scores = scores + call["alibi_slopes"].float()[:, None, None] * (key - position)
        visible = key <= position
        if call["window_size"][0] >= 0:
            visible = visible & (key >= position - call["window_size"][0])
        scores = scores.masked_fill(~visible, -torch.inf)
        if call.get("sinks") is not None:
            sinks = call["sinks"].float()[:, None, None].expand(-1, len(query), 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1)))
    return torch.cat(outputs)


def call_of(
    seq_lens: list[tuple[int, int]], num_heads: tuple[int, int], head_size: int, device: str, *,
    sliding_window: int | None = None, soft_cap: float | None = None, fp8: bool = False, fp8_queries: bool = False,
    num_blocks: int = 64, seq_threshold: int = 0,
) -> tuple[dict[str, Any], torch.Tensor]:  # fmt: skip
    """Make the call of vLLM's test for sequences (query tokens, keys), and its expected output.

    With `fp8` the cache is in 8 bits, with `fp8_queries` the queries are too.
    """
    torch.manual_seed(0)
    query_lens, kv_lens = [q for q, _ in seq_lens], [kv for _, kv in seq_lens]
    num_q_heads, num_kv_heads = num_heads
    q = torch.randn(sum(query_lens), num_q_heads, head_size, dtype=torch.bfloat16, device=device)
    k = torch.randn(num_blocks, 16, num_kv_heads, head_size, dtype=torch.bfloat16, device=device)
    v = torch.randn_like(k)
    pages = -(-max(kv_lens) // 16)
    scratch = (seq_threshold, num_q_heads, SEGMENTS)
    call: dict[str, Any] = {
        "q": q, "k": k, "v": v, "out": torch.full_like(q, torch.nan),
        "cu_seqlens_q": torch.tensor([0, *query_lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32),
        "seqused_k": torch.tensor(kv_lens, dtype=torch.int32, device=device),
        "max_seqlen_q": max(query_lens), "max_seqlen_k": max(kv_lens), "softmax_scale": head_size**-0.5,
        "causal": True, "window_size": (-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        "block_table": torch.randint(0, num_blocks, (len(seq_lens), pages), dtype=torch.int32, device=device),
        "softcap": 0 if soft_cap is None else soft_cap, "q_descale": None, "k_descale": None, "v_descale": None,
        "seq_threshold_3D": seq_threshold, "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": torch.empty(*scratch, 256, device=device),
        "softmax_segm_max": torch.empty(scratch, device=device),
        "softmax_segm_expsum": torch.empty(scratch, device=device), "kv_quant_mode": 0,
    }  # fmt: skip
    wide = call
    if fp8 or fp8_queries:
        shape = (len(seq_lens), num_kv_heads)
        call |= {"k": (k / 0.5).to(FP8), "v": (v / 0.25).to(FP8), "k_descale": torch.full(shape, 0.5, device=device),
                 "v_descale": torch.full(shape, 0.25, device=device), "kv_quant_mode": 1}  # fmt: skip
        k, v = call["k"].float() * 0.5, call["v"].float() * 0.25
    if fp8_queries:
        call |= {"q": (q / 0.5).to(FP8), "q_descale": torch.full((1,), 0.5, device=device)}
        wide = call | {"q": call["q"].float() * 0.5}
    return call, expected(wide, query_lens, kv_lens, k, v)


def right(call: dict[str, Any], expected: torch.Tensor) -> None:
    torch.testing.assert_close(call["out"].float(), expected, atol=1.5e-2, rtol=1e-2)
