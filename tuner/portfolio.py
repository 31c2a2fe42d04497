"""Portfolios: few compiled kernels that serve all tuned shapes of a layer, and what each shape loses by that.

An engine compiles before it serves, and what takes its time is the number of kernels. So that is what is counted:
variants that differ only in what is planned share a kernel, and each shape is given the fastest of them.
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
from ..kernel_templates.registry import template_of, why_invalid
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.variant import Variant
from .subset import best_columns, fewest_columns

SIZE = 8
"""How many kernels a portfolio has where nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one trial of a variant took, and with what it was measured."""

    timing: Timing
    environment: Environment
    measured_at: str


@dataclass(frozen=True)
class TunedShape:
    """A tuned shape: its best config, and the variants that were right and timed on its batch.

    `eligible` are those of them that a portfolio may have.
    """

    best: BestConfig
    timed: Mapping[Variant, Measured]
    eligible: frozenset[Variant]

    @property
    def batch(self) -> Batch:
        """The batch it was tuned on."""
        return Batch.parse(self.best.batch)

    def loss(self, variant: Variant) -> float | None:
        """How much slower `variant` is than the best of this shape, as a share; None where it was not timed here.

        Both times are of trials, which all have the same stopwatch. What won a decided race loses nothing.
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
        """By kernel, the least loss of an eligible variant of it, and that variant: the least loss first.

        Of several the best config's comes first, then by key.
        """
        losses = [(loss, v) for v in self.eligible if (loss := self.loss(v)) is not None]
        losses.sort(key=lambda each: (each[0], each[1] != self.best.variant, each[1].key()))
        found: dict[str, tuple[float, Variant]] = {}
        for loss, variant in losses:
            found.setdefault(_kernel(variant), (loss, variant))
        return found

    def served_by(self, variant: Variant) -> BestConfig:
        """The config that serves this shape with `variant`, which was timed here, and the default's time beside it."""
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
    """Tuned shapes among which kernels can be shared: of one layer, page size, GPU and regime.

    `incomparable` best configs of it are left out: their variant cannot run any more, or no trial in the latest
    environment says what it takes.
    """

    spec: AttentionSpec
    page_size: int
    gpu: Gpu
    regime: Regime
    shapes: tuple[TunedShape, ...]
    incomparable: int = 0


@dataclass(frozen=True, slots=True)
class Pick:
    """What serves a shape: `variant` and its loss, both None where no kernel of the portfolio was timed there."""

    shape: TunedShape
    variant: Variant | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class Portfolio:
    """The chosen kernels, as `Template.code_key` names them, and what serves each shape of `group`."""

    group: Group
    kernels: tuple[str, ...]
    picks: tuple[Pick, ...]

    @property
    def losses(self) -> tuple[float, ...]:
        """The losses that are known."""
        return tuple(pick.loss for pick in self.picks if pick.loss is not None)

    @property
    def worst(self) -> float | None:
        """The largest loss, None where that of any shape is not known."""
        return max(self.losses) if self.losses and len(self.losses) == len(self.picks) else None

    @property
    def mean(self) -> float | None:
        """The mean of the losses that are known, None where none is."""
        return statistics.fmean(self.losses) if self.losses else None

    @property
    def num_variants(self) -> int:
        """How many variants the kernels are launched as."""
        return len({pick.variant for pick in self.picks if pick.variant is not None})

    def configs(self) -> list[BestConfig]:
        """The config of each shape that is served."""
        return [pick.shape.served_by(pick.variant) for pick in self.picks if pick.variant is not None]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A shape that was answered from a portfolio of the others: `loss` is None where the answer was not timed there."""

    shape: TunedShape
    variant: Variant
    source: Source
    loss: float | None


def groups(store: Store, configs: Iterable[BestConfig], *, checked: bool = False) -> list[Group]:
    """`configs`, of `store`, by what can share kernels, each with its trials; a group may be left without shapes.

    With `checked`, a portfolio may have only what has passed the full check in the environment of its trial.
    """
    members: dict[tuple[AttentionSpec, int, str, int, Regime], list[BestConfig]] = {}
    for config in configs:
        key = (config.shape.spec, config.variant.page_size, config.gpu.name, config.gpu.num_sms, config.timing.regime)
        members.setdefault(key, []).append(config)
    found: list[Group] = []
    for (spec, page_size, _, _, regime), bests in members.items():
        gpu = bests[0].gpu
        checks = FullChecks(store.full_checks(spec=spec, gpu_name=gpu.name)) if checked else None
        timed = _timed(store.trials(spec, page_size, gpu), regime)
        shapes = [_shape(best, timed.get(best.batch, {}), checks) for best in bests]
        shapes = [s for s in shapes if (m := s.timed.get(s.best.variant)) and m.environment == s.best.environment]
        found.append(Group(spec, page_size, gpu, regime, tuple(shapes), len(bests) - len(shapes)))
    return found


def _shape(best: BestConfig, timed: Mapping[Variant, Measured], checks: FullChecks | None) -> TunedShape:
    def has_passed(variant: Variant, environment: Environment) -> bool:
        if checks is None:
            return True
        check = checks.of(best.shape.spec, variant, best.gpu, environment)
        return check is not None and check.passed

    return TunedShape(best, timed, frozenset(v for v, each in timed.items() if has_passed(v, each.environment)))


def choose(group: Group, size: int = SIZE) -> Portfolio:
    """The portfolio of at most `size` kernels: the worst loss over the shapes is least, and then the mean.

    The worst comes first because it is what whoever serves that batch gets; the mean may hide it.
    """
    table = _Table(group.shapes)
    kernels = tuple(table.kernels[column] for column in best_columns(table.losses, size))
    return Portfolio(group, kernels, tuple(_pick(shape, kernels) for shape in group.shapes))


def portfolios_of(store: Store, configs: Iterable[BestConfig], size: int, *, checked: bool) -> list[Portfolio]:
    """The portfolio of each of the groups that `configs`, of `store`, are in.

    Raises `InputError` where no shape of any has a variant that was timed and, with `checked`, has passed the full
    check.
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


