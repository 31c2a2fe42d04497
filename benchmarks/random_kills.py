"""Kill runs of `tune` at random moments, continue each until it is done, and check the store after every kill.

`kill_victim.py` is killed with SIGKILL, alone or with all its processes, and started again until it ends by itself. The
next round begins with a new store.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kill_victim import DATABASE, JOURNAL, LINES_PER_TASK, TASKS, TRIALS
from record import parser, print_table, write

from attention_tuner.db.records import Setting
from attention_tuner.db.store import Store
from attention_tuner.kernel_templates.gpu import INTERPRETER
from attention_tuner.kernel_templates.outcome import Regime
from attention_tuner.kernel_templates.sources import environment

VICTIM = Path(__file__).with_name("kill_victim.py")
# Shares of kills: at any time after the start of the process (mostly imports), and, before the database exists, while
# it is made. All other kills come within a trial's time after a line in the journal.
BLIND_SHARE = 0.3
MAKING_SHARE = 0.3
BLIND_S = 5.0
MAKING_S = 0.2
TRIAL_S = 0.15
LIMIT_S = 120.0
ORPHAN_LIMIT_S = 60.0
_POLL_S = 0.001


@dataclass(slots=True)
class Tally:
    """Counts over some rounds."""

    rounds: int = 0
    # Counts of kills by victim, and by kind of moment.
    kills: Counter[str] = field(default_factory=Counter[str])
    moments: Counter[str] = field(default_factory=Counter[str])
    # Stored trials, and trials that a kill interrupted.
    trials: int = 0
    cut_off: int = 0
    measured_again: int = 0
    # One sentence for each violation.
    violations: list[str] = field(default_factory=list[str])

    def add(self, other: Tally) -> None:
        """Add the counts of `other`."""
        self.rounds += other.rounds
        self.kills += other.kills
        self.moments += other.moments
        self.trials += other.trials
        self.cut_off += other.cut_off
        self.measured_again += other.measured_again
        self.violations += other.violations


def run_rounds(kills: int, seed: int, folder: Path) -> Tally:
    """Run rounds in `folder` until there were `kills` kills and the last run is done."""
    tally, draw = Tally(), random.Random(seed)
    while tally.kills.total() < kills or not tally.rounds:
        tally.rounds += 1
        place = folder / str(tally.rounds)
        place.mkdir()
        run_round(place, draw, kills - tally.kills.total(), tally)
    return tally


def run_round(folder: Path, draw: random.Random, kills: int, tally: Tally) -> None:
    """Run victims on one store until one ends by itself; at most `kills` of them are killed."""
    stored: set[str] = set()
    for _ in range(kills):
        with victim(folder) as process:
            kind, moment = draw.choice(["tuner alone", "all processes"]), wait_for_moment(process, folder, draw)
            if moment is None:
                break
            kill(process, kind, tally)
        tally.kills[kind] += 1
        tally.moments[moment] += 1
        stored = check(folder, stored, tally)
    else:
        with victim(folder) as process:
            process.wait(LIMIT_S)
    if process.returncode != 0:
        status = process.returncode
        tally.violations.append(f"a run that was not killed ended with status {status}: {last_output(folder)}")
    check_end(folder, check(folder, stored, tally), tally)


@contextlib.contextmanager
def victim(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A tuning process, which is killed at the end of the context if it still runs."""
    command = [sys.executable, str(VICTIM), str(folder)]
    changed = {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path), "OMP_NUM_THREADS": "1"}
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            command, env={**inherited, **changed}, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_moment(process: subprocess.Popen[bytes], folder: Path, draw: random.Random) -> str | None:
    """Wait until a random moment, and return its kind; None if the process ends before."""
    lines = num_lines(folder)
    # The lines that this run will write, plus one, so that a run may end by itself.
    most = LINES_PER_TASK * len(TASKS) - 2 * len(reported_as(folder, "stored")) + 1
    kind, waited_for, within_s = "after a line", lines + draw.randint(1, most), TRIAL_S
    if draw.random() < BLIND_SHARE:
        kind, waited_for, within_s = "at any time", lines, BLIND_S
    elif not (folder / DATABASE).exists() and draw.random() < MAKING_SHARE:
        kind, within_s = "while the database is made", MAKING_S
    delay_s, start, end = draw.uniform(0, within_s), time.monotonic(), math.inf
    while process.poll() is None:
        is_making = kind == "while the database is made"
        if end == math.inf and ((folder / DATABASE).exists() if is_making else num_lines(folder) >= waited_for):
            end = time.monotonic() + delay_s
        if time.monotonic() >= end:
            return kind
        if time.monotonic() > start + LIMIT_S:
            raise TimeoutError(f"a run gave no result within {LIMIT_S:g} s: {last_output(folder)}")
        time.sleep(_POLL_S)
    return None


