from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from grids import GRIDS, read_grid

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.errors import InputError, ModelError
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.heuristic import default_variant
from attention_tuner.kernel_templates.registry import template_of, templates, why_invalid

H200 = Gpu("NVIDIA H200", (9, 0), 132, 232448, 62914560)
SMALL: dict[str, Any] = {
    "name": "small",
    "spec": "num_q_heads=8,num_kv_heads=2,head_dim=64",
    "parts": [{
        "page_size": 32,
        "suite": "hopper13",
        "batches": ["decode_4x64k", "prefill_8k"],
        "templates": {
            "unified": {"block_m": [16, 32], "num_warps": [4]},
            "fused": {"block_m": [64, 128], "decode_block_m": [16], "num_warps": [4]},
        },
    }],
}  # fmt: skip


def write(folder: Path, document: object) -> str:
    path = folder / "small.json"
    path.write_text(json.dumps(document))
    return str(path)


def changed(**changes: object) -> dict[str, Any]:
    return {**SMALL, "parts": [{**SMALL["parts"][0], **changes}]}


def test_a_grid_is_all_valid_combinations_settled_for_the_batch(tmp_path: Path) -> None:
    small = read_grid(write(tmp_path, SMALL))
    (part,) = small.parts
    decode, prefill = part.batches
    assert (str(decode), str(prefill), part.page_size) == ("4x1@65535", "1x8192@0", 32)
    # Without long sequences the two bodies are one, and so are the two variants of it.
    of_decode, of_prefill = (part.variants(small.spec, batch, H200) for batch in part.batches)
    assert [(v.template, v.number("block_m")) for v in of_decode] == [("unified", 16), ("unified", 32), ("fused", 16)]
    assert [(v.template, v.number("block_m")) for v in of_prefill] == [
        ("unified", 16), ("unified", 32), ("fused", 64), ("fused", 128)]  # fmt: skip
    for variant in (*of_decode, *of_prefill):
        assert why_invalid(variant, small.spec, H200) is None
        named = SMALL["parts"][0]["templates"][variant.template]
        # Dimensions that are not named have their first choice.
        rest = {d.name: d.choices[0] for d in template_of(variant).dimensions if d.name not in named and not d.part}
        assert rest.items() <= variant.as_dict().items()


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (changed(suite="nosuch"), "no suite"),
        (changed(batches=["nosuch"]), "has no batch 'nosuch'; it has hybrid_512@16k"),
        (changed(templates={"nosuch": {}}), "unknown template 'nosuch'"),
        (changed(templates={"unified": {"nosuch": [1]}}), "has no dimension 'nosuch'; it has block_m"),
        (changed(templates={"unified": {"block_m": [24]}}), "block_m=24; accepted are 16, 32, 64, 128"),
        (changed(templates={"unified": {"block_m": []}}), "accepted are 16"),
        ({**SMALL, "spec": "num_q_heads=8"}, "num_kv_heads"),
        ({**SMALL, "parts": []}, "it has no part"),
        ({**SMALL, "parts": [{}]}, "is no grid"),
        ({**SMALL, "parts": SMALL["parts"] * 2}, "2 parts name batch '4x1@65535' at pages of 32"),
        ({**SMALL, "parts": None}, "is no grid"),
        ({"name": "small"}, "is no grid"),
        ([], "no JSON object"),
    ],
)
def test_a_file_that_is_no_grid_is_refused_by_name(tmp_path: Path, document: object, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        read_grid(write(tmp_path, document))
    assert "small.json" in str(refused.value)


def test_a_grid_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match=r"cannot read 'nosuch' as JSON: .*No such file"):
        read_grid("nosuch")


@pytest.mark.parametrize("name", [path.stem for path in GRIDS.glob("*.json")])
def test_the_grids_of_this_folder_have_enough_tasks_variants_and_templates(name: str) -> None:
    found = read_grid(name)
    assert found.name == name
    counts: dict[tuple[Batch, int], int] = {}
    for part, batch in [(each, batch) for each in found.parts for batch in each.batches]:
        variants = part.variants(found.spec, batch, H200)
        counts[batch, part.page_size] = len(variants)
        assert {v.template for v in variants} == set(templates())
        assert default_variant(found.spec, batch, part.page_size) in variants
    at_16 = [batch for batch, page_size in counts if page_size == 16]
    assert len(set(at_16)) >= 5
    assert all(counts[batch, 16] >= 1500 for batch in at_16)
    assert sum(page_size == 128 for _, page_size in counts) >= 2
    assert all(len(set(map(str, pair))) == 2 for pair in itertools.combinations(at_16, 2))
