"""The commands about ground truths: record makes one, recording shows and converts one."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Annotated

import typer

from ...kernel_templates.errors import InputError
from . import options, request
from .tune import SECONDS_WITHOUT_GPU

# Of the time for a run, what writing the recording takes.
WRITING_S = 8.0


def record(
    grid: Annotated[str, typer.Argument(metavar="GRID", help="A shipped grid, or the path of one.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="The recording to write: JSON, compressed for .json.gz.")],
    seconds: Annotated[float | None, typer.Option(
        "--seconds", parser=options.positive_seconds, metavar="SECONDS", help="Time for the whole run.",
        show_default=f"no limit, without a GPU {SECONDS_WITHOUT_GPU:g}")] = None,
    samples: Annotated[int, typer.Option(
        parser=options.whole_number, metavar="NUMBER", help="Samples of a variant that is not clearly slower.")] = 5,
    gpu: options.GpuName = None,
    seed: options.Seed = 0,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Measure every variant of a declared grid, and write what came of them to a file.

    It is a ground truth for searches: `tune --replay FILE` runs them on it without a GPU. Every outcome is stored in
    the database at once, so that the same command goes on where one ended; FILE holds what is recorded so far.

    \b
    Example:
      attention-tuner record hopper_llama_3_8b h200.json.gz --seconds 480
    """
    from ...db import Store, default_path
    from ...search_spaces.grids import grid as read_grid
    from ..ground_truth import grid_tasks, recording_of
    from ..processes.builds import Builds
    from ..recorder import Recorder
    from ..run import Run, executor_on
    from ..settings import Listener, Settings
    from ..tune import refuse_large, refuse_long
    from . import output as report
    from .recording_report import print_recording, recording_document

    begun = time.monotonic()
    declared = read_grid(grid)
    path = Path(file).expanduser()
    if not path.parent.is_dir():
        raise InputError(f"{file!r} cannot be written: there is no folder {str(path.parent)!r}")
    on = request.runnable(gpu)
    tasks = grid_tasks(declared, on)
    if on.is_interpreter:
        seconds = seconds or SECONDS_WITHOUT_GPU
    settings = Settings(seconds=seconds, seed=seed, samples=samples)
    if on.is_interpreter:
        refuse_long(tuple(tasks), settings)
    else:
        refuse_large(tuple(tasks))
    deadline = math.inf if seconds is None else begun + seconds - min(WRITING_S, seconds / 4)
    with Store.open(default_path() if db is None else db) as store:
        with contextlib.closing(executor_on(on, room=len(tasks), races=False)) as executor:
            builds = None if executor.pool is None else Builds(executor.pool, on)
            run_id = store.start_run({**settings.as_json(), "grid": declared.name})
            run = Run(on, store, settings, executor, Listener(), run_id, deadline, builds)
            missing = Recorder(declared, run, report.note).record()
            regime = run.regime
        made = recording_of(declared, on, store, regime, executor.environment_of)
        name = store.name
    made.save(path)
    if json:
        report.print_json({"file": file, "database": name, "missing": missing, **recording_document(made)})
        return
    print_recording(made)
    rest = f"; {missing} trials are missing, and the same command goes on with them" if missing else ""
    report.say(f"written to {file}{rest}")


def recording(
    file: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A shipped recording, or the path of one.")],
    t4: Annotated[str | None, typer.Option(
        "--t4", metavar="FOLDER", help="Write it there for other tools too: for each layer, batch and page size a file "
                                       "in Kernel Tuner's T4 form.")] = None,
    json: options.Json = False,
) -> None:
    """Show what a recording holds: the outcomes, the optima, and how many variants are within 2 % of them.

    \b
    Example:
      attention-tuner recording h200.json.gz --t4 h200_t4
    """
    from ..recording import Recording
    from . import output as report
    from .recording_report import print_details, print_recording, recording_document

    read = Recording.load(file)
    written: list[str] = []
    if t4 is not None:
        from ..t4 import write_t4

        written = [str(path) for path in write_t4(read, Path(t4).expanduser())]
    if json:
        report.print_json({**recording_document(read), "t4_files": written})
        return
    print_recording(read)
    print_details(read)
    if t4 is not None:
        report.say(f"{len(written)} files written to {t4}")
