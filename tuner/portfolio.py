"""Portfolios: few compiled kernels that serve all tuned shapes of a layer, and what each shape loses.

An engine compiles its kernels before it serves, so the number of kernels is what counts. Variants that differ only in
the plan share a kernel, and each shape gets the fastest of them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..db import ConfigTable, Source, Store
from ..db.checks import FullChecks
from ..db.records import TrialRecord
from ..kernel_templates.batch import Batch
from ..kernel_templates.errors import InputError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.heuristic import default_variant
from ..kernel_templates.outcome import BestConfig, Environment, Regime, Timed, Timing, Verdict
from ..kernel_templates.registry import code_of, why_invalid
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.variant import Variant

SIZE = 8
"""The number of kernels of a portfolio by default."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The trial of one variant."""

    timing: Timing
    environment: Environment
    measured_at: str


@dataclass(frozen=True)
class TunedShape:
    """A tuned shape with its trials."""

    best: BestConfig
    # The variants that were right and timed on its batch.
    timed: Mapping[Variant, Measured]
    # Those of them that a portfolio may have.
    eligible: frozenset[Variant]

    @property
    def batch(self) -> Batch:
        """The batch on which it was tuned."""
        return Batch.parse(self.best.batch)

    def loss(self, variant: Variant) -> float | None:
        """The slowdown of `variant` against the best, as a share; None if it was not timed here.

        Both times are of trials, which share one stopwatch. The winner of a decided race has no loss.
        """
        if variant not in self.timed:
            return None
        if variant == self.best.variant and self.best.verdict is not Verdict.AMBIGUOUS:
            return 0.0
        return self.timed[variant].timing.median_ms / self.fastest_ms - 1

    @functools.cached_property
    def fastest_ms(self) -> float:
        """The least time of a trial here, in milliseconds."""
        return min(measured.timing.median_ms for measured in self.timed.values())

    @functools.cached_property
    def kernels(self) -> Mapping[str, tuple[float, Variant]]:
        """The least loss of each kernel's eligible variants, and that variant; the least loss first.

        Of equal ones the best config's variant comes first, then the order is by key.
        """
        losses = [(loss, v) for v in self.eligible if (loss := self.loss(v)) is not None]
        losses.sort(key=lambda each: (each[0], each[1] != self.best.variant, each[1].key()))
        found: dict[str, tuple[float, Variant]] = {}
        for loss, variant in losses:
            found.setdefault(code_of(variant), (loss, variant))
        return found

    def served_by(self, variant: Variant) -> BestConfig:
        """The config that serves this shape with `variant`, which was timed here."""
        if variant == self.best.variant:
            return self.best
        measured = self.timed[variant]
        default = self.timed.get(default_variant(self.best.shape.spec, self.batch, variant.page_size))
        return replace(
            self.best, variant=variant, timing=measured.timing, environment=measured.environment, full_check=False,
            default_timing=self.best.default_timing if default is None else default.timing,
            verdict=Verdict.AMBIGUOUS, measured_at=measured.measured_at)


@dataclass(frozen=True, slots=True)
class Group:
    """Tuned shapes that can share kernels: of one layer, page size, GPU and regime."""

    spec: AttentionSpec
    page_size: int
    gpu: Gpu
    regime: Regime
    shapes: tuple[TunedShape, ...]
    # Best configs left out: their variant cannot run any more, or no trial in the latest environment has it.
    incomparable: int = 0


