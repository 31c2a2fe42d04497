import pytest

from attention_tuner.kernel_templates.batch import Batch
from attention_tuner.kernel_templates.default import default_variant
from attention_tuner.kernel_templates.errors import VariantError
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.launch import make_launcher, query_start_locs
from attention_tuner.kernel_templates.spec import AttentionSpec

SPEC, BATCH = AttentionSpec(4, 2, 64), Batch.parse("1x16@32,2x1@40")


def test_a_variant_gets_the_launcher_of_its_template():
    launcher = make_launcher(default_variant(SPEC, BATCH, 16), SPEC, INTERPRETER)
    assert type(launcher).__name__ == "UnifiedLauncher"


def test_an_invalid_variant_is_refused_with_its_reason():
    variant = default_variant(SPEC, BATCH, 16).replace(block_m=24)
    with pytest.raises(VariantError, match="not among the template's choices"):
        make_launcher(variant, SPEC, INTERPRETER)


def test_query_tokens_start_one_sequence_after_the_other():
    assert query_start_locs(BATCH) == [0, 16, 17, 18]
