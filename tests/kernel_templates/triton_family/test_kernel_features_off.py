"""What a layer lacks leaves no trace in its kernels: they are those of a source without features, byte for byte."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from attention_tuner.kernel_templates import template

KERNELS = Path(template.__file__).parent
COMBINE = "triton_family/combine.py"
# The kernels' records of features, and fields of `Layer` that are features, with their values in a plain layer.
FEATURES = "features"
FIELDS = {"WINDOW": 0, "SOFT_CAP": None}
SCRIPT = """
import sys
from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.launch.compiler import compile_variant
from attention_tuner.kernel_templates.gpu import TARGETS
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.variant import Variant
for layer in sys.argv[1:]:
    for reduction in ("kernel", "last_program"):
        variant = Variant.of("fused", 16, {
            "block_m": 16, "block_n": 32, "decode_block_m": 16, "decode_block_n": 32, "num_warps": 4, "num_stages": 2,
            "kv_load": "pointer", "order": "items", "waves": 1, "long_weight": 1, "schedule": "long_first",
            "partials": "float32", "reduction": reduction,
        })
        spec, batch = AttentionSpec.parse(layer), Batch.parse("1x64@100,2x1@100")
        print(compile_variant(variant, spec, TARGETS["sm_90"], batch).code_hash)
"""
PLAIN = "num_q_heads=8,num_kv_heads=2,head_dim=64,dtype="
LAYERS = [f"{PLAIN}bfloat16"]


class _WithoutFeatures(ast.NodeTransformer):
    """Replaces features by their values in a plain layer, then drops the branches that cannot run."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if not node.name.endswith("_kernel"):
            node.args.args = [each for each in node.args.args if each.arg not in (FEATURES, *FIELDS)]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.args = [each for each in node.args if ast.unparse(each).rpartition(".")[2] not in (FEATURES, *FIELDS)]
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        is_read = isinstance(node.ctx, ast.Load) and node.id in FIELDS
        return ast.Constant(FIELDS[node.id]) if is_read else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        is_feature = isinstance(node.value, ast.Name) and node.value.id == FEATURES
        if is_feature or node.attr in FIELDS:
            return ast.Constant(FIELDS.get(node.attr))
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """`features.sinks is not None` is false."""
        self.generic_visit(node)
        is_asked = isinstance(node.left, ast.Constant) and isinstance(node.ops[0], ast.IsNot)
        return ast.Constant(False) if is_asked else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        is_never = isinstance(node.op, ast.And) and any(map(_is_false, node.values))
        return ast.Constant(False) if is_never else node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if _is_false(node.test) else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return node.orelse if _is_false(node.test) else node


def _is_false(test: ast.AST) -> bool:
    return ast.unparse(test) in ("False", "0")


def package(folder: Path, changes: dict[str, str]) -> Path:
    """A copy of the kernels' package with other texts of some modules, to be imported from `folder`."""
    kernels = folder / "attention_tuner" / "kernel_templates"
    shutil.copytree(KERNELS, kernels, ignore=shutil.ignore_patterns("__pycache__"))
    (kernels.parent / "__init__.py").touch()
    for name, text in changes.items():
        (kernels / name).write_text(text)
    return folder


def hashes(folder: Path, *layers: str) -> list[str]:
    """Of each layer the hash of its kernels' machine code, compiled in a child process without line numbers."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"
    done = subprocess.run([sys.executable, "-c", SCRIPT, *layers], env=environment, cwd=folder, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def without_features() -> dict[str, str]:
    """The modules that know of features, without them."""
    found: dict[str, str] = {}
    for name in (f"triton_family/{module}.py" for module in ("kernel", "arithmetic", "combine")):
        tree = cast(ast.Module, _WithoutFeatures().visit(ast.parse((KERNELS / name).read_text())))
        found[name] = ast.unparse(ast.fix_missing_locations(tree))
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The hashes of plain layers, compiled from a source without features."""
    changes = without_features()
    for text in changes.values():
        assert not [word for word in ("features.", "SOFT_CAP is", "if WINDOW", "- WINDOW") if word in text]
    return hashes(package(tmp_path_factory.mktemp("without"), changes), *LAYERS)


def test_kernels_of_plain_layers_are_those_of_a_source_without_features(plain: list[str], tmp_path: Path):
    assert len(set(plain)) == 2 * len(LAYERS)
    off = ",sliding_window=64,has_sinks=True"
    found = hashes(package(tmp_path, {}), *LAYERS, LAYERS[0] + off)
    assert found[: len(plain)] == plain
    assert not set(found[len(plain) :]) & set(plain)


def test_code_of_a_feature_that_always_runs_is_noticed(plain: list[str], tmp_path: Path):
    text = (KERNELS / COMBINE).read_text()
    always = text.replace("if features.tree_mask is not None:", "if True:")
    assert always != text
    assert not set(hashes(package(tmp_path, {COMBINE: always}), LAYERS[0])) & set(plain)
