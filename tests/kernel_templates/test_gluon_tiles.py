"""Reads the machine code of the kernel for Hopper, which a child process compiles: this one interprets."""

import os
import re
import subprocess
import sys
from pathlib import Path

from gluon_samples import SPEC, variant_of
from triton import knobs

COMPILE = """
import sys
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.compiler import compile_variant
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
compile_variant(Variant.parse(sys.argv[1]), AttentionSpec.parse(sys.argv[2]), TARGETS["sm_90"], Batch.parse("1x64@100"))
"""
# Of a tile of 64 rows and 128 keys by 128 threads.
EXPONENTIALS = 64


def machine_code(folder: Path) -> str:
    """The disassembled kernel, compiled in a cache of its own."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE, variant_of(128).key(), SPEC.key()]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=240)
    (cubin,) = folder.rglob("gluon_attention_kernel.cubin")
    tool = str(knobs.nvidia.nvdisasm.path)  # pyright: ignore[reportUnknownMemberType]
    return subprocess.run([tool, "-c", str(cubin)], check=True, capture_output=True, text=True).stdout


def test_a_softmax_runs_during_a_product_and_no_branch_lies_between(tmp_path: Path):
    code = machine_code(tmp_path)
    # From where one of two products is over to where both are: in the loop of each consumer.
    waits = r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1 ;(.*?)WARPGROUP\.DEPBAR\.LE gsb0, 0x0 ;"
    between = re.findall(waits, code, re.DOTALL)
    assert len(between) == 2
    for instructions in between:
        assert len(re.findall(r"MUFU\.EX2", instructions)) >= EXPONENTIALS
        # Neither a branch, at which ptxas would wait, nor a spill.
        assert not re.search(r"\b(BRA|LDL|STL)\b", instructions)