def kill(process: subprocess.Popen[bytes], kind: str, tally: Tally) -> None:
    """Kill the tuner, alone or with its processes, and check that no process outlives it."""
    children = [pid for file in Path(f"/proc/{process.pid}/task").glob("*/children") for pid in numbers_in(file)]
    process.kill()
    if kind != "tuner alone":
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + ORPHAN_LIMIT_S
    while any(map(is_alive, children)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    tally.violations += [f"process {pid} outlived its tuner" for pid in children if is_alive(pid)]


def check(folder: Path, before: set[str], tally: Tally) -> set[str]:
    """Return the stored trials, and check that they include all of `before` and the journal."""
    path = folder / DATABASE
    reported = reported_as(folder, "stored")
    if not reported and not before and not is_made(path):
        return set()
    with opened(path) as connection:
        (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
        (rows,) = connection.execute("SELECT count(*) FROM trials").fetchone()
    stored, best = read(path)
    tally.violations += [f"lost: {key}" for key in (before | reported) - stored]
    tally.violations += [f"best lost: {key}" for key in reported_as(folder, "finished") - best]
    if verdict != "ok":
        tally.violations.append(f"integrity check: {verdict}")
    if rows != len(stored):
        tally.violations.append(f"{rows} rows hold {len(stored)} variants")
    return stored


def read(path: Path) -> tuple[set[str], set[str]]:
    """The stored trials and best configs, named as in the journal. Raises for an unreadable row."""
    regime = Regime("interpreter")
    trials: set[str] = set()
    with warnings.catch_warnings(), Store.open(path, create=False) as store:
        warnings.simplefilter("error")
        for index, task in enumerate(TASKS):
            setting = Setting(task.spec, task.batch, task.page_size, INTERPRETER, regime)
            records = store.known_trials(setting, environment).reusable
            trials |= {f"{index} {record.outcome.variant.key()}" for record in records}
        batches = [str(task.batch) for task in TASKS]
        return trials, {f"{batches.index(config.batch)} {config.batch}" for config in store.best_configs()}


def check_end(folder: Path, stored: set[str], tally: Tally) -> None:
    """Check that all trials and results are stored, and that no stored trial was measured again."""
    with Store.open(folder / DATABASE, create=False) as store:
        counts, best = store.trial_counts(), len(store.best_configs())
    if counts != {"timed": TRIALS * len(TASKS)} or best != len(TASKS):
        tally.violations.append(f"in the end there are trials {dict(counts)} and {best} best configs")
    finished: set[str] = set()
    begun = 0
    for line in journal(folder):
        event, _, key = line.partition(" ")
        if event == "stored":
            finished.add(key)
        elif event == "measure":
            begun += 1
            if key in finished:
                tally.measured_again += 1
                tally.violations.append(f"measured again: {key}")
    tally.trials += len(stored)
    tally.cut_off += begun - len(stored)


def reported_as(folder: Path, event: str) -> set[str]:
    """The journal's entries of an event."""
    return {line.partition(" ")[2] for line in journal(folder) if line.startswith(f"{event} ")}


def opened(path: Path) -> contextlib.closing[sqlite3.Connection]:
    """A read-only connection, which does not change the file and its log."""
    return contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True))


def is_made(path: Path) -> bool:
    """True if the database has tables; an early kill leaves no file or an empty one."""
    if not path.exists():
        return False
    with opened(path) as connection:
        return bool(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])


def numbers_in(file: Path) -> list[int]:
    """The whole numbers in a file; none if its process has ended."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_alive(pid: int) -> bool:
    """True if the process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def journal(folder: Path) -> list[str]:
    """The lines of the journal."""
    path = folder / JOURNAL
    return path.read_text().splitlines() if path.exists() else []


def num_lines(folder: Path) -> int:
    """The number of lines in the journal."""
    return len(journal(folder))


def last_output(folder: Path) -> str:
    """The last line that the victims printed."""
    return (folder / "output.txt").read_text(errors="replace").strip().rpartition("\n")[2]


def measure(kills: int, seed: int, processes: int) -> Tally:
    """Do `kills` kills, in rounds that `processes` threads run in parallel."""
    shares = [kills // processes + (index < kills % processes) for index in range(processes)]
    total = Tally()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(processes) as threads:
        places = [Path(folder) / f"thread{index}" for index in range(processes)]
        for place in places:
            place.mkdir()
        seeds = range(seed * processes, (seed + 1) * processes)
        for tally in threads.map(run_rounds, shares, seeds, places):
            total.add(tally)
    return total


def main() -> None:
    """Kill, write the JSON and print the counts; fail on violations."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--processes", type=int, default=1, help="rounds that run in parallel")
    given = options.parse_args()
    start = time.monotonic()
    tally = measure(given.kills, given.seed, given.processes)
    results = {
        "kills": dict(tally.kills),
        "moments": dict(tally.moments),
        "rounds": tally.rounds,
        "trials_stored": tally.trials,
        "trials_cut_off_by_a_kill": tally.cut_off,
        "trials_measured_again": tally.measured_again,
        "violations": tally.violations,
        "tasks": [f"{task.spec.key()} {task.batch} page {task.page_size}" for task in TASKS],
        "trials_per_task": TRIALS,
        "seed": given.seed,
        "seconds": round(time.monotonic() - start, 1),
    }
    write(given.out, results)
    print_table(("what", "count"), [(k, str(v)) for k, v in results.items() if k not in ("tasks", "violations")])
    print("violations:", *(tally.violations or ["none"]), sep="\n  ")
    sys.exit(bool(tally.violations))


if __name__ == "__main__":
    main()
