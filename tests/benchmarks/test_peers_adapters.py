"""The adapters, with libraries that stand in for those that need a GPU: each works out attention from what it is given,
so that an argument in the wrong place gives a wrong answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.oracle.reference import attention
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.tuner.measure.check import Checker

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

from peerbench import flash_attn_3, flash_attn_4, flash_infer, registry, torch_attention, vllm_triton  # noqa: E402
from peerbench.contender import Contender, Loaded, MissingError, Places, RefusedError  # noqa: E402

SPEC = AttentionSpec(4, 2, 64, "float16")
HYBRID = Batch.parse("1x20@35,2x1@40,1x1@64,2x3@10,1x9@0")
DECODE = Batch.parse("2x1@40,1x1@3")
PAGE_SIZE = 16


def task(batch: Batch = HYBRID) -> Task:
    return Task(SPEC, batch, PAGE_SIZE)


def passes(contender: Contender) -> bool:
    """True if a contender's output is right, as the bench judges it."""
    checker = Checker(SPEC, contender.batch, PAGE_SIZE, "cpu")
    tensors = checker.tensors
    for cache in (tensors.k_cache, tensors.v_cache):
        cache.nan_to_num_(nan=0.0)
    contender.prepare(tensors)
    tensors.out.fill_(torch.nan)
    returned = contender.run(tensors)
    return checker.judge(contender.output(tensors, returned)).passed


def attend(q: torch.Tensor, caches: Sequence[torch.Tensor], pages: Sequence[torch.Tensor], query_starts: torch.Tensor,
           kv_lens: Sequence[int], scale: float) -> torch.Tensor:  # fmt: skip
    """Attention over lists of pages."""
    out = torch.full_like(q, torch.nan)
    for index, kv_len in enumerate(kv_lens):
        first, last = int(query_starts[index]), int(query_starts[index + 1])
        k, v = (cache[pages[index].long()].flatten(0, 1)[:kv_len] for cache in caches)
        out[first:last], _ = attention(q[first:last], k, v, kv_len - (last - first), scale)
    return out


