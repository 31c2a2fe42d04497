"""A recording: the outcomes of every variant of a declared grid on some tasks, in one compact file.

The file is JSON, compressed with gzip if its name ends in `.gz`. Variants, codes and reasons are written once; the
outcomes of a task are columns with one entry for each variant, which compress well.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from ..kernel_templates.batch import Batch
from ..kernel_templates.errors import InputError, StoreError, TunerError
from ..kernel_templates.gpu import Gpu
from ..kernel_templates.outcome import (
    Check,
    Environment,
    Failed,
    Outcome,
    Regime,
    Skipped,
    StaticFacts,
    Timed,
    Timing,
    Wrong,
)
from ..kernel_templates.registry import templates
from ..kernel_templates.sources import kernel_hash
from ..kernel_templates.spec import AttentionSpec
from ..kernel_templates.task import Task
from ..kernel_templates.variant import Variant
from ..search_spaces.files import find

FORMAT = "attention-tuner recording"
VERSION = 1
# Digits of milliseconds and seconds: the stopwatch's resolution of 0.5 us gives no more.
DIGITS = 6
_COLUMNS = ("outcome", "samples_ms", "regime", "plan_ms", "worst_ratio", "stage", "reason", "seconds")

_Code = tuple[StaticFacts | None, float]


@dataclass(frozen=True, slots=True)
class Recorded:
    """The outcome of one variant on one task, and its cost.

    Raises `InputError` for a cost that is no time, or is 0 for what takes time: a replay's clock would stand still.
    """

    outcome: Outcome
    # The compiler's report, None without compiled code.
    facts: StaticFacts | None = None
    # Seconds of one core to compile the code, once for all variants that share it.
    compile_s: float = 0.0
    # Seconds of the measuring process.
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, cost, takes_time in (("seconds", self.seconds, is_measured(self.outcome)),
                                       ("compile_s", self.compile_s, self.facts is not None)):
            if not math.isfinite(cost) or cost < 0 or (takes_time and not cost):
                raise InputError(f"{name} of variant {self.outcome.variant.key()!r} is {cost:g}; accepted is a number "
                                 "above 0")


def is_measured(outcome: Outcome) -> bool:
    """True if the measuring process ran the variant: it was not skipped, and did not fail to compile."""
    return not isinstance(outcome, Skipped) and not (isinstance(outcome, Failed) and outcome.stage == "compile")


@dataclass(frozen=True, slots=True)
class Recording:
    """The outcomes of all variants of a grid on one GPU."""

    # The name of the grid.
    grid: str
    gpu: Gpu
    regime: Regime
    # Environment of each template.
    environments: Mapping[str, Environment]
    # The ends of the first and of the last trial, ISO 8601 in UTC.
    recorded_at: tuple[str, str]
    trials: Mapping[Task, Mapping[Variant, Recorded]]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The recorded tasks."""
        return tuple(self.trials)

    def variants(self, task: Task) -> tuple[Variant, ...]:
        """The variants recorded for `task`, none for a task that is not recorded."""
        return tuple(self.trials.get(task, ()))

    def recorded(self, task: Task, variant: Variant) -> Recorded | None:
        """The outcome of `variant` on `task` with its cost, None if not recorded."""
        return self.trials.get(task, {}).get(variant)

    def outcome(self, task: Task, variant: Variant) -> Outcome | None:
        """The outcome of `variant` on `task`, None if not recorded."""
        found = self.recorded(task, variant)
        return None if found is None else found.outcome

    def optimum(self, task: Task) -> Timed | None:
        """The fastest timed outcome of `task` by its median, None if none was timed."""
        timed = [r.outcome for r in self.trials.get(task, {}).values() if isinstance(r.outcome, Timed)]
        return min(timed, key=lambda outcome: outcome.timing.median_ms, default=None)

    def measurements(self, task: Task) -> int:
        """The number of measurements of `task`: timed variants with the same code and raw samples count once.

        Of twins, which have the same code and launch, only one is measured.
        """
        timed = [(r.facts and r.facts.code_hash, r.outcome.timing.samples_ms)
                 for r in self.trials.get(task, {}).values() if isinstance(r.outcome, Timed)]
        return len(set(timed))

    def changed_templates(self) -> list[str]:
        """The recorded templates that have another kernel source now, or are not installed."""
        return [name for name, environment in self.environments.items()
                if name not in templates() or kernel_hash(name) != environment.kernel_hash]

    @classmethod
    def load(cls, name_or_path: str | Path) -> Recording:
        """Read a shipped recording by its name, or the file at a path.

        Raises `ModelError` if there is none, and `StoreError`, naming the file, if it is no recording.
        """
        path = find(str(name_or_path), "recordings", "recording", (".json.gz", ".json"))
        try:
            data = path.read_bytes()
            document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
            if document["format"] != FORMAT or document["schema_version"] != VERSION:
                raise ValueError(f"it is {document['format']!r} of version {document['schema_version']}")
            return _read(document)
        except (TunerError, OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}" if isinstance(error, LookupError | TypeError) else error
            raise StoreError(f"{str(path)!r} cannot be read as a recording of version {VERSION}: {what}") from error

    def save(self, path: Path) -> None:
        """Write the file at `path`, whole or not at all. Equal recordings give equal bytes."""
        text = json.dumps(_written(self), separators=(",", ":"), allow_nan=False).encode()
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
        partial.replace(path)


