"""Compiles in child processes: this one interprets."""

import os
import subprocess
import sys
from pathlib import Path

from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.heuristic import candidates
from attention_tuner.kernel_templates.spec import AttentionSpec

SPEC = AttentionSpec(4, 2, 64)
BATCH = Batch.parse("1x64@100,2x1@100")
COMPILE = """
import os, sys
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.launch.compiler import compile_variant
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
spec, batch = AttentionSpec.parse(sys.argv[1]), Batch.parse(sys.argv[2])
for variant in sys.argv[3:]:
    compile_variant(Variant.parse(variant), spec, TARGETS["sm_90"], batch)
print(*sorted(os.listdir(os.environ["TRITON_CACHE_DIR"])))
"""
SETTLE = """
from attention_tuner.kernel_templates.launch.launcher import settle_cache_keys
from attention_tuner.kernel_templates.triton_family import kernel
from attention_tuner.kernel_templates.triton_family.launchers import FusedLauncher
settle_cache_keys(object.__new__(FusedLauncher))
def constants(function):
    return {name for name, _ in function.used_global_vals}
print(kernel.attention_kernel.hash is not None, constants(kernel.attend) <= constants(kernel.attention_kernel))
"""


def child(code: str, folder: Path, *arguments: str) -> list[str]:
    """What a process prints that compiles into a cache of its own."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, check=True, capture_output=True,
                          text=True, timeout=240)  # fmt: skip
    return done.stdout.split()


def variant_of(template: str) -> str:
    likely = candidates(SPEC, BatchBucket.of(BATCH), 16, TARGETS["sm_90"])
    return next(variant.key() for variant in likely if variant.template == template)


def test_what_one_process_compiled_another_finds_whatever_it_compiled_before(tmp_path: Path):
    fused, persistent = variant_of("fused"), variant_of("persistent")
    first = child(COMPILE, tmp_path, SPEC.key(), str(BATCH), fused, persistent)
    assert first
    assert child(COMPILE, tmp_path, SPEC.key(), str(BATCH), persistent, fused) == first


def test_the_keys_of_what_a_kernel_calls_are_known_before_it_is_compiled(tmp_path: Path):
    assert child(SETTLE, tmp_path) == ["True", "True"]