@dataclass(frozen=True, slots=True)
class Pick:
    """The variant that serves a shape; None if no kernel of the portfolio was timed there."""

    shape: TunedShape
    variant: Variant | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class Portfolio:
    """The chosen kernels and what serves each shape of the group."""

    group: Group
    # As `Template.code_key` names them.
    kernels: tuple[str, ...]
    picks: tuple[Pick, ...]

    @classmethod
    def of(cls, group: Group, kernels: Iterable[str]) -> Portfolio:
        """Serve each shape of `group` by the best of `kernels`; those that serve none are left out."""
        chosen, used, picks = set(kernels), dict[str, None](), list[Pick]()
        for shape in group.shapes:
            kernel = next((kernel for kernel in shape.kernels if kernel in chosen), None)
            if kernel is None:
                picks.append(Pick(shape, None, None))
                continue
            loss, variant = shape.kernels[kernel]
            picks.append(Pick(shape, variant, loss))
            used[kernel] = None
        return cls(group, tuple(used), tuple(picks))

    @property
    def losses(self) -> tuple[float, ...]:
        """The losses of the shapes that are served."""
        return tuple(pick.loss for pick in self.picks if pick.loss is not None)

    @property
    def worst(self) -> float | None:
        """The largest loss, None if a shape is not served."""
        return max(self.losses) if self.losses and len(self.losses) == len(self.picks) else None

    @property
    def mean(self) -> float | None:
        """The mean loss of the shapes that are served, None if none is."""
        return statistics.fmean(self.losses) if self.losses else None

    @property
    def num_variants(self) -> int:
        """The number of variants that the kernels are launched as."""
        return len({pick.variant for pick in self.picks if pick.variant is not None})

    def configs(self) -> list[BestConfig]:
        """The config of each shape that is served."""
        return [pick.shape.served_by(pick.variant) for pick in self.picks if pick.variant is not None]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The answer for a shape from a portfolio of the others."""

    shape: TunedShape
    variant: Variant
    source: Source
    # None if the answer was not timed on this shape.
    loss: float | None


def groups(store: Store, configs: Iterable[BestConfig], *, checked: bool = False) -> list[Group]:
    """Group `configs` of `store` that can share kernels, with their trials; a group may be left without shapes.

    With `checked`, only variants that have passed the full check in the environment of their trial are eligible.
    """
    members: dict[tuple[AttentionSpec, int, str, int, Regime], list[BestConfig]] = {}
    for config in configs:
        key = (config.shape.spec, config.variant.page_size, config.gpu.name, config.gpu.num_sms, config.timing.regime)
        members.setdefault(key, []).append(config)
    found: list[Group] = []
    for (spec, page_size, _, _, regime), bests in members.items():
        gpu = bests[0].gpu
        checks = FullChecks(store.full_checks(spec=spec, gpu_name=gpu.name)) if checked else None
        timed = _timed([trial for trial in store.trials(spec, page_size, gpu) if trial.setting.regime == regime])
        shapes = [_shape(best, timed.get(best.batch, {}), checks) for best in bests]
        shapes = [s for s in shapes if (m := s.timed.get(s.best.variant)) and m.environment == s.best.environment]
        found.append(Group(spec, page_size, gpu, regime, tuple(shapes), len(bests) - len(shapes)))
    return found


def _shape(best: BestConfig, timed: Mapping[Variant, Measured], checks: FullChecks | None) -> TunedShape:
    def _has_passed(variant: Variant, environment: Environment) -> bool:
        if checks is None:
            return True
        check = checks.of(best.shape.spec, variant, best.gpu, environment)
        return check is not None and check.passed

    return TunedShape(best, timed, frozenset(v for v, each in timed.items() if _has_passed(v, each.environment)))


def _timed(trials: Sequence[TrialRecord]) -> dict[str, dict[Variant, Measured]]:
    """Latest trial of each variant by batch, if it was timed and is comparable with the latest of all `trials`.

    Comparable trials have the same Triton, torch and driver, and the kernel source of their template's latest trial.
    """
    if not trials:
        return {}
    latest: dict[tuple[str, Variant], TrialRecord] = {}
    sources: dict[str, str] = {}
    for trial in trials:
        latest[str(trial.setting.batch), trial.outcome.variant] = trial
        sources[trial.outcome.variant.template] = trial.environment.kernel_hash
    newest = trials[-1].environment
    found: dict[str, dict[Variant, Measured]] = {}
    for (batch, variant), trial in latest.items():
        outcome = trial.outcome
        environment = replace(newest, kernel_hash=sources[variant.template])
        if (isinstance(outcome, Timed) and trial.environment == environment
                and not why_invalid(variant, trial.setting.spec, trial.setting.gpu)):
            measured = Measured(outcome.timing, trial.environment, trial.measured_at)
            found.setdefault(batch, {})[variant] = measured
    return found


def curve(group: Group, most: int) -> list[Portfolio]:
    """Portfolios of 1, 2, ... at most `most` kernels, up to the first that loses nothing."""
    found: list[Portfolio] = []
    for portfolio in _growing(group):
        if len(portfolio.kernels) > most:
            break
        # A new kernel may replace several.
        while found and len(found[-1].kernels) >= len(portfolio.kernels):
            found.pop()
        found.append(portfolio)
    return found


def choose(group: Group, size: int = SIZE) -> Portfolio:
    """The portfolio of at most `size` kernels."""
    return next(reversed(curve(group, size)), Portfolio.of(group, ()))


def fewest_kernels(group: Group, limit: float) -> int | None:
    """The size of the first portfolio with which no shape loses more than `limit`, None if there is none."""
    return next((len(each.kernels) for each in _growing(group) if each.worst is not None and each.worst <= limit), None)


def _growing(group: Group) -> Iterator[Portfolio]:
    """Add kernels one by one (greedily), until another one changes nothing.

    Each time the kernel is added that leaves the fewest shapes unserved, then the least worst loss, then the least
    mean. The worst loss comes before the mean, which may hide what one batch loses.
    """
    kernels = list(dict.fromkeys(kernel for shape in group.shapes for kernel in shape.kernels))
    if not kernels:
        return
    # [shapes, kernels], infinite for a kernel that was not timed on the shape.
    losses = np.array([[shape.kernels.get(kernel, (np.inf,))[0] for kernel in kernels] for shape in group.shapes])
    so_far = np.full(len(losses), np.inf)
    portfolio, score = Portfolio.of(group, ()), (len(losses), 0.0, 0.0)
    while True:
        with_each = np.minimum(losses, so_far[:, None])
        is_known = np.isfinite(with_each)
        known = np.where(is_known, with_each, 0.0)
        scores = list(zip((~is_known).sum(axis=0).tolist(), known.max(axis=0).tolist(), known.mean(axis=0).tolist(),
                          strict=True))  # fmt: skip
        best = min(scores)
        if best >= score:
            return
        score, column = best, scores.index(best)
        so_far = with_each[:, column]
        portfolio = Portfolio.of(group, (*portfolio.kernels, kernels[column]))
        yield portfolio


def leave_one_out(group: Group, size: int = SIZE) -> Iterator[LeftOut]:
    """Look up each shape in a portfolio of at most `size` kernels that was chosen for the others."""
    for index, shape in enumerate(group.shapes):
        rest = replace(group, shapes=(*group.shapes[:index], *group.shapes[index + 1:]))
        if rest.shapes:
            table = ConfigTable.of(choose(rest, size).configs())
            answer = table.lookup(group.spec, shape.batch, group.page_size, group.gpu)
            yield LeftOut(shape, answer.variant, answer.source, shape.loss(answer.variant))


def portfolios_of(store: Store, configs: Iterable[BestConfig], size: int, *, checked: bool) -> list[Portfolio]:
    """The portfolio of each group of `configs`, of `store`.

    Raises `InputError` if no shape has a variant that was timed and, with `checked`, has passed the full check.
    """
    found = [choose(group, size) for group in groups(store, configs, checked=checked) if group.shapes]
    if not any(portfolio.kernels for portfolio in found):
        raise InputError(f"database {store.name!r} holds no trial of a variant that can be exported"
                         + (" and has passed the full check; run check --full --best, or add --provisional" if checked
                            else "; tune first"))
    return found


def served_configs(store: Store, portfolios: Iterable[Portfolio]) -> list[BestConfig]:
    """The configs of `portfolios`, with the full checks that `store` has of them."""
    return store.checked(config for portfolio in portfolios for config in portfolio.configs())