def curve(group: Group, most: int) -> list[Portfolio]:
    """The portfolios of at most 1, 2, ... `most` kernels, up to the one that loses nothing."""
    found: list[Portfolio] = []
    for size in range(1, most + 1):
        found.append(choose(group, size))
        if not any(found[-1].losses) and found[-1].worst is not None:
            break
    return found


def fewest_kernels(group: Group, limit: float) -> int | None:
    """The fewest kernels with which no shape loses more than `limit`."""
    return fewest_columns(_Table(group.shapes).losses, limit)


def leave_one_out(group: Group, size: int = SIZE) -> Iterator[LeftOut]:
    """Each shape in turn, answered by the lookup from a portfolio that was chosen for, and holds, the others."""
    for index, shape in enumerate(group.shapes):
        rest = replace(group, shapes=(*group.shapes[:index], *group.shapes[index + 1:]))
        if rest.shapes:
            table = ConfigTable.of(choose(rest, size).configs())
            answer = table.lookup(group.spec, shape.batch, group.page_size, group.gpu)
            yield LeftOut(shape, answer.variant, answer.source, shape.loss(answer.variant))


class _Table:
    """What each shape loses with each kernel that was timed on any: `losses [shapes, kernels]`, infinite if not."""

    def __init__(self, shapes: Sequence[TunedShape]) -> None:
        rows = [shape.kernels for shape in shapes]
        self.kernels = list(dict.fromkeys(kernel for row in rows for kernel in row))
        self.losses = np.array([[row.get(kernel, (np.inf,))[0] for kernel in self.kernels] for row in rows])


def _pick(shape: TunedShape, kernels: Sequence[str]) -> Pick:
    for kernel, (loss, variant) in shape.kernels.items():
        if kernel in kernels:
            return Pick(shape, variant, loss)
    return Pick(shape, None, None)


@functools.lru_cache(maxsize=65536)
def _kernel(variant: Variant) -> str:
    return template_of(variant).code_key(variant)


def _timed(trials: Sequence[TrialRecord], regime: Regime) -> dict[str, dict[Variant, Measured]]:
    """By batch, what the latest trial of each variant took, as far as it can be compared with the latest of all.

    That is what was measured in `regime` with the same Triton, torch and driver, and with the source that the latest
    trial of its template has.
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
        if (isinstance(outcome, Timed) and outcome.timing.regime == regime and trial.environment == environment
                and not why_invalid(variant, trial.setting.spec, trial.setting.gpu)):
            measured = Measured(outcome.timing, trial.environment, trial.measured_at)
            found.setdefault(batch, {})[variant] = measured
    return found
