"""Gluon functions whose names differ between Triton 3.6 and 3.9."""

# pyright: basic, reportAttributeAccessIssue=false
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Copy to shared memory: a tile through a TMA descriptor, and single elements behind pointers.
load_to_shared = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# Wait for all threads of one worker.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
