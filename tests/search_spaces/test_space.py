"""Surveys of a search space: of a toy template with counts worked out by hand, and of the real templates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from attention_tuner.kernel_templates import registry
from attention_tuner.kernel_templates.batch import Batch, BatchBucket
from attention_tuner.kernel_templates.errors import VariantError
from attention_tuner.kernel_templates.gpu import INTERPRETER, TARGETS, Gpu, target
from attention_tuner.kernel_templates.registry import templates, why_invalid
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.template import Constraint, Dimension, Template
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.search_spaces import space
from attention_tuner.search_spaces.space import survey

SPEC = AttentionSpec(32, 8, 128)
SM_90 = target("sm_90")
# Capabilities that a template is limited to.
ONLY = {"gluon_hopper": {(9, 0)}}
DECODE, PREFILL, MIXED = (BatchBucket.of(Batch.parse(text)) for text in ("4x1@100", "1x64@0", "1x64@0,4x1@100"))

TILES = (16, 32, 64)
TOY = Template(
    "toy",
    "nowhere:Nothing",
    dimensions=(
        Dimension("block_m", TILES, part="long", counterpart="decode_block_m"),
        Dimension("decode_block_m", TILES, part="short", counterpart="block_m"),
        Dimension("num_warps", (1, 2, 4, 8), interpreted=False),
    ),
    constraints=(
        Constraint("decode tile too tall", lambda v, s, g: v.number("decode_block_m") <= v.number("block_m")),
        Constraint("too many warps", lambda v, s, g: v.number("num_warps") * 16 <= v.number("block_m")),
    ),
)

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes the given templates the only ones installed."""

    def install_only(*chosen: Template) -> None:
        found = {template.name: template for template in chosen}
        for module in (space, registry):
            monkeypatch.setattr(module, "templates", lambda: found)
        space._survey.cache_clear()

    yield install_only
    space._survey.cache_clear()


@pytest.mark.parametrize(
    ("bucket", "gpu", "valid", "rejected"),
    [
        # 3 x 3 tiles x 4 warps; three pairs of tiles are too tall, the other six keep 1, 2, 2, 3, 3, 3 of 4 warps.
        (MIXED, SM_90, 14, {"decode tile too tall": 12, "too many warps": 10}),
        # One body only: both tiles are the same.
        (PREFILL, SM_90, 6, {"too many warps": 6}),
        (DECODE, SM_90, 6, {"too many warps": 6}),
        # The interpreter cannot tell warps apart.
        (MIXED, INTERPRETER, 6, {"decode tile too tall": 3}),
    ],
    ids=["mixed", "prefill", "decode", "interpreter"],
)
def test_valid_and_rejected_variants_are_counted(
    install: Install, bucket: BatchBucket, gpu: Gpu, valid: int, rejected: dict[str, int]
) -> None:
    install(TOY)
    found = survey(SPEC, bucket, 16, gpu)
    assert len(found.valid) == len(set(found.valid)) == valid
    assert found.rejected == rejected


def test_valid_means_not_rejected_and_reads_the_page_size(install: Install) -> None:
    install(TOY)
    found = survey(SPEC, MIXED, 528, SM_90)
    assert {variant.page_size for variant in found.valid} == {528}
    assert all(why_invalid(variant, SPEC, SM_90) is None for variant in found.valid)


def test_a_page_size_that_is_no_multiple_of_16_leaves_nothing(install: Install) -> None:
    install(TOY)
    found = survey(SPEC, MIXED, 24, SM_90)
    assert found.valid == ()
    assert found.rejected == {"the page size is no multiple of 16": 36}


@pytest.mark.parametrize(
    ("spec", "bucket", "page_size", "names"),
    [
        (SPEC, MIXED, 16, ["unified", "two_launch", "gluon_hopper"]),
        (SPEC, DECODE, 64, ["fused"]),
        (AttentionSpec(8, 8, 72, dtype="float32"), PREFILL, 16, ["persistent"]),
    ],
    ids=["mixed", "decode", "prefill in float32"],
)
def test_a_survey_is_what_asking_for_every_variant_gives(
    spec: AttentionSpec, bucket: BatchBucket, page_size: int, names: list[str]
) -> None:
    every = [variant for name in names for variant in templates()[name].variants(bucket, SM_90, page_size)]
    reasons = [why_invalid(variant, spec, SM_90) for variant in every]
    found = survey(spec, bucket, page_size, SM_90, names)
    assert list(found.valid) == [variant for variant, reason in zip(every, reasons, strict=True) if reason is None]
    # Also in the order in which they first occur.
    assert list(found.rejected.items()) == list(Counter(reason for reason in reasons if reason is not None).items())


