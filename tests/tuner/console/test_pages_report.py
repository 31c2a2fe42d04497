from __future__ import annotations

import json

import pytest
from portfolio_samples import LARGE, MIDDLE, SMALL, SPEC, best_config, unified

from attention_tuner.tuner.console.pages_report import print_comparisons, size
from attention_tuner.tuner.pages import compare

TIMES = {(SMALL, 16): 1.0, (MIDDLE, 16): 4.0, (SMALL, 64): 0.9, (MIDDLE, 64): 3.6, (LARGE, 64): 9.0}
CONFIGS = [best_config(batch, unified(16, page_size=page), ms) for (batch, page), ms in TIMES.items()]
LAYERS = {SPEC: 32}


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"), (159 << 20, "159 MiB")])
def test_memory_has_a_unit_that_reads_well(count: int, text: str) -> None:
    assert size(count) == text


def test_a_size_is_recommended_by_a_rule_that_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    comparisons = compare(CONFIGS, LAYERS)
    print_comparisons(comparisons, LAYERS, 3.0, as_json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "32 layers of num_q_heads=8" in out
    assert "over 2 batches" in out
    assert "8x1@4000 is left out: not tuned with pages of 16" in out
    assert "recommended are pages of 64: of those at most 3 % slower than the fastest" in out
    print_comparisons(comparisons, LAYERS, 20.0, as_json=False)
    assert "recommended are pages of 16: of those at most 20 % slower" in capsys.readouterr().out


def test_a_comparison_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparisons(compare(CONFIGS, LAYERS), LAYERS, 3.0, as_json=True)
    document = json.loads(capsys.readouterr().out)
    (comparison,) = document["comparisons"]
    assert document["token_bytes"] == 32 * 512
    assert [page["page_size"] for page in comparison["pages"]] == [16, 64]
    assert [page["sum_ms"] for page in comparison["pages"]] == pytest.approx([160.0, 144.0])
    assert comparison["left_out"] == {str(LARGE): [16]}
    assert comparison["recommended"] == 64
