"""Tables, JSON, messages and live progress. This is the only module that uses rich."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from ...kernel_templates.batch import Batch
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import BestConfig, Regime, Timing
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.task import Task
from ...kernel_templates.variant import Variant
from ..settings import Listener, Progress, Reason, TaskResult
from .text import baseline_text, batch_text, grouped, milliseconds, progress_text

if TYPE_CHECKING:
    from rich.console import Console

# Width of a table without a terminal.
PLAIN_WIDTH = 120
# Most trials between two lines of progress without a terminal.
LINE_EVERY = 10
INTERPRETER_NOTE = ("regime interpreter: kernels run through Triton's interpreter on the CPU; these times say nothing "
                    "about a GPU and are never served for one")
# Names in JSON that differ from those of the fields: the ones of exports.
_JSON_NAMES = {"timing": "time", "default_timing": "default_time"}


def say(text: str) -> None:
    """Write a line on stdout as it is."""
    _console().print(text, markup=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Write a line on stderr: progress and warnings, which no program that reads stdout needs."""
    _console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table on stdout, as wide as the terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # A compiler's message may hold what rich would read as markup; a `Text` is shown as it is.
        table.add_row(*map(Text, row))
    _console().print(table)


def print_failures(reasons: Counter[Reason]) -> None:
    """Write a table of why trials have no time, if there are any."""
    if reasons:
        rows = [(str(count), *kind) for kind, count in grouped(reasons).most_common()]
        print_table("trials without a time", ("count", "outcome", "stage", "reason"), rows)


def print_json(document: Mapping[str, object]) -> None:
    """Write `document` on stdout as JSON, its values as `encode` gives them."""
    say(json.dumps(encode(document), indent=1, allow_nan=False))


def encode(value: object) -> Any:
    """Return `value` as JSON can hold it.

    A layer, batch, variant, GPU or regime is its text, any other record an object of its fields; the fields of a task
    join those of the record that holds it. A number that is not finite is null.
    """
    match value:
        case AttentionSpec() | Variant():
            return value.key()
        case Gpu():
            return value.name
        case Batch() | Regime():
            return str(value)
        case BestConfig():
            from ...db.lookup.documents import config_to_json

            return {**config_to_json(value), "gpu": asdict(value.gpu), "environment": asdict(value.environment)}
        case Timing():
            return {"median_ms": value.median_ms, "quartiles_ms": value.quartiles_ms, "samples_ms": value.samples_ms,
                    "plan_ms": value.plan_ms, "regime": asdict(value.regime)}
        case Enum():
            return value.value
        case float():
            return value if math.isfinite(value) else None
        case str() | int() | None:
            return value
        case Mapping():
            entries = cast("Mapping[object, object]", value).items()
            return {str(encode(key)): encode(each) for key, each in entries}
        case _ if is_dataclass(value):
            return _encoded_fields(value)
        case _:
            return [encode(each) for each in cast("Iterable[object]", value)]


def encode_reasons(reasons: Counter[Reason]) -> list[dict[str, object]]:
    """Return why trials have no time as objects of outcome, stage, reason and count, the most frequent first."""
    names = ("outcome", "stage", "reason", "count")
    return [dict(zip(names, (*kind, count), strict=True)) for kind, count in reasons.most_common()]


def _encoded_fields(record: Any) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Task):
            document |= encode(value)
        elif field.name == "reasons":
            document["failures"] = encode_reasons(value)
        else:
            document[_JSON_NAMES.get(field.name, field.name)] = encode(value)
    return document


class TuneProgress(Listener):
    """Progress of a run on stderr: live on a terminal, else a line for each new best and tenth trial."""

    def __init__(self, gpu: Gpu, heading: str | None = None, console: Console | None = None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._gpu = gpu
        self._heading = heading or f"tuning on {gpu.name}" + (f"; {INTERPRETER_NOTE}" if gpu.is_interpreter else "")
        self._console = console or _console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(16), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(), console=self._console, disable=not self._console.is_terminal)
        self._row = self._bar.add_task("", total=None, visible=False)
        self._best_ms = math.inf

    def __enter__(self) -> TuneProgress:
        self._log(self._heading)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def started(self, task: Task, valid: int, reused: int) -> None:
        """Add a row for the task."""
        self._best_ms = math.inf
        self._row = self._bar.add_task(f"{batch_text(task.batch)} page {task.page_size}", total=None, text="")
        self._log(f"{task.spec.key()}, {batch_text(task.batch)}, pages of {task.page_size}: {valid} valid variants, "
                  f"{reused} stored trials reused")

    def tried(self, progress: Progress) -> None:
        """Update the row; without a terminal, write a line for a new best and for every tenth trial."""
        text = progress_text(progress)
        self._bar.update(self._row, completed=progress.done, total=progress.planned, text=text)
        best_ms = math.inf if progress.best_ms is None else progress.best_ms
        if best_ms < self._best_ms or progress.done % LINE_EVERY == 0:
            self._log_plain(f"  trial {progress.done} of {progress.planned}: {text}")
        self._best_ms = best_ms

    def racing(self, task: Task, variants: tuple[Variant, ...]) -> None:
        """Show that the final race runs."""
        text = f"final race of {len(variants)} variants"
        self._bar.update(self._row, text=text)
        self._log_plain(f"  {text}")

    def finished(self, result: TaskResult) -> None:
        """Show the best variant of the task."""
        best = result.best
        text = "no variant was right and timed" if best is None else (
            f"best {milliseconds(best.timing.median_ms)}, {best.speedup:.2f}x over {baseline_text(result, self._gpu)}")
        self._bar.update(self._row, text=text, total=max(1, result.tried + result.reused))
        self._log_plain(f"  {text}")

    def _log(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _log_plain(self, text: str) -> None:
        if not self._console.is_terminal:
            self._log(text)


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if stderr or console.is_terminal else Console(width=PLAIN_WIDTH)
