"""What the commands show: tables and lines on stdout, progress on stderr. The only module that uses rich."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...db.answer import Answer
from ...db.lookup.merge import Choice
from ...kernel_templates.batch import Batch
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import BestConfig, Failed, Timed, Wrong
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.task import Task
from ...search_spaces.space import Survey
from ..costs import Forecast, assumptions, total_compiles, total_seconds
from ..measure.rates import Rates
from ..settings import Reason, TaskResult
from . import documents
from .doctor import Machine, consequences
from .text import (
    choice_text,
    config_cells,
    cost_cells,
    crossing,
    grouped,
    judgement,
    milliseconds,
    origin,
    rival,
    seconds,
    shares,
    short,
    unused,
    values,
)

# Of what a merge did not keep, so many are told one by one.
CHOICES = 10

T = TypeVar("T", Forecast, TaskResult)

# How wide a table is where there is no terminal to ask.
PLAIN_WIDTH = 120
NO_GPU_TIMES = ("regime interpreter: kernels run through Triton's interpreter on the CPU, so these times are no GPU's, "
                "and they are never served as one's")


def print_json(document: Mapping[str, object]) -> None:
    """Write `document` on stdout as JSON."""
    say(json.dumps(document, indent=1, allow_nan=False))


def say(text: str) -> None:
    """Write a line on stdout, as it is."""
    _stdout().print(text, markup=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Write a line on stderr: what a program that reads stdout need not see."""
    stderr().print(text, markup=False, highlight=False, soft_wrap=True)


def note_choices(choices: Sequence[Choice]) -> None:
    """Write on stderr what a merge did not keep and why, the first of them one by one."""
    for choice in choices[:CHOICES]:
        note(choice_text(choice))
    if len(choices) > CHOICES:
        note(f"and {len(choices) - CHOICES} more, which --json lists")


def stderr() -> Console:
    """The console that progress is shown on."""
    return Console(stderr=True)


def print_surveys(gpu: Gpu, surveys: Mapping[Task, Survey], limit: int | None) -> None:
    """Write the valid variants on stdout, a key a line, and the counts on stderr."""
    for task, found in surveys.items():
        by_template = Counter(variant.template for variant in found.valid)
        counts = ", ".join(f"{count} of {name}" for name, count in by_template.items())
        note(f"{task.spec.key()}, {short(task.batch)}, pages of {task.page_size} on {gpu.name}: "
             f"{len(found.valid)} valid ({counts}), {found.rejected.total()} rejected"
             + ("" if limit is None or limit >= len(found.valid) else f"; of the valid the first {limit} follow"))
        for reason, count in found.rejected.most_common():
            note(f"  {count} rejected because {reason}")
        for variant in found.valid[:limit]:
            say(variant.key())


def print_forecasts(gpu: Gpu, forecasts: Sequence[Forecast], processes: int) -> None:
    """Write what a run would try and how long it would take, for each task and together."""
    columns = ("batch", "page", "valid variants", "trials", "compiles", "time")
    for title, members in _by_layer(gpu, forecasts).items():
        rows = [(
            short(each.task.batch),
            str(each.task.page_size),
            " + ".join(f"{count} {name}" for name, count in each.valid_by_template.items()),
            str(len(each.trials)),
            str(len(each.compiles)),
            seconds(each.seconds),
        ) for each in members]
        print_table(title, columns, rows)
    say(f"together {total_compiles(forecasts)} compiles, about {seconds(total_seconds(forecasts, processes))}; "
        f"{assumptions(gpu, processes)}")
    if gpu.is_interpreter:
        say(NO_GPU_TIMES)


def print_results(gpu: Gpu, results: Sequence[TaskResult], rates: Rates | None) -> None:
    """Write the table that a run ends with: the best variant of each task against the default and the floor."""
    columns = ("batch", "page", "best variant", "time", "speed-up", "verdict", *([] if rates is None else ["of floor"]))
    for title, members in _by_layer(gpu, results).items():
        print_table(title, columns, [_result_cells(result, rates) for result in members])
        for result in members:
            if result.best is not None and (over := rival(result, gpu)) != "the default":
                say(f"the speed-up on {short(result.task.batch)}, pages of {result.task.page_size}, is over {over}")
    outcomes = sum((result.outcomes for result in results), Counter[str]())
    tried, reused = sum(result.tried for result in results), sum(result.reused for result in results)
    kinds = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    regimes = dict.fromkeys(str(result.best.timing.regime) for result in results if result.best is not None)
    say(f"{tried} variants tried and {reused} taken over from earlier runs ({kinds}) in "
        f"{seconds(sum(result.seconds for result in results))}, regime {' and '.join(regimes)}")
    say(shares(results))
    if costs := cost_cells(results):
        columns = ("shapes", "seconds", "trials", "kernels compiled", "kernels shared")
        print_table("cost of a shape, in the order of the run", columns, costs)
    if text := crossing(results):
        say(text)
    for text in unused(sum((result.outdated for result in results), Counter[str]())):
        say(text)
    if rates is not None:
        say(f"the floor is what reading {rates.read_tb_per_s:.2f} TB/s and multiplying {rates.matmul_tflops:.0f} "
            "TFLOP/s, both measured here, would take")
    if gpu.is_interpreter:
        say(NO_GPU_TIMES)
    print_failures(sum((result.reasons for result in results), Counter[Reason]()))


