from __future__ import annotations

from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.sampling.points import ABSENT, Space, beside

MIXED = [
    Variant.of("one", 16, {"m": 16, "load": "tma"}),
    Variant.of("one", 16, {"m": 64, "load": "pointer"}),
    Variant.of("two", 16, {"m": 32, "w": 1}),
    Variant.of("two", 16, {"m": 64, "w": 2}),
]


def test_a_space_has_only_the_dimensions_in_which_variants_differ() -> None:
    space = Space([Variant.of("t", 16, {"a": a, "b": a, "c": 3, "d": d}) for a in (64, 16) for d in ("x", "y")])
    assert space.choices == {"t": {"a": (16, 64), "d": ("x", "y")}}
    assert space.point(Variant.of("t", 16, {"a": 64, "b": 16, "c": 5, "d": "x"})) == ("t", (64, "x"))
    assert space.point(Variant.of("t", 16, {"a": 32, "d": "x"})) is None
    assert space.point(Variant.of("u", 16, {"a": 16, "d": "x"})) is None


def test_points_follow_the_order_of_the_variants_however_templates_alternate() -> None:
    mixed = [*MIXED[::2], *MIXED[1::2], Variant.of("single", 16, {"m": 16})]
    space = Space(mixed)
    assert space.points == [space.point(variant) for variant in mixed]
    assert space.points[-1] == ("single", ())


def test_neighbours_differ_by_one_step_of_an_ordered_dimension() -> None:
    space = Space([Variant.of("t", 16, {"a": a, "d": d}) for a in (16, 32, 64) for d in ("x", "y", "z")])
    found = set(space.neighbours(("t", (16, "y"))))
    assert found == {("t", (32, "y")), ("t", (16, "x")), ("t", (16, "z"))}


def test_one_step_goes_to_the_next_value_or_to_any_unordered_value() -> None:
    assert beside(32, (16, 32, 64, 128)) == [16, 64]
    assert beside(16, (16, 32, 64)) == [32]
    assert beside("y", ("x", "y", "z")) == ["x", "z"]
    assert beside(16, (16,)) == []


def test_templates_share_the_codes_of_a_dimension_of_the_same_name() -> None:
    space = Space(MIXED)
    points = [point for variant in MIXED if (point := space.point(variant)) is not None]
    columns = dict(zip(("template", "load", "m", "w"), space.codes(points).T.tolist(), strict=True))
    assert columns == {"template": [0, 0, 1, 1], "load": [1, 0, ABSENT, ABSENT], "m": [0, 2, 1, 2],
                       "w": [ABSENT, ABSENT, 0, 1]}  # fmt: skip


def test_a_space_of_one_variant_has_no_dimension() -> None:
    space = Space(MIXED[:1])
    assert space.codes([("one", ())]).tolist() == [[0]]
