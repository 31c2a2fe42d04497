"""Full checks of many variants: one process runs each case for one variant after the other."""

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

# A variant that hangs in a case is given up after this time.
CASE_LIMIT_S = 300.0
# Variants that are checked together share the references, and are stored when all of them are done.
GROUP = 16


@dataclass(frozen=True, slots=True)
class Subject:
    """The layer and variant of a full check."""

    spec: AttentionSpec
    variant: Variant


@dataclass(frozen=True, slots=True)
class FullCheckJob(Job[CaseResult]):
    """Run one case of the full check of a variant. Its reference is cached for the next variant of its page size."""

    spec: AttentionSpec
    variant: Variant
    case: Case

    def run(self, context: Context) -> CaseResult:
        """The result. Raises any error of the case."""
        from .run import make_checker, run_case

        gpu, page_size = context.gpu(), self.variant.page_size
        device = "cpu" if gpu.is_interpreter else "cuda"
        # No variant is to blame for a failure here.
        context.report_stage("reference")
        checker = context.cached((self.spec, page_size, self.case),
                               lambda: make_checker(self.spec, page_size, self.case, device))
        context.report_stage(self.case.name, self.variant)
        return run_case(self.variant, self.case, gpu, checker)

    def result_after(self, error: JobError, run: Callable[[Job[CaseResult]], CaseResult]) -> CaseResult:
        """A failed case of the variant to blame. Raises `error` where none is."""
        if error.variant is None:
            raise error
        return CaseResult(self.case.name, "failed", reason=error.reason)


@dataclass(frozen=True, slots=True)
class SanitizeJob(Job[CaseResult]):
    """Run a variant under compute-sanitizer."""

    spec: AttentionSpec
    variant: Variant

    def run(self, context: Context) -> CaseResult:
        """The sanitizer's result."""
        from .run import sanitize

        context.clear_cache()
        return sanitize(self.spec, self.variant, context.gpu())


def subjects_of(store: Store, gpu: Gpu, environment_of: EnvironmentOf, layers: Sequence[AttentionSpec] = ()
                ) -> list[Subject]:
    """The stored best configs on `gpu` that have not passed in the present environment; only of `layers` if given.

    Configs that cannot run here are left out. Raises `NothingValidError` where no best config is stored.
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
    """Check the subjects, several of one layer and page size at a time; `starting` is called with each such group.

    Raises `InputError` before anything is run if the interpreter would take too long.
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
    """Compile on all cores the code that the cases launch, with the log-sum-exp and without.

    A variant that cannot be compiled fails its first case for the same reason.
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
    """Subjects of one layer and page size, and the results of their cases so far."""

    def __init__(self, subjects: Sequence[Subject], gpu: Gpu, seed: int) -> None:
        self._gpu = gpu
        self._seed = seed
        self._results: dict[Subject, list[CaseResult]] = {subject: [] for subject in subjects}

    def checks(self, worker: Worker, environment_of: EnvironmentOf, sampled: set[str]) -> list[FullCheck]:
        """The full check of each subject. The first variant of a template that is not in `sampled` is sanitized."""
        by_case: dict[Case, list[Subject]] = {}
        for subject in self._results:
            for case in cases_of(subject.spec, subject.variant, self._seed):
                by_case.setdefault(case, []).append(subject)
        with ExitStack() as stack:
            fresh = fresh_cases(self._seed)
            # They import meanwhile, which needs no GPU, so that no case has to wait for it.
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
        """Run `case` for those of `subjects` that have failed no case before."""
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
