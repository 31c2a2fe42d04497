"""Full checks of many variants: each case is run for one variant after the other, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...db.records import EnvironmentOf, utc_now
from ...kernel_templates.errors import NothingValidError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import CaseResult, FullCheck, JobError
from ...kernel_templates.registry import why_invalid
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.variant import Variant
from ..processes.child import Context, Job
from ..processes.compile import CompileJob, CompilePool
from ..processes.worker import Worker
from .cases import NEEDS_GPU, Case, cases_of, compiled_cases, fresh_cases, refuse_slow, sanitizer_case

if TYPE_CHECKING:
    from ...db.store import Store

# A variant that hangs in one case is given up after this time.
CASE_LIMIT_S = 300.0
# What is checked together shares the references, and is stored when all of it is done.
GROUP = 16


@dataclass(frozen=True, slots=True)
class Subject:
    """What a full check belongs to, beside the environment."""

    spec: AttentionSpec
    variant: Variant


@dataclass(frozen=True, slots=True)
class FullCheckJob(Job[CaseResult]):
    """Run one case of the full check of a variant; what is right for it is kept for the next one of its page size."""

    spec: AttentionSpec
    variant: Variant
    case: Case

    def run(self, context: Context) -> CaseResult:
        """What came of it; what goes wrong is raised."""
        from .run import make_checker, run_case

        gpu, page_size = context.gpu(), self.variant.page_size
        device = "cpu" if gpu.is_interpreter else "cuda"
        # No variant is to blame for what goes wrong here.
        context.report_stage("reference")
        checker = context.cached((self.spec, page_size, self.case),
                               lambda: make_checker(self.spec, page_size, self.case, device))
        context.report_stage(self.case.name, self.variant)
        return run_case(self.variant, self.case, gpu, checker)

    def result_after(self, error: JobError, run: Callable[[Job[CaseResult]], CaseResult]) -> CaseResult:
        """The variant failed the case. Raises `error` where none is to blame."""
        if error.variant is None:
            raise error
        return CaseResult(self.case.name, "failed", reason=error.reason)


@dataclass(frozen=True, slots=True)
class SanitizeJob(Job[CaseResult]):
    """Run a variant under compute-sanitizer."""

    spec: AttentionSpec
    variant: Variant

    def run(self, context: Context) -> CaseResult:
        """What it found."""
        from .run import sanitize

        context.clear_cache()
        return sanitize(self.spec, self.variant, context.gpu())


def subjects_of(store: Store, gpu: Gpu, environment_of: EnvironmentOf, layers: Sequence[AttentionSpec] = ()
                ) -> list[Subject]:
    """Those of the stored best configs on `gpu` that have not passed in the present environment; of `layers` if given.

    What failed is not among them, nor what cannot run here. Raises `NothingValidError` where no best config is stored.
    """
    configs = [
        config for config in store.best_configs(gpu_name=gpu.name)
        if (not layers or config.shape.spec in layers) and not why_invalid(config.variant, config.shape.spec, gpu)
    ]
    if not configs:
        raise NothingValidError(f"database {store.name!r} holds no best config of {gpu.name} that can be checked; tune "
                                "first")
    passed = {
        (check.spec, check.variant) for check in store.full_checks(gpu_name=gpu.name)
        if check.passed and check.environment == environment_of(check.variant.template, gpu)
    }
    found = dict.fromkeys(Subject(config.shape.spec, config.variant) for config in configs)
    return [subject for subject in found if (subject.spec, subject.variant) not in passed]


def run_full_checks(
    subjects: Iterable[Subject],
    gpu: Gpu,
    environment_of: EnvironmentOf,
    seed: int = 0,
    starting: Callable[[Sequence[Subject]], object] = len,
) -> Iterator[FullCheck]:
    """The full check of each subject, several of one layer and page size at a time; `starting` is told which.

    Raises `InputError` where the interpreter would take too long, before anything is run.
    """
    groups: dict[tuple[AttentionSpec, int], list[Subject]] = {}
    for subject in subjects:
        refuse_slow(subject.spec, subject.variant, gpu)
        groups.setdefault((subject.spec, subject.variant.page_size), []).append(subject)
    sampled: set[str] = set()
    if not gpu.is_interpreter:
        _compile_ahead([subject for members in groups.values() for subject in members], gpu)
    with Worker.on(gpu) as worker:
        for members in [group[i:i + GROUP] for group in groups.values() for i in range(0, len(group), GROUP)]:
            starting(members)
            yield from _Group(members, gpu, seed).checks(worker, environment_of, sampled)


def _compile_ahead(subjects: Sequence[Subject], gpu: Gpu) -> None:
    """Compile what the cases launch on all cores, with the log-sum-exp and without.

    What cannot be compiled fails its first case again, and says why there.
    """
    jobs = dict.fromkeys(
        CompileJob(subject.variant, subject.spec, gpu, case.batch, case.lse)
        for subject in subjects for case in compiled_cases(subject.spec, subject.variant)
    )
    with CompilePool() as pool:
        for job in jobs:
            pool.submit(job)
        while pool.pending:
            pool.results(1.0)


class _Group:
    """Some subjects of one layer and page size, and what came of their cases so far."""

    def __init__(self, subjects: Sequence[Subject], gpu: Gpu, seed: int) -> None:
        self._gpu = gpu
        self._seed = seed
        self._results: dict[Subject, list[CaseResult]] = {subject: [] for subject in subjects}

    def checks(self, worker: Worker, environment_of: EnvironmentOf, sampled: set[str]) -> list[FullCheck]:
        """The check of each; a template whose name is not in `sampled` has its first variant sanitized."""
        by_case: dict[Case, list[Subject]] = {}
        for subject in self._results:
            for case in cases_of(subject.spec, subject.variant, self._seed):
                by_case.setdefault(case, []).append(subject)
        with ExitStack() as stack:
            fresh = fresh_cases(self._seed)
            # They need no GPU to import what they need, so that no case has to wait for it.
            others = [worker if self._gpu.is_interpreter else stack.enter_context(Worker.on(self._gpu)) for _ in fresh]
            for other in others:
                other.start()
            for case, subjects in by_case.items():
                self._run(worker, case, subjects)
            worker.free()
            for case, other in zip(fresh, others, strict=True):
                self._run(other, case, list(self._results))
                other.free()
        self._sanitize(worker, sampled)
        return [
            FullCheck(subject.spec, subject.variant, self._gpu.name,
                      environment_of(subject.variant.template, self._gpu), tuple(results), utc_now())
            for subject, results in self._results.items()
        ]

    def _run(self, worker: Worker, case: Case, subjects: Sequence[Subject]) -> None:
        """Run `case` for those of `subjects` that have failed none before."""
        skip = case.skip or (NEEDS_GPU if case.needs_gpu and self._gpu.is_interpreter else "")
        for subject in subjects:
            if self._has_failed(subject):
                continue
            result = CaseResult(case.name, "not run", reason=skip) if skip else worker.run(
                FullCheckJob(subject.spec, subject.variant, case), CASE_LIMIT_S)
            self._results[subject].append(result)

    def _sanitize(self, worker: Worker, sampled: set[str]) -> None:
        name = sanitizer_case().name
        for subject, results in self._results.items():
            template = subject.variant.template
            if self._has_failed(subject):
                continue
            if self._gpu.is_interpreter:
                results.append(CaseResult(name, "not run", reason=NEEDS_GPU))
            elif template in sampled:
                results.append(CaseResult(name, "not run", reason=f"another variant of {template} is the sample"))
            else:
                sampled.add(template)
                results.append(worker.run(SanitizeJob(subject.spec, subject.variant), CASE_LIMIT_S))

    def _has_failed(self, subject: Subject) -> bool:
        return any(result.state == "failed" for result in self._results[subject])
