"""Measure every variant of a declared grid, and write the outcomes to a file for `tune --replay`.

Every outcome is stored in the database at once, so the same command continues a stopped run. FILE holds all outcomes so
far.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from grids import read_grid
from ground_truth import grid_tasks, recording_of
from recorder import Recorder
from show_recording import print_recording

from attention_tuner.db import Store, default_path
from attention_tuner.kernel_templates.errors import InputError, TunerError
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.launch.device import present_gpu
from attention_tuner.tuner.console.output import note, say
from attention_tuner.tuner.run import executor_on, open_run
from attention_tuner.tuner.settings import Settings
from attention_tuner.tuner.tune import refuse

# Seconds reserved for writing the recording.
WRITING_S = 8.0


def main(arguments: argparse.Namespace) -> None:
    """Make the missing trials, write FILE and print a table of it. Raises `TunerError`."""
    grid = read_grid(arguments.grid)
    if not arguments.file.parent.is_dir():
        raise InputError(f"{str(arguments.file)!r} cannot be written: there is no folder "
                         f"{str(arguments.file.parent)!r}")
    gpu = INTERPRETER if arguments.interpreter else present_gpu()
    if gpu is None:
        raise InputError("no GPU is present; add --interpreter to record small batches through Triton's interpreter")
    tasks = grid_tasks(grid, gpu)
    seconds = arguments.seconds and arguments.seconds - min(WRITING_S, arguments.seconds / 4)
    settings = Settings(seconds=seconds, seed=arguments.seed, samples=arguments.samples)
    refuse(tuple(tasks), gpu, settings)
    with Store.open(arguments.db or default_path()) as store:
        with (contextlib.closing(executor_on(gpu, room=len(tasks), races=False)) as executor,
              open_run(gpu, store, settings, executor) as run):
            missing = Recorder(grid, run, note).record()
        recording = recording_of(grid, gpu, store, run.regime, executor.environment_of)
    recording.save(arguments.file)
    print_recording(recording)
    rest = f"; {missing} trials are missing: run the same command again" if missing else ""
    say(f"written to {arguments.file}{rest}")


def options() -> argparse.ArgumentParser:
    """The options of the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("grid", metavar="GRID", help="a grid of the folder grids, or the path of one")
    parser.add_argument("file", type=Path, metavar="FILE", help="the recording to write; .json.gz is compressed")
    parser.add_argument("--seconds", type=float, help="time for the whole run; no limit by default")
    parser.add_argument("--samples", type=int, default=5, help="samples of each variant that is not clearly slower")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs")
    parser.add_argument("--db", metavar="FILE|URL", help="the database; the default one if not given")
    parser.add_argument("--interpreter", action="store_true", help="record through Triton's interpreter")
    return parser


if __name__ == "__main__":
    try:
        main(options().parse_args())
    except TunerError as error:
        sys.exit(str(error))
