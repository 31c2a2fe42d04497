"""vLLM's Triton backend: its kernel with the backend's settings, outside its engine."""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attention_tuner.kernel_templates.launch.launcher import Tensors
from attention_tuner.kernel_templates.task import Task

from .contender import Contender, Loaded, MissingError, Peer, Places, reason_of

MODULE = "vllm.v1.attention.ops.triton_unified_attention"
# vllm/v1/attention/backends/triton_attn.py: MIN_LAUNCH_GRID_SIZE_2D, NUM_PAR_SOFTMAX_SEGMENTS, and MAX_3D_QUERY_LEN
# of the kernel's module.
MIN_LAUNCH_GRID_SIZE_2D = 128
NUM_PAR_SOFTMAX_SEGMENTS = 16
MAX_3D_QUERY_LEN = 8


class VllmTriton(Contender):
    """`unified_attention` with the arguments that vLLM's backend gives it."""

    def __init__(self, task: Task, unified_attention: Any) -> None:
        super().__init__(task)
        self._unified_attention = unified_attention
        self._threshold = MIN_LAUNCH_GRID_SIZE_2D // task.spec.num_kv_heads
        self._scratch: tuple[torch.Tensor, ...] = ()

    def prepare(self, tensors: Tensors) -> None:
        """Make the scratch of the split-KV decode kernel once, as the backend does."""
        if not self._scratch:
            rows = self._threshold * min(self.max_query, MAX_3D_QUERY_LEN)
            shape = (rows, self.spec.num_q_heads, NUM_PAR_SOFTMAX_SEGMENTS)
            empty = functools.partial(torch.empty, dtype=torch.float32, device=tensors.q.device)
            self._scratch = empty((*shape, self.spec.head_dim)), empty(shape), empty(shape)

    def run(self, tensors: Tensors) -> Any:
        """Launch the kernel, and the reduction if KV is split."""
        output, maxima, sums = self._scratch
        self._unified_attention(
            q=tensors.q, k=tensors.k_cache, v=tensors.v_cache, out=tensors.out, cu_seqlens_q=tensors.query_start_loc,
            max_seqlen_q=self.max_query, seqused_k=tensors.kv_lens, max_seqlen_k=self.max_kv,
            softmax_scale=self.spec.softmax_scale, causal=True, window_size=(-1, -1), block_table=tensors.block_table,
            softcap=0, q_descale=None, k_descale=None, v_descale=None, seq_threshold_3D=self._threshold,
            num_par_softmax_segments=NUM_PAR_SOFTMAX_SEGMENTS, softmax_segm_output=output, softmax_segm_max=maxima,
            softmax_segm_expsum=sums,
        )  # fmt: skip


def version_of(folder: Path) -> str:
    """vLLM's version, from the `vllm-*.dist-info` in `folder`."""
    found = sorted(folder.glob("vllm-*.dist-info"))
    return found[-1].name.split("-")[1].removesuffix(".dist") if found else "of unknown version"


def stand_ins(folder: Path) -> dict[str, ModuleType]:
    """Substitutes for the modules that the kernel's file imports, for a host without vLLM."""
    import triton

    class KVQuantMode(enum.IntEnum):
        NONE, FP8_PER_TENSOR, INT8_PER_TOKEN_HEAD, FP8_PER_TOKEN_HEAD, INT4_PER_TOKEN_HEAD = range(5)

    class Platform:
        def fp8_dtype(self) -> torch.dtype:
            return torch.float8_e4m3fn

        def is_device_capability_family(self, family: int) -> bool:
            return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] * 10 == family

    class Logger(logging.LoggerAdapter[logging.Logger]):
        def debug_once(self, message: str, *arguments: object) -> None:
            self.debug(message, *arguments)

    def init_logger(name: str) -> Logger:
        return Logger(logging.getLogger(name))

    contents: dict[str, dict[str, Any]] = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": init_logger},
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": KVQuantMode},
    }
    packages = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops")
    modules = {name: ModuleType(name) for name in (*packages, *contents)}
    for name, module in modules.items():
        vars(module).update(contents.get(name, {}))
        # Other libraries may test if vllm is installed, which fails for a module without a spec.
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name in packages)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
        if name in packages:
            module.__path__ = [str(folder.joinpath(*name.split(".")))]
    return modules


def _load(places: Places) -> Loaded:
    folder = places.vllm
    if MODULE not in sys.modules and importlib.util.find_spec("vllm") is None:
        if folder is None:
            raise MissingError("vllm is not installed, and no folder of an unpacked wheel was named (--vllm)")
        if not folder.joinpath(*MODULE.split(".")).with_suffix(".py").is_file():
            raise MissingError(f"there is no {MODULE} in {folder}")
        sys.modules.update(stand_ins(folder))
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise MissingError(reason_of(error)) from error
    version = version_of(folder) if folder else importlib.metadata.version("vllm")
    return Loaded(functools.partial(VllmTriton, unified_attention=module.unified_attention), f"vLLM {version}")


PEERS = (Peer("vllm_triton", "paged cache; the defaults of vLLM's Triton backend, outside its engine", _load),)