class Fa3:
    """`torch.ops._vllm_fa3_C`, by the names and order of its schema."""

    def get_scheduler_metadata(
        self, batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads: int, num_heads_k: int, headdim: int,
        headdim_v: int, qkv_dtype: torch.dtype, seqused_k: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: None,
        cu_seqlens_k_new: None, seqused_q: None, leftpad_k: None, page_size: int, max_seqlen_k_new: int,
        is_causal: bool, window_size_left: int, window_size_right: int, has_softcap: bool, num_splits: int,
        pack_gqa: None, sm_margin: int,
    ) -> torch.Tensor:  # fmt: skip
        assert (batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v) == (
            7, 20, 65, 4, 2, 64, 64)
        assert (qkv_dtype, page_size, is_causal, window_size_left, window_size_right, has_softcap) == (
            torch.float16, 16, True, -1, -1, False)
        return torch.tensor([num_splits])

    def fwd(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_new: None, v_new: None, q_v: None, out: torch.Tensor,
        cu_seqlens_q: torch.Tensor, cu_seqlens_k: None, cu_seqlens_k_new: None, seqused_q: None,
        seqused_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, page_table: torch.Tensor, kv_batch_idx: None,
        leftpad_k: None, rotary_cos: None, rotary_sin: None, seqlens_rotary: None, q_descale: None, k_descale: None,
        v_descale: None, softmax_scale: float, is_causal: bool, window_size_left: int, window_size_right: int,
        softcap: float, is_rotary_interleaved: bool, scheduler_metadata: torch.Tensor, num_splits: int, pack_gqa: None,
        sm_margin: int, s_aux: None, cp_world_size: int, cp_rank: int, cp_tot_seqused_k: None,
    ) -> list[torch.Tensor]:  # fmt: skip
        assert is_causal
        assert (window_size_left, window_size_right, softcap, cp_world_size) == (-1, -1, 0.0, 1)
        assert scheduler_metadata.tolist() == [num_splits]
        kv_lens = seqused_k.tolist()
        pages = [page_table[i, : -(-kv_len // PAGE_SIZE)] for i, kv_len in enumerate(kv_lens)]
        out.copy_(attend(q, (k, v), pages, cu_seqlens_q, kv_lens, softmax_scale))
        return [out]


@pytest.mark.parametrize("num_splits", [0, 1])
def test_flash_attn_3_is_right_by_a_stand_in(num_splits: int) -> None:
    assert passes(flash_attn_3.FlashAttention3(task(), Fa3(), num_splits))


def test_flash_attn_4_is_right_by_a_stand_in() -> None:
    def flash_attn_varlen_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor, max_seqlen_q: int,
        max_seqlen_k: int, seqused_k: torch.Tensor, page_table: torch.Tensor, softmax_scale: float, causal: bool,
        num_splits: int,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        assert causal
        kv_lens = seqused_k.tolist()
        pages = [page_table[i, : -(-kv_len // PAGE_SIZE)] for i, kv_len in enumerate(kv_lens)]
        return attend(q, (k, v), pages, cu_seqlens_q, kv_lens, softmax_scale), None

    assert passes(flash_attn_4.FlashAttention4(task(), flash_attn_varlen_func))


class Wrapper:
    """FlashInfer's three wrappers: they plan with the lists of pages, and run with those that they hold by then."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.options = options
        self._kv_indices = self._paged_kv_indices_buf = torch.empty(0)

    def keep(self, query_starts: torch.Tensor, page_starts: torch.Tensor, kv_lens: list[int], scale: float) -> None:
        assert query_starts.dtype == page_starts.dtype == torch.int32
        self.planned = query_starts, page_starts, kv_lens, scale

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        query_starts, page_starts, kv_lens, scale = self.planned
        indices = self._kv_indices if len(self._kv_indices) else self._paged_kv_indices_buf
        pages = [indices[page_starts[i] : page_starts[i + 1]] for i in range(len(kv_lens))]
        out.copy_(attend(q, caches, pages, query_starts, kv_lens, scale))


class BatchAttention(Wrapper):
    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, head_dim_vo: int, page_size: int, causal: bool,
        sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, causal) == (4, 2, 64, 64, 16, True)
        self.keep(qo_indptr, kv_indptr, kv_len_arr.tolist(), sm_scale)


def kv_lens_of(page_starts: torch.Tensor, last_page_len: torch.Tensor) -> list[int]:
    assert ((last_page_len > 0) & (last_page_len <= PAGE_SIZE)).all()
    return ((page_starts.diff() - 1) * PAGE_SIZE + last_page_len).tolist()


class BatchPrefill(Wrapper):
    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert (num_qo_heads, num_kv_heads, head_dim_qk, page_size, causal) == (4, 2, 64, 16, True)
        self.keep(qo_indptr, paged_kv_indptr, kv_lens_of(paged_kv_indptr, paged_kv_last_page_len), sm_scale)


class BatchDecode(Wrapper):
    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, sm_scale: float, q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (4, 2, 64, 16)
        query_starts = torch.arange(len(indptr), dtype=torch.int32)
        self.keep(query_starts, indptr, kv_lens_of(indptr, last_page_len), sm_scale)


FLASHINFER = SimpleNamespace(BatchAttention=BatchAttention, BatchPrefillWithPagedKVCacheWrapper=BatchPrefill,
                             BatchDecodeWithPagedKVCacheWrapper=BatchDecode)  # fmt: skip


def test_flashinfer_is_right_by_a_stand_in() -> None:
    assert passes(flash_infer.FlashInferAttention(task(), FLASHINFER))
    assert passes(flash_infer.FlashInferPrefill(task(), FLASHINFER, "fa3"))
    assert passes(flash_infer.FlashInferDecode(task(DECODE), FLASHINFER, use_tensor_cores=True))
    with pytest.raises(RefusedError, match="one query token"):
        flash_infer.FlashInferDecode(task(), FLASHINFER, use_tensor_cores=False)


def test_flashinfer_reads_the_pages_of_the_set_it_runs_on() -> None:
    contender = flash_infer.FlashInferPrefill(task(), FLASHINFER, "fa2")
    checkers = [Checker(SPEC, HYBRID, PAGE_SIZE, "cpu", seed) for seed in (0, 1)]
    assert not torch.equal(checkers[0].tensors.block_table, checkers[1].tensors.block_table)
    for checker in checkers:
        contender.prepare(checker.tensors)
    for checker in checkers:
        contender.run(checker.tensors)
        assert checker.judge(checker.tensors.out).passed
    contender.release(checkers[0].tensors)
    assert list(contender.made) == [id(checkers[1].tensors)]


def test_torch_varlen_is_right() -> None:
    def varlen_attn(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
        max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int],
    ) -> torch.Tensor:  # fmt: skip
        assert (max_q, max_k, window_size) == (20, 65, (-1, 0))
        assert cu_seq_k[-1] == len(key)
        # Keys back to back are pages of one token.
        pages = [torch.arange(int(cu_seq_k[i]), int(cu_seq_k[i + 1])) for i in range(len(cu_seq_k) - 1)]
        lengths = cu_seq_k.diff().tolist()
        return attend(query, (key[:, None], value[:, None]), pages, cu_seq_q, lengths, scale)

    assert passes(torch_attention.TorchVarlen(task(), varlen_attn))


@pytest.mark.parametrize("batch", [HYBRID, DECODE, Batch.parse("2x16@0"), Batch.parse("3x4@28")])
def test_sdpa_in_padded_groups_is_right(batch: Batch) -> None:
    from torch.nn.attention import SDPBackend

    contender = torch_attention.Sdpa(task(batch), SDPBackend.MATH)
    assert passes(contender)
    (groups,) = contender.made.values()
    assert len(groups) == len({query_len for query_len, _ in batch.sequences})
    # Only a whole prompt is causal by the backend's own rule, which aligns the first query with the first key.
    assert [group.is_causal for group in groups] == [group.rows.shape[1] == group.k.shape[2] for group in groups]


def test_flex_tells_sequences_apart_by_its_block_mask() -> None:
    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: Any, scale: float, enable_gqa: bool
              ) -> torch.Tensor:  # fmt: skip
        rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        mask = block_mask.mask_mod(0, 0, rows, keys)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)

    assert passes(torch_attention.Flex(task(), dense))


def test_vllm_gets_what_its_backend_gives_it() -> None:
    given: dict[str, Any] = {}

    def unified_attention(**arguments: Any) -> None:
        given.update(arguments)
        a = SimpleNamespace(**arguments)
        kv_lens = a.seqused_k.tolist()
        pages = [a.block_table[i, : -(-kv_len // PAGE_SIZE)] for i, kv_len in enumerate(kv_lens)]
        a.out.copy_(attend(a.q, (a.k, a.v), pages, a.cu_seqlens_q, kv_lens, a.softmax_scale))

    assert passes(vllm_triton.VllmTriton(task(), unified_attention))
    assert (given["seq_threshold_3D"], given["num_par_softmax_segments"]) == (64, 16)
    assert given["softmax_segm_output"].shape == (64 * 8, 4, 16, 64)
    assert given["softmax_segm_max"].shape == given["softmax_segm_expsum"].shape == (64 * 8, 4, 16)


def test_the_kernel_of_an_unpacked_wheel_is_found_by_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path.joinpath(*vllm_triton.MODULE.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(
        "import vllm.envs as envs\n"
        "from vllm.logger import init_logger\n"
        "from vllm.platforms import current_platform\n"
        "from vllm.triton_utils import tl, triton\n"
        "from vllm.v1.kv_cache_interface import KVQuantMode\n"
        "init_logger(__name__).debug_once('%s', tl.int32)\n"
        "def unified_attention():\n"
        "    size = current_platform.fp8_dtype().itemsize\n"
        "    return envs.VLLM_BATCH_INVARIANT, size, int(KVQuantMode.NONE), triton.cdiv(3, 2)\n"
    )
    (tmp_path / "vllm-1.2.3.dist-info").mkdir()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    loaded = vllm_triton.PEERS[0].load(Places(tmp_path))
    contender: Any = loaded.make(task())
    assert contender._unified_attention() == (False, 1, 0, 2)
    assert loaded.version == "vLLM 1.2.3"


def test_a_missing_peer_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.cute", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    found = registry.load(registry.PEERS, Places(tmp_path))
    reasons = {name: each for name, each in found.items() if not isinstance(each, Loaded)}
    assert "_vllm_fa3_C.abi3.so" in reasons["flash_attn_3"]
    assert reasons["flash_attn_4"].startswith("ModuleNotFoundError")
    assert reasons["flashinfer_fa2"].startswith("ModuleNotFoundError")
    library = tmp_path / flash_attn_3.LIBRARY
    library.parent.mkdir(parents=True)
    library.write_bytes(b"no library")
    with pytest.raises(MissingError, match="OSError"):
        flash_attn_3.PEERS[0].load(Places(tmp_path))
    with pytest.raises(MissingError, match="--vllm"):
        flash_attn_3.PEERS[0].load(Places())


def test_a_peer_that_breaks_while_it_is_imported_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ModuleType("flash_attn.cute")
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", broken)
    (reason,) = registry.load(flash_attn_4.PEERS, Places()).values()
    assert isinstance(reason, str)
    assert reason.startswith("ImportError: cannot import name 'flash_attn_varlen_func'")
