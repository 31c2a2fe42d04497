"""What `tune --replay` does: the search of `tune`, on a recording."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...kernel_templates.errors import InputError, NothingValidError
from ...kernel_templates.spec import AttentionSpec
from ...kernel_templates.task import Task
from . import request
from .text import short

if TYPE_CHECKING:
    from ..recording import Recording
    from ..settings import Settings

# Tasks that a message lists.
LISTED = 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which tasks of a recording to replay, as they were given: nothing of a kind means all that are recorded."""

    specs: tuple[AttentionSpec, ...] = ()
    batches: Sequence[str] = ()
    suite: str | None = None
    page_sizes: Sequence[str] = ()

    def tasks(self, recording: Recording) -> tuple[Task, ...]:
        """The recorded tasks that are wanted, of a suite those that are recorded.

        Raises `InputError` for a layer, a batch or a page size that is recorded in none of them, and as `request` does.
        """
        named = request.batches(self.batches, None)
        batches = {*named, *request.batches((), self.suite)}
        pages = request.page_sizes(self.page_sizes) if self.page_sizes else ()
        found = tuple(
            task for task in recording.tasks
            if (not self.specs or task.spec in self.specs) and (not batches or task.batch in batches)
            and (not pages or task.page_size in pages)
        )  # fmt: skip
        recorded = {(task.batch, task.page_size) for task in found}
        for batch in named:
            if batch not in {each for each, _ in recorded}:
                raise _not_recorded(f"batch {str(batch)!r}", recording)
        for page in pages:
            if page not in {each for _, each in recorded}:
                raise _not_recorded(f"page size {page}", recording)
        if not found:
            raise _not_recorded(
                f"any batch of suite {self.suite!r}" if self.suite else f"layer {self.specs[0].key()!r}", recording)
        return found


def replay_recording(name: str, wanted: Wanted, settings: Settings, as_json: bool) -> None:
    """Search what is `wanted` of the recording called `name`, or at that path, and write what came of it."""
    from ..recording import Recording
    from ..replay import replay
    from . import documents
    from . import output as report
    from .progress import TuneProgress
    from .recording_report import print_changed, print_replayed, replayed_document

    begun = time.monotonic()
    recording = Recording.load(name)
    tasks = wanted.tasks(recording)
    of = f"recording {recording.grid} of {recording.gpu.name}, {recording.recorded_at[1][:10]}"
    with TuneProgress(recording.gpu, f"replaying {of}: no GPU is used, and nothing is stored") as listener:
        found = replay(recording, tasks, settings, listener)
    if all(each.result.best is None for each in found):
        raise NothingValidError(f"no variant was timed in the {of}")
    if as_json:
        report.print_json({
            "recording": name, "grid": recording.grid, "gpu": recording.gpu.name, "database": None,
            "settings": settings.as_json() | {"regime": str(recording.regime)},
            "results": [{**documents.result_document(each.result, None), **replayed_document(each)} for each in found],
        })  # fmt: skip
        return
    report.print_results(recording.gpu, [each.result for each in found], None)
    print_replayed(recording, found)
    print_changed(recording)
    report.say("what is tried first for a shape was chosen with the recording that ships: on that one, how soon the "
               "optimum was found says little of new shapes")
    report.say(f"replayed in {time.monotonic() - begun:.1f} s; the times above are those that the trials took on "
               f"{recording.gpu.name} when they were recorded. Nothing is stored: the database was a temporary one")


def _not_recorded(what: str, recording: Recording) -> InputError:
    known = [f"{short(task.batch)} at pages of {task.page_size}" for task in recording.tasks]
    more = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    layers = " and ".join(dict.fromkeys(task.spec.key() for task in recording.tasks))
    return InputError(f"recording {recording.grid!r} does not hold {what} as it was asked for; it holds layer {layers} "
                      f"on {'; '.join(known[:LISTED])}{more}")
