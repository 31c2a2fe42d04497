import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_tuner.kernel_templates.errors import VariantError
from attention_tuner.kernel_templates.variant import Variant

NAMES = st.from_regex(r"[a-z][a-z_]{0,9}", fullmatch=True).filter(lambda name: name != "page_size")
VALUES = st.integers(0, 10**6) | st.from_regex(r"[a-z]{1,8}", fullmatch=True)
VARIANTS = st.builds(Variant.of, NAMES, st.integers(1, 4096), st.dictionaries(NAMES, VALUES))


@given(VARIANTS)
def test_parse_reads_what_key_wrote(variant: Variant):
    assert Variant.parse(variant.key()) == variant


@pytest.mark.parametrize("text", ["", "fused", "fused:", "fused:block_m=16", "fused:page_size=x", "f:page_size=9,a"])
def test_text_that_names_no_variant_is_refused(text: str):
    with pytest.raises(VariantError, match="does not name a variant"):
        Variant.parse(text)


def test_values_are_read_by_kind():
    variant = Variant.of("fused", 16, {"kv_load": "tma", "block_m": 64})
    assert (variant.number("block_m"), variant.text("kv_load")) == (64, "tma")
    with pytest.raises(VariantError, match="no number 'kv_load'"):
        variant.number("kv_load")
    with pytest.raises(VariantError, match="no text 'block_n'"):
        variant.text("block_n")


def test_replace_changes_only_what_is_named():
    variant = Variant.of("fused", 16, {"kv_load": "tma", "block_m": 64})
    assert variant.replace(block_m=128) == Variant.of("fused", 16, {"kv_load": "tma", "block_m": 128})


def test_unsorted_or_repeated_dimensions_are_refused():
    with pytest.raises(VariantError, match="sorted"):
        Variant("fused", 16, (("b", 1), ("a", 1)))
    with pytest.raises(VariantError, match="positive page size"):
        Variant("fused", 0, ())
