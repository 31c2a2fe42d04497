"""How batches, variants, times and what came of trials are put in few words."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ...db.answer import Answer
from ...db.lookup.merge import Choice
from ...kernel_templates.batch import Batch
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.heuristic import default_variant
from ...kernel_templates.outcome import BestConfig, Check, FullCheck
from ...kernel_templates.registry import why_invalid
from ...kernel_templates.variant import Variant
from ..settings import Progress, Reason, TaskResult

# Parts of a run whose cost is compared.
PARTS = 4
# A batch whose text is longer than this is shortened.
BATCH_WIDTH = 44
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def short(batch: Batch) -> str:
    """`batch` in at most a few words: contexts of many sequences of one query length are cut to their range."""
    text = str(batch)
    if len(text) <= BATCH_WIDTH:
        return text
    groups: dict[int, list[int]] = {}
    for query_len, context_len in batch.sequences:
        groups.setdefault(query_len, []).append(context_len)
    parts = [
        f"{len(contexts)}x{query_len}@{min(contexts)}" + (f"..{max(contexts)}" if len(set(contexts)) > 1 else "")
        for query_len, contexts in groups.items()
    ]
    return ",".join(parts)


def values(variant: Variant) -> str:
    """The template and values of `variant` in words that a narrow column can break; the page size is left out."""
    return " ".join([variant.template, *(f"{name}={value}" for name, value in variant.values)])


def milliseconds(ms: float) -> str:
    """A time with three significant digits, or microseconds where these read better."""
    return f"{ms * 1e3:.1f} us" if ms < 1 else f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1e3:.3g} s"


def seconds(count: float) -> str:
    """A duration in seconds, minutes or hours."""
    if count < 100:
        return f"{count:.0f} s"
    return f"{count / 60:.0f} min" if count < 5400 else f"{count / 3600:.1f} h"


def progress_text(progress: Progress) -> str:
    """Where a search stands: the best so far against the default, trials without a time by kind, and the time left."""
    parts: list[str] = []
    if progress.best_ms is not None:
        parts.append(f"best {milliseconds(progress.best_ms)}")
        if progress.default_ms is not None:
            parts[0] += f", {progress.default_ms / progress.best_ms:.2f}x over the default"
    parts += [f"{count} {kind}" for kind, count in progress.outcomes.items() if kind != "timed"]
    if math.isfinite(progress.seconds_left):
        parts.append(f"at most {seconds(max(0.0, progress.seconds_left))} left")
    return "; ".join(parts)


def rival(result: TaskResult, gpu: Gpu) -> str:
    """What a speed-up is over: the default, or what stood in for it and why."""
    task, baseline = result.task, result.baseline
    default = default_variant(task.spec, task.batch, task.page_size)
    if baseline is None or baseline == default:
        return "the default"
    lack = "cannot run" if why_invalid(default, task.spec, gpu) else "was not right and timed"
    return f"{baseline.key()}, the default {lack}"


def judgement(check: Check) -> str:
    """Whether a result was right, and its worst row."""
    worst = check.detail or f"its error is {check.worst_ratio:.3g} times what is tolerated"
    return f"{'right' if check.passed else 'wrong'}; the worst row: {worst}"


def config_cells(config: BestConfig) -> tuple[str, ...]:
    """The row of a table for `config`: batch, page size, variant, time, speed-up, verdict and check."""
    return (
        short(Batch.parse(config.batch)),
        str(config.variant.page_size),
        values(config.variant),
        milliseconds(config.timing.median_ms),
        f"{config.speedup:.2f}x",
        config.verdict.value,
        "full" if config.full_check else "quick",
    )


def counted(count: int, noun: str) -> str:
    """`count` and the noun, in the plural where it is not one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def full_check_cells(check: FullCheck) -> tuple[str, ...]:
    """The row of a table for `check`: page size, variant, result, cases that passed and were run, and the worst."""
    states = Counter(case.state for case in check.cases)
    worst = check.worst
    return (
        str(check.variant.page_size),
        values(check.variant),
        full_check_result(check),
        f"{states['passed']} of {states['passed'] + states['failed']}",
        "" if worst is None else f"{worst.worst_ratio:.3g}",
        "" if worst is None else worst.name,
    )


def full_check_result(check: FullCheck) -> str:
    """Whether `check` passed, and if so how many cases that leaves open."""
    if not check.passed:
        return "failed"
    return f"passed, {counted(check.unrun, 'case')} not run" if check.unrun else "passed"