class _Table:
    """Distinct values, numbered in the order in which they were first seen."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        """The number of `value`, a new one the first time."""
        return self.numbers.setdefault(value, len(self.numbers))


def _written(recording: Recording) -> dict[str, Any]:
    variants, codes, texts = _Table(), _Table(), _Table()
    # The tables are filled on the way.
    tasks = [_task_written(task, trials, (variants, codes, texts)) for task, trials in recording.trials.items()]
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for number, variant in enumerate(variants.numbers):
        names = tuple(name for name, _ in variant.values)
        group = groups.setdefault((variant.template, variant.page_size, names), {"numbers": [], "values": []})
        group["numbers"].append(number)
        group["values"].append([value for _, value in variant.values])
    keys = ("template", "page_size", "dimensions")
    return {
        "format": FORMAT,
        "schema_version": VERSION,
        "grid": recording.grid,
        "gpu": asdict(recording.gpu),
        "regime": str(recording.regime),
        "environments": {name: asdict(each) for name, each in recording.environments.items()},
        "recorded_at": recording.recorded_at,
        "texts": list(texts.numbers),
        "codes": [{"facts": facts and astuple(facts), "compile_s": compile_s} for facts, compile_s in codes.numbers],
        "variants": [{**dict(zip(keys, key, strict=True)), **group} for key, group in groups.items()],
        "tasks": tasks,
    }


def _task_written(
    task: Task, trials: Mapping[Variant, Recorded], tables: tuple[_Table, _Table, _Table]
) -> dict[str, Any]:
    variants, codes, texts = tables
    rows = [_row(recorded, texts) for recorded in trials.values()]
    return {
        "spec": task.spec.key(),
        "batch": str(task.batch),
        "page_size": task.page_size,
        "variants": [variants.number(variant) for variant in trials],
        "codes": [codes.number((recorded.facts, _rounded(recorded.compile_s))) for recorded in trials.values()],
        **{name: list(column) for name, column in zip(_COLUMNS, zip(*rows, strict=True), strict=False)},
    }


def _row(recorded: Recorded, texts: _Table) -> tuple[Any, ...]:
    """The columns of one trial, in the order of `_COLUMNS`."""
    outcome, seconds = recorded.outcome, _rounded(recorded.seconds)
    kind = texts.number(type(outcome).__name__.lower())
    match outcome:
        case Timed(_, check, timing):
            samples = [_rounded(sample) for sample in timing.samples_ms]
            return (kind, samples, texts.number(str(timing.regime)), _rounded(timing.plan_ms),
                    _rounded(check.worst_ratio), None, None, seconds)
        case Wrong(_, check):
            ratio = _rounded(check.worst_ratio) if math.isfinite(check.worst_ratio) else None
            return kind, None, None, None, ratio, None, texts.number(check.detail), seconds
        case Failed(_, stage, reason):
            return kind, None, None, None, None, texts.number(stage), texts.number(reason), seconds
        case Skipped(_, reason):
            return kind, None, None, None, None, None, texts.number(reason), seconds


def _read(document: Any) -> Recording:
    gpu: dict[str, Any] = document["gpu"]
    gpu["capability"] = tuple(gpu["capability"])
    texts: Sequence[str] = document["texts"]
    codes = [_code_read(each["facts"], each["compile_s"]) for each in document["codes"]]
    variants: dict[int, Variant] = {}
    for group in document["variants"]:
        for number, values in zip(group["numbers"], group["values"], strict=True):
            pairs = tuple(zip(group["dimensions"], values, strict=True))
            variants[number] = Variant(group["template"], group["page_size"], pairs)
    trials: dict[Task, Mapping[Variant, Recorded]] = {
        Task(AttentionSpec.parse(task["spec"]), Batch.parse(task["batch"]), task["page_size"]):
            dict(_task_read(task, variants, codes, texts))
        for task in document["tasks"]
    }  # fmt: skip
    first, last = document["recorded_at"]
    return Recording(
        grid=document["grid"],
        gpu=Gpu(**gpu),
        regime=Regime.parse(document["regime"]),
        environments={name: Environment(**each) for name, each in document["environments"].items()},
        recorded_at=(first, last),
        trials=trials,
    )


def _code_read(facts: Any, compile_s: Any) -> _Code:
    return None if facts is None else StaticFacts(*facts), float(compile_s)


def _task_read(
    task: Any,
    variants: Mapping[int, Variant],
    codes: Sequence[_Code],
    texts: Sequence[str],
) -> Iterator[tuple[Variant, Recorded]]:
    rows: Iterable[tuple[Any, ...]] = zip(*(task[name] for name in _COLUMNS), strict=True)
    numbers: Sequence[int] = task["variants"]
    of_codes: Sequence[int] = task["codes"]
    for number, code, row in zip(numbers, of_codes, rows, strict=True):
        variant, (facts, compile_s) = variants[number], codes[code]
        yield variant, Recorded(_outcome(variant, row, texts), facts, compile_s, float(row[-1]))


def _outcome(variant: Variant, row: tuple[Any, ...], texts: Sequence[str]) -> Outcome:
    kind, samples, regime, plan_ms, ratio, stage, reason, _ = row

    def _text(number: int) -> str:
        return texts[number]

    match _text(kind):
        case "timed":
            timing = Timing(tuple(map(float, samples)), Regime.parse(_text(regime)), float(plan_ms))
            return Timed(variant, Check(float(ratio)), timing)
        case "wrong":
            return Wrong(variant, Check(math.nan if ratio is None else float(ratio), detail=_text(reason)))
        case "failed":
            return Failed(variant, _text(stage), _text(reason))
        case "skipped":
            return Skipped(variant, _text(reason))
        case other:
            raise ValueError(f"{other!r} is no outcome")


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