@pytest.mark.parametrize("bucket", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    "holds",
    [
        lambda v, s, g: v.as_dict()["block_m"] * v.as_dict()["num_warps"] < 100,
        lambda v, s, g: sum(value for _, value in v.values) < 100,
        lambda v, s, g: "block_m=16" in v.key(),
        lambda v, s, g: v.replace(num_warps=1).number("block_m") < 64,
        lambda v, s, g: v not in {next(TOY.variants(MIXED, SM_90, 16))},
        lambda v, s, g: v.page_size == 32,
    ],
    ids=["as_dict", "values", "key", "replace", "in a set", "none"],
)
def test_a_rule_may_read_a_variant_in_any_way(
    install: Install, bucket: BatchBucket, holds: Callable[[Variant, AttentionSpec, Gpu], bool]
) -> None:
    install(replace(TOY, constraints=(Constraint("broken", holds), *TOY.constraints)))
    every = list(TOY.variants(bucket, SM_90, 16))
    reasons = [why_invalid(variant, SPEC, SM_90) for variant in every]
    found = survey(SPEC, bucket, 16, SM_90)
    assert list(found.valid) == [variant for variant, reason in zip(every, reasons, strict=True) if reason is None]
    assert found.rejected == Counter(filter(None, reasons))


def test_a_rule_is_asked_once_for_all_variants_that_share_the_values_it_reads(install: Install) -> None:
    asked: list[int] = []

    def holds(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> bool:
        asked.append(variant.number("num_warps"))
        return True

    install(replace(TOY, constraints=(Constraint("broken", holds),)))
    assert len(survey(SPEC, MIXED, 16, SM_90).valid) == 36
    assert asked == [1, 2, 4, 8]


def test_a_template_may_have_one_variant_only(install: Install) -> None:
    install(Template("plain", "nowhere:Nothing", ()))
    assert survey(SPEC, MIXED, 16, SM_90).valid == (Variant("plain", 16, ()),)


def test_names_limit_the_templates(install: Install) -> None:
    other = Template("other", "nowhere:Nothing", dimensions=(Dimension("order", ("rows", "heads")),))
    install(TOY, other)
    assert {v.template for v in survey(SPEC, MIXED, 16, SM_90).valid} == {"toy", "other"}
    assert len(survey(SPEC, MIXED, 16, SM_90, names=["other", "other"]).valid) == 2
    with pytest.raises(VariantError, match=r"unknown template 'nope'; installed are toy, other"):
        survey(SPEC, MIXED, 16, SM_90, names=["nope"])


def test_a_reader_cannot_spoil_the_cache(install: Install) -> None:
    install(TOY)
    survey(SPEC, MIXED, 16, SM_90).rejected.clear()
    assert survey(SPEC, MIXED, 16, SM_90).rejected.total() == 22


def test_shapes_with_the_same_parts_share_one_survey(install: Install) -> None:
    install(TOY)
    larger = BatchBucket.of(Batch.parse("1x512@16384,63x1@32768"))
    assert survey(SPEC, larger, 16, SM_90).valid is survey(SPEC, MIXED, 16, SM_90).valid


@pytest.mark.parametrize("name", templates())
def test_rules_of_installed_templates_are_asked_for_few_variants(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked: list[Variant] = []

    def counted(rule: Constraint) -> Constraint:
        return replace(rule, holds=lambda v, s, g: asked.append(v) or rule.holds(v, s, g))

    template = templates()[name]
    rules = tuple(map(counted, template.constraints))
    monkeypatch.setitem(templates(), name, replace(template, constraints=rules))
    space._survey.cache_clear()
    found = survey(SPEC, MIXED, 64, SM_90, [name])
    space._survey.cache_clear()
    # A rule that reads all values is asked more often than there are variants.
    assert len(asked) < (len(found.valid) + found.rejected.total()) * len(rules) / 10


def test_reasons_of_many_variants_are_counted(install: Install) -> None:
    dimensions = tuple(Dimension(f"d{i}", (1, 2, 4, 8)) for i in range(6))
    constraints = tuple(
        Constraint(f"rule {i}", lambda v, s, g, name=f"d{i}": v.number(name) * s.head_dim <= 512) for i in range(3)
    )
    install(Template("large", "nowhere:Nothing", (*dimensions, Dimension("order", ("rows", "heads"))), constraints))
    found = survey(SPEC, MIXED, 16, SM_90)
    assert found.rejected == {"rule 0": 4**5 * 2, "rule 1": 3 * 4**4 * 2, "rule 2": 3**2 * 4**3 * 2}
    assert len(found.valid) == 3**3 * 4**3 * 2


@pytest.mark.parametrize("gpu", [INTERPRETER, *TARGETS.values()], ids=lambda gpu: gpu.slug)
@pytest.mark.parametrize("bucket", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_every_installed_template_has_valid_variants_where_it_runs(bucket: BatchBucket, gpu: Gpu) -> None:
    for name, template in templates().items():
        for page_size in (16, 528):
            if gpu.capability in ONLY.get(name, {gpu.capability}):
                variants = template.variants(bucket, gpu, page_size)
                assert any(why_invalid(variant, SPEC, gpu) is None for variant in variants), (name, page_size)
            else:
                found = survey(SPEC, bucket, page_size, gpu, [name])
                assert (found.valid, *found.rejected) == ((), "it needs a GPU of capability 9.0")


def test_a_survey_of_the_installed_templates_counts_every_variant_once() -> None:
    names = ["unified", "two_launch", "gluon_hopper"]
    found = survey(SPEC, DECODE, 128, SM_90, names)
    assert {variant.template for variant in found.valid} == set(names)
    listed = sum(len(set(templates()[name].variants(DECODE, SM_90, 128))) for name in names)
    assert len(found.valid) + found.rejected.total() == listed