def print_configs(configs: Sequence[BestConfig]) -> None:
    """Write a table of stored best configs for each GPU, layer and regime."""
    groups: dict[str, list[BestConfig]] = {}
    for config in configs:
        title = f"{config.gpu.name}, {config.shape.spec.key()}, regime {config.timing.regime}"
        groups.setdefault(title, []).append(config)
    for title, members in groups.items():
        columns = ("batch", "page", "best variant", "time", "speed-up", "verdict", "check")
        print_table(title, columns, map(config_cells, members))


def print_trials(database: str, counts: Counter[str], reasons: Counter[Reason] | None) -> None:
    """Write how many trials the database holds by outcome and, unless None, why those without a time have none."""
    by_outcome = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    say(f"{database}: {counts.total()} trials" + (f" ({by_outcome})" if counts else ""))
    print_failures(reasons or Counter())


def print_answers(gpu: Gpu, answers: Iterable[tuple[AttentionSpec, Batch, Answer]]) -> None:
    """Write what a lookup answered: for each batch the variant's key, then where it comes from."""
    for spec, batch, answer in answers:
        say(answer.variant.key())
        say(f"  for {short(batch)} of {spec.key()} on {gpu.name}")
        say(f"  source {answer.source}: {origin(answer)}")


def print_outcome(task: Task, gpu: Gpu, outcome: Timed | Wrong | Failed, *, timed: bool, as_json: bool) -> None:
    """Write what came of checking a variant and, if `timed`, of timing it."""
    if as_json:
        document = documents.outcome_document(outcome)
        if not timed:
            document.pop("time", None)
        print_json({"gpu": gpu.name, **documents.task_document(task), **document})
        return
    say(outcome.variant.key())
    say(f"  for {short(task.batch)} of {task.spec.key()} on {gpu.name}")
    if isinstance(outcome, Failed):
        say(f"  failed at {outcome.stage}: {outcome.reason}")
        return
    say(f"  {judgement(outcome.check)}")
    if isinstance(outcome, Timed) and timed:
        lower, upper = outcome.timing.quartiles_ms
        say(f"  {milliseconds(outcome.timing.median_ms)} "
            f"(quartiles {milliseconds(lower)} and {milliseconds(upper)}, {len(outcome.timing.samples_ms)} samples, "
            f"plan {milliseconds(outcome.timing.plan_ms)}), regime {outcome.timing.regime}")
        if gpu.is_interpreter:
            note(NO_GPU_TIMES)


def print_machine(machine: Machine, rates: Rates | None) -> None:
    """Write what a machine has, what was measured on it, and what will therefore happen."""
    gpu = machine.gpu
    rows = {
        "python": f"{machine.python} on {machine.system}, {machine.cores} cores",
        **machine.versions,
        "GPU": "none that torch can use" if gpu is None else (
            f"{gpu.name}, sm_{gpu.arch}, {gpu.num_sms} multiprocessors, {gpu.shared_memory_bytes >> 10} KiB of shared "
            f"memory, {gpu.l2_bytes >> 20} MiB of L2, driver {gpu.driver or 'unknown'}"),
        "kernel cache": str(machine.cache),
        "database": str(machine.database or machine.database_name),
    }
    if rates is not None:
        rows["measured"] = f"reads {rates.read_tb_per_s:.2f} TB/s, bf16 matmul {rates.matmul_tflops:.0f} TFLOP/s"
    width = max(map(len, rows))
    for name, value in rows.items():
        say(f"{name:<{width}}  {value}")
    for sentence in consequences(machine):
        say(sentence)


def print_failures(reasons: Counter[Reason]) -> None:
    """Write a table of why trials have no time, if there are any."""
    if reasons:
        rows = [(str(count), *kind) for kind, count in grouped(reasons).most_common()]
        print_table("trials without a time", ("count", "outcome", "stage", "reason"), rows)


def _stdout() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def _by_layer(gpu: Gpu, members: Iterable[T]) -> dict[str, list[T]]:
    """`members` by the title of their table: their layer, and the GPU."""
    groups: dict[str, list[T]] = {}
    for member in members:
        groups.setdefault(f"{gpu.name}, {member.task.spec.key()}", []).append(member)
    return groups


def _result_cells(result: TaskResult, rates: Rates | None) -> list[str]:
    best, task = result.best, result.task
    cells = [short(task.batch), str(task.page_size)]
    if best is None:
        return [*cells, "none was right and timed", "", "", "", *([] if rates is None else [""])]
    cells += [values(best.variant), milliseconds(best.timing.median_ms), f"{best.speedup:.2f}x"]
    cells.append(best.verdict.value)
    share = documents.floor_share(result, rates)
    return cells if share is None else [*cells, f"{share:.0%}"]


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table on stdout, as wide as the terminal."""
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # Texts, not strings: a compiler's message may hold what rich would read as markup.
        table.add_row(*map(Text, row))
    _stdout().print(table)