def unrun_cases(checks: Sequence[FullCheck]) -> dict[str, list[str]]:
    """The names of the cases that were not run for one of `checks` at least, by reason, in the order of the cases."""
    found: dict[str, list[str]] = {}
    for case in dict.fromkeys(replace(case, worst_ratio=None) for check in checks for case in check.cases):
        if case.state == "not run":
            found.setdefault(case.reason, []).append(case.name)
    return found


def origin(answer: Answer) -> str:
    """What the answer of a lookup was taken from."""
    config = answer.config
    if config is None:
        return "nothing tuned fits, so the values are chosen by rule"
    whose = {"database": "in your database", "file": "in a file"}.get(answer.origin or "", "shipped")
    on = "" if answer.lender is None else f" on {answer.lender}"
    text = (f"{whose}, tuned{on} on {short(Batch.parse(config.batch))}, {milliseconds(config.timing.median_ms)} there, "
            f"{config.speedup:.2f}x over the default, regime {config.timing.regime}")
    if answer.loss:
        text += f"; such answers lose {answer.loss:.1%} in the median"
    return text + ("; stale: measured with another kernel source, Triton or driver" if answer.stale else "")


def choice_text(choice: Choice) -> str:
    """What a merge did not keep, what it kept in its place, and why."""
    config = choice.dropped
    kept = "" if choice.kept is None else f" behind {choice.kept.variant.key()}"
    return (f"for {short(Batch.parse(config.batch))} at pages of {config.variant.page_size} on {config.gpu.name}, "
            f"{config.variant.key()} was not kept{kept}: {choice.reason}")


def shares(results: Sequence[TaskResult]) -> str:
    """How busy the two sides of a run were, how fast it went, and how often it found a variant to be another's twin."""
    wall = sum(result.seconds for result in results)
    measuring = sum(result.measuring_seconds for result in results)
    compiling = sum(result.compiling_seconds for result in results)
    tried, repeated = (sum(getattr(result, name) for result in results) for name in ("tried", "repeated"))
    if not wall:
        return "nothing was to be done"
    twins = f", {repeated} of them by the result of a variant with the same code and launch" if repeated else ""
    return (f"variants were measured or checked for {measuring / wall:.0%} of the time and all compiling processes "
            f"were busy for {compiling / wall:.0%}; {tried / wall:.1f} variants a second{twins}")


def cost_cells(results: Sequence[TaskResult]) -> list[tuple[str, ...]]:
    """What a shape cost, by parts of a run in its order: shapes, and means of seconds, trials and kernels.

    Shapes of which all was known before are not counted. Nothing for fewer than two, or where none was compiled for.
    """
    new = [result for result in results if result.tried]
    if len(new) < 2 or not any(result.compiles for result in new):
        return []
    size = math.ceil(len(new) / PARTS)
    rows: list[tuple[str, ...]] = []
    for start in range(0, len(new), size):
        part = new[start:start + size]
        sums = [sum(getattr(each, name) for each in part) for name in ("seconds", "tried", "compiles", "shared")]
        shapes = f"{start + 1}-{start + len(part)}" if len(part) > 1 else f"{start + 1}"
        rows.append((shapes, *(f"{total / len(part):.1f}" for total in sums)))
    return rows


def crossing(results: Sequence[TaskResult]) -> str:
    """What was tried of the winners of other tasks; nothing where that was not asked for."""
    crossed, taken = (sum(getattr(result, name) for result in results) for name in ("crossed", "cross_seconds"))
    if not taken:
        return ""
    return f"what won one batch was tried on the others: {counted(crossed, 'more trial')} in {seconds(taken)}"


def unused(outdated: Counter[str]) -> list[str]:
    """A sentence for each reason why stored trials were not used."""
    return [
        f"1 stored trial was {reason} and is not used" if count == 1 else
        f"{count} stored trials were {reason} and are not used"
        for reason, count in outdated.most_common()
    ]


def grouped(reasons: Counter[Reason]) -> Counter[Reason]:
    """`reasons` with those together that differ only in numbers, which are then written as N."""
    groups: dict[Reason, Counter[Reason]] = {}
    for (outcome, stage, reason), count in reasons.items():
        groups.setdefault((outcome, stage, _NUMBER.sub("N", reason)), Counter())[outcome, stage, reason] += count
    return Counter({kind if len(group) > 1 else next(iter(group)): group.total() for kind, group in groups.items()})
