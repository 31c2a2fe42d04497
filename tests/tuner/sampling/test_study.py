from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable

import optuna
import pytest

from attention_tuner.kernel_templates.outcome import Check, Failed, Outcome, Regime, Timed, Timing
from attention_tuner.kernel_templates.variant import Value, Variant
from attention_tuner.tuner.sampling import study as study_module
from attention_tuner.tuner.sampling.points import Point, Space
from attention_tuner.tuner.sampling.samplers import SAMPLERS
from attention_tuner.tuner.sampling.study import ByDimension, ByNumber, Study

DIMENSIONS: dict[str, dict[str, tuple[Value, ...]]] = {
    "one": {"m": (16, 32, 64, 128), "n": (16, 32, 64, 128), "warps": (1, 2, 4, 8), "stages": (1, 2, 3, 4)},
    "two": {"m": (16, 32, 64, 128), "n": (16, 32, 64, 128), "load": ("pointer", "tma"), "waves": (0, 1, 2, 4, 8)},
}

GRID = [Variant.of("t", 16, dict(zip("abcdef", v, strict=True))) for v in itertools.product(range(4), repeat=6)]


def combinations(holds: Callable[[Variant], bool] = lambda variant: True) -> list[Variant]:
    found = [
        Variant.of(template, 16, dict(zip(dimensions, values, strict=True)))
        for template, dimensions in DIMENSIONS.items()
        for values in itertools.product(*dimensions.values())
    ]
    return [variant for variant in found if holds(variant)]


def milliseconds(variant: Variant) -> float:
    """A smooth landscape: template two is faster, and its best variant takes 1 ms."""
    values = variant.as_dict()
    ms = (1 + 0.4 * abs(math.log2(variant.number("m") / 64))) * (1 + 0.3 * abs(math.log2(variant.number("n") / 32)))
    if variant.template == "one":
        return 2 * ms * (1 + 0.2 * abs(math.log2(variant.number("warps") / 4)))
    return ms * (1 + 0.1 * abs(variant.number("waves") - 4)) * (1.2 if values["load"] == "pointer" else 1)


def outcome(variant: Variant) -> Timed:
    return Timed(variant, Check(0.5), Timing((milliseconds(variant),), Regime("graph")))


def failure(variant: Variant) -> Failed:
    return Failed(variant, "compile", "no")


def sized(variant: Variant, ms: float) -> Timed:
    return Timed(variant, Check(0.5), Timing((ms,), Regime("graph")))


def explore(study: Study, trials: int, judge: Callable[[Variant], Outcome] = outcome, ahead: int = 1) -> list[Variant]:
    asked: list[Variant] = []
    pending: list[Variant] = []
    for _ in range(trials):
        variant = study.ask()
        if variant is None:
            break
        asked.append(variant)
        pending.append(variant)
        if len(pending) >= ahead:
            study.tell(judge(pending.pop(0)))
    for variant in pending:
        study.tell(judge(variant))
    return asked


def best(variants: Iterable[Variant]) -> float:
    return min(map(milliseconds, variants))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_asks_for_every_variant_once_and_then_for_none(sampler: str) -> None:
    valid = combinations(
        lambda v: (
            v.number("n") == 16
            and v.number("m") <= 32
            and v.as_dict().get("warps", 1) == v.as_dict().get("stages", 1) == 1
            and v.as_dict().get("waves", 1) == 1
        )
    )
    study = Study(valid, [valid[5]], sampler)
    asked = explore(study, 10 * len(valid), ahead=2)
    assert asked[0] == valid[5]
    assert sorted(asked, key=Variant.key) == sorted(valid, key=Variant.key)
    assert study.ask() is None
    assert study.ask() is None


