"""Compiles a variant before its first run; no GPU need be present.

The launcher itself runs on tiny tensors, with a driver that stands in for the target. So Triton's cache gets the code
under the key that the real launch looks up.
"""

# pyright: basic
from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ..batch import Batch
from ..errors import TunerError
from ..gpu import Gpu
from ..outcome import StaticFacts
from ..spec import AttentionSpec
from ..variant import Variant
from .launcher import Launcher, Settings, Tensors, make_launcher, query_start_locs


class _TargetDriver:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, gpu: Gpu) -> None:
        self._target = GPUTarget("cuda", gpu.arch, 32)

    def get_current_target(self) -> GPUTarget:
        """The target that Triton compiles for."""
        return self._target

    def get_current_device(self) -> int:
        """A device number of the target's own."""
        # A kernel remembers the target of each device it was compiled for, so each target has a made-up device.
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0


def compile_variant(
    variant: Variant, spec: AttentionSpec, gpu: Gpu, batch: Batch, lse: bool = False
) -> StaticFacts:
    """Compile every kernel of `variant` for `gpu`; with `lse`, kernels that write the log-sum-exp.

    Returns the largest figures of any attention kernel.
    Raises `VariantError` for a variant that is not valid there, `TunerError` in a process that interprets, and whatever
    the compiler raises.
    """
    if knobs.runtime.interpret:
        raise TunerError("a process that interprets Triton kernels cannot compile them")
    launcher = make_launcher(variant, spec, gpu, Settings(compile_only=True))
    driver.set_active(_TargetDriver(gpu))  # pyright: ignore[reportArgumentType]
    launcher.plan(batch, "cpu")
    launcher.run(_tiny_tensors(variant, spec, batch, lse))
    return _static_facts(launcher)


def _tiny_tensors(variant: Variant, spec: AttentionSpec, batch: Batch, lse: bool) -> Tensors:
    """Tiny tensors with the dtypes, alignments and strides of real ones."""
    dtype, q_dtype, cache_dtype = (getattr(torch, name) for name in (spec.dtype, spec.query_dtype, spec.cache_dtype))
    slots = 2, variant.page_size, spec.num_kv_heads
    per_head = torch.zeros(spec.num_q_heads)
    scale = torch.zeros(spec.num_kv_heads) if spec.has_fp8_cache else None
    return Tensors(
        q=torch.zeros(1, spec.num_q_heads, spec.head_dim, dtype=q_dtype),
        k_cache=torch.zeros(*slots, spec.head_dim, dtype=cache_dtype),
        v_cache=torch.zeros(*slots, spec.value_dim, dtype=cache_dtype),
        block_table=torch.zeros(batch.num_seqs, 1, dtype=torch.int32),
        query_start_loc=torch.tensor(query_start_locs(batch), dtype=torch.int32),
        kv_lens=torch.tensor(batch.kv_lens, dtype=torch.int32),
        out=torch.empty(1, spec.num_q_heads, spec.value_dim, dtype=dtype),
        sinks=per_head if spec.has_sinks else None,
        alibi_slopes=per_head if spec.has_alibi else None,
        q_scale=scale if spec.has_fp8_queries else None,
        k_scale=scale,
        v_scale=scale,
        tree_mask=torch.zeros(1, dtype=torch.int64) if spec.has_tree_mask else None,
        lse=torch.empty(1, spec.num_q_heads) if lse else None,
    )


def _static_facts(launcher: Launcher) -> StaticFacts:
    # Leave out the reduction: it is small, and cuobjdump takes a while for each kernel.
    kernels = [one for one in launcher.compiled if one.metadata.name != "combine_kernel"]
    usage = [_resource_usage(kernel.asm["cubin"]) for kernel in kernels]
    registers, stack_bytes = (None if None in column else max(column) for column in zip(*usage, strict=True))
    ptx = "".join(kernel.asm["ptx"] for kernel in kernels)
    found = (name for name in ("tcgen05.mma", "wgmma.mma_async", "mma.sync") if name in ptx)
    code = hashlib.sha256(b"".join(one.asm["cubin"] for one in launcher.compiled)).hexdigest()[:16]
    return StaticFacts(max(k.metadata.shared for k in kernels), registers, stack_bytes, next(found, ""), code)


def _resource_usage(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers and stack bytes per thread; None, with a warning, where cuobjdump does not give them.

    Triton itself knows them only after a driver has loaded the kernel.
    """
    try:
        # Finding the tool raises a RuntimeError where there is none.
        tool: Any = knobs.nvidia.cuobjdump
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(cubin)
            command = [tool.path, "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        warnings.warn(f"registers and stack are not known, because cuobjdump cannot be used: {type(error).__name__}",
                      stacklevel=2)
        return None, None
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    if registers is None or stack is None:
        warnings.warn("registers and stack are not known, because cuobjdump did not say", stacklevel=2)
        return None, None
    return int(registers[1]), int(stack[1])
