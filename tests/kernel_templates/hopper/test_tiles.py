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
from attention_tuner.kernel_templates.launch.compiler import compile_variant
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
compile_variant(Variant.parse(sys.argv[1]), AttentionSpec.parse(sys.argv[2]), TARGETS["sm_90"], Batch.parse("1x64@100"))
"""
# Of the scores and of the values: tiles of 64 rows, 128 keys and 128 dimensions, 16 of them in each instruction.
PRODUCTS = 2 * 8
# Those of such a tile that each of 128 threads takes.
EXPONENTIALS = 64


def machine_code(folder: Path) -> str:
    """The disassembled kernel, compiled in a cache of its own."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE, variant_of(128).key(), SPEC.key()]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=240)
    (cubin,) = folder.rglob("gluon_attention_kernel.cubin")
    tool = str(knobs.nvidia.nvdisasm.path)  # pyright: ignore[reportUnknownMemberType]
    return subprocess.run([tool, "-c", str(cubin)], check=True, capture_output=True, text=True).stdout


def test_both_consumers_start_the_products_of_a_tile_in_turns(tmp_path: Path):
    code = machine_code(tmp_path)
    # From where a consumer has its turn to where it gives the other one that, and on to the end of its softmax.
    turn = rf"BAR\.SYNC\S* (0x[89]), 0x100 ;(.*?)BAR\.ARV (0x[89]), 0x100 ;((?:.*?MUFU\.EX2){{{EXPONENTIALS}}})"
    turns = [found for found in re.findall(turn, code, re.DOTALL) if "HGMMA" in found[1]]
    assert {(own, other) for own, _, other, _ in turns} == {("0x8", "0x9"), ("0x9", "0x8")}
    for _, products, _, softmax in turns:
        assert len(re.findall("HGMMA", products)) == PRODUCTS
        assert "DEPBAR" not in products
        assert len(re.findall(r"DEPBAR\.LE gsb0", softmax)) == 2
        assert not re.search(r"\b(LDL|STL)\b", products + softmax), "a spill"