@pytest.mark.parametrize(("sampler", "limit"), [("kriging", 1.02), ("tpe", 1.2)])
def test_it_finds_better_variants_than_chance(sampler: str, limit: float) -> None:
    valid = combinations()
    found = {
        name: [best(explore(Study(valid, sampler=name, seed=seed), 60, ahead=8)) for seed in range(4)]
        for name in (sampler, "random")
    }
    assert statistics.mean(found[sampler]) < statistics.mean(found["random"])
    assert statistics.median(found[sampler]) <= limit


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_asks_for_the_same_variants(sampler: str) -> None:
    # Optuna's Gaussian process begins after ten trials.
    runs = [explore(Study(combinations(), sampler=sampler, seed=seed), 12, ahead=3) for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("sampler", ["kriging", "tpe"])
def test_it_keeps_away_from_variants_that_fail(sampler: str) -> None:
    # Half of the space fails, and the fastest variants are at its edge.
    def judge(variant: Variant) -> Outcome:
        return failure(variant) if variant.number("a") >= 2 else sized(variant, 10 - 3 * variant.number("a"))

    for seed in range(2):
        asked = explore(Study(GRID, sampler=sampler, seed=seed), 60, judge)
        failed = [variant.number("a") >= 2 for variant in asked]
        assert sum(failed[30:]) <= 0.3 * len(failed[30:])


def test_a_failure_that_seemed_best_does_not_attract() -> None:
    study = Study(combinations(), seed=1)
    asked = explore(study, 60, lambda v: failure(v) if v.template == "two" else outcome(v))
    assert Counter(v.template for v in asked[30:])["one"] >= 20


def test_only_valid_variants_are_asked_for() -> None:
    valid = combinations(lambda v: v.number("m") * v.number("n") <= 2048)
    assert set(explore(Study(valid), 150)) <= set(valid)


def test_a_resumed_study_repeats_no_variant_and_has_learnt_from_the_stored_ones() -> None:
    def size(variant: Variant) -> int:
        return sum(variant.number(name) for name in "abcdef")

    before = explore(Study(GRID, sampler="random", seed=0), 60, lambda v: sized(v, 1 + size(v)))
    resumed = Study(GRID, [before[0]], seed=1)
    for variant in before:
        resumed.tell(sized(variant, 1 + size(variant)))
    after = explore(resumed, 10, lambda v: sized(v, 1 + size(v)))
    assert not set(before) & set(after)
    assert min(map(size, after)) < min(map(size, before))
    assert statistics.median(map(size, after)) < 0.7 * statistics.median(map(size, before))


def test_a_first_variant_takes_the_place_of_the_equivalent_valid_one() -> None:
    # As on the interpreter: all valid variants have 1 warp, because it makes no difference there.
    valid = combinations(lambda v: v.template == "one" and v.number("warps") == 1 and v.number("stages") == 1)
    default = valid[3].replace(warps=4)
    asked = explore(Study(valid, [default, valid[3]]), 100)
    assert asked[0] == default
    assert valid[3] not in asked
    assert len(asked) == len(valid)


def test_a_first_variant_outside_the_space_is_tried_too() -> None:
    outside = Variant.of("three", 16, {"x": 1})
    valid = combinations()[:20]
    asked = explore(Study(valid, [outside]), 30, failure)
    assert asked[0] == outside
    assert set(asked[1:]) == set(valid)


def test_only_the_first_outcome_of_a_variant_counts() -> None:
    valid = combinations()[:20]
    study = Study(valid, seed=0)
    variant = study.ask()
    assert variant is not None
    study.tell(outcome(variant))
    study.tell(failure(variant))
    assert study._study.best_value == math.log(milliseconds(variant))
    assert len(explore(study, 2 * len(valid))) == len(valid) - 1


def test_without_variants_there_is_nothing_to_ask_for() -> None:
    assert Study([]).ask() is None


def test_of_many_stored_outcomes_the_sampler_is_given_the_fastest_and_some_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(study_module, "MOST_ADDED", 40)
    variants = combinations()
    study = Study(variants, sampler="tpe")
    told = [outcome(variant) for variant in variants[::2]] + [failure(variants[1])]
    for each in told:
        study.tell(each)
    asked = explore(study, 10)
    assert not {each.variant for each in told} & set(asked)
    learned = sorted(trial.values[0] for trial in study._study.trials[:40])
    fastest = sorted(math.log(milliseconds(variant)) for variant in variants[::2])
    assert learned[:20] == fastest[:20]
    assert learned[20:] != fastest[20:40]
    assert len(study._study.trials) < 60


def test_preferred_variants_come_before_all_others_and_only_once() -> None:
    valid = combinations()
    study = Study(valid, valid[:3])
    assert study.ask() == valid[0]
    study.prefer([valid[7], valid[0], valid[8]])
    assert [study.ask() for _ in range(4)] == [valid[7], valid[8], valid[1], valid[2]]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_one_variant_and_a_space_without_any_time_are_searched(sampler: str) -> None:
    valid = combinations()[:12]
    alone = Study(valid[:1], sampler=sampler)
    assert alone.ask() == valid[0]
    assert alone.ask() is None
    assert len(explore(Study(valid, sampler=sampler), 100, failure)) == len(valid)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_space_of_one_dimension_is_searched(sampler: str) -> None:
    line = [Variant.of("t", 16, {"a": a}) for a in range(14)]
    asked = explore(Study(line, sampler=sampler), 100, lambda v: sized(v, 1 + abs(v.number("a") - 8)))
    assert sorted(asked, key=lambda v: v.number("a")) == line


def test_variants_expected_to_be_fast_are_tried_before_anything_is_measured() -> None:
    valid = combinations()
    ratios = {variant: math.log(milliseconds(variant)) for variant in valid[::3]}
    study = Study(valid)
    study.expect(ratios)
    informed = [variant for _ in range(8) if (variant := study.ask()) is not None]
    assert statistics.median(map(milliseconds, informed)) < 0.7 * statistics.median(map(milliseconds, valid))
    assert len(set(informed)) == 8
    # Optuna's samplers ignore it.
    Study(valid, sampler="tpe").expect(ratios)


def test_a_variant_can_be_claimed_out_of_turn_once() -> None:
    valid = combinations()[:20]
    study = Study(valid, [valid[4]])
    assert study.claim(valid[4])
    assert not study.claim(valid[4])
    assert not study.claim(Variant.of("three", 16, {"x": 1}))
    study.tell(outcome(valid[5]))
    assert not study.claim(valid[5])
    asked = explore(study, 2 * len(valid))
    assert len(asked) == len(valid) - 2
    assert not {valid[4], valid[5]} & set(asked)


SPACE = Space([
    *(Variant.of("one", 16, {"m": m, "load": load}) for m in (16, 64) for load in ("pointer", "tma")),
    *(Variant.of("two", 16, {"w": w}) for w in (1, 2, 4)),
])
POINTS: list[Point] = [("one", ("tma", 16)), ("one", ("pointer", 64)), ("two", (1,)), ("two", (4,))]
NUMBERED, CONDITIONAL, UNCONDITIONAL = ENCODINGS = (
    ByNumber(POINTS), ByDimension(SPACE, True, random.Random(0)), ByDimension(SPACE, False, random.Random(0)))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("point", POINTS)
def test_the_parameters_that_encode_a_point_suggest_it(encoding: ByNumber | ByDimension, point: Point) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    parameters = encoding.parameters(point)
    assert parameters is not None
    study.enqueue_trial(dict(parameters))
    trial = study.ask()
    assert encoding.suggest(trial) == point
    assert trial.params == parameters
    assert trial.distributions == encoding.distributions(parameters)


def test_only_numbered_points_are_encoded_by_number() -> None:
    assert NUMBERED.parameters(("two", (2,))) is None


def test_dimensions_of_other_templates_are_parameters_only_if_every_trial_has_all() -> None:
    assert set(CONDITIONAL.parameters(POINTS[2])) == {"template", "two.w"}
    assert set(UNCONDITIONAL.parameters(POINTS[2])) == {"template", "two.w", "one.load", "one.m"}
