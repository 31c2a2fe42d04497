from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from recording_samples import CHUNK, DECODE, FASTEST, small_recording, unified

from attention_tuner.kernel_templates.outcome import Failed, Skipped, Timed, Wrong
from attention_tuner.kernel_templates.task import Task
from attention_tuner.search_spaces.files import shipped
from attention_tuner.tuner.recording import Recording
from attention_tuner.tuner.replay import near, replay
from attention_tuner.tuner.sampling.samplers import DEFAULT_SAMPLER
from attention_tuner.tuner.sampling.study import Study
from attention_tuner.tuner.settings import Listener, Progress, Settings, TaskResult
from attention_tuner.tuner.simulated import NOT_RECORDED

RECORDING = small_recording()
ALL = 54
# The loss after so many trials that a search without leads may have, at most and on average over the seeds.
TRIALS, SEEDS, TOLERATED, TOLERATED_MEAN = 120, 2, 0.02, 0.005


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_all_trials_find_the_optimum(sampler: str) -> None:
    for each in replay(RECORDING, RECORDING.tasks, Settings(trials=ALL, sampler=sampler)):
        assert each.loss == 0
        assert each.result.best is not None
        assert each.result.best.variant == unified(**FASTEST) == each.trials[(each.within() or 0) - 1].variant
        assert each.result.best.measured_at == RECORDING.recorded_at[1]
        assert len({trial.variant for trial in each.trials}) == len(each.trials)


def test_the_same_seed_gives_the_same_search() -> None:
    def trials(seed: int) -> list[tuple[object, ...]]:
        found = replay(RECORDING, [DECODE], Settings(trials=20, sampler="random", seed=seed))
        return [(tuple(t.variant for t in each.trials), each.result.seconds, each.result.best) for each in found]

    assert trials(1) == trials(1)
    assert trials(1) != trials(2)


def test_trials_have_the_recorded_outcomes_and_a_skipped_variant_is_none() -> None:
    (each,) = replay(RECORDING, [DECODE], Settings(trials=ALL, sampler="random"))
    kinds = [type(trial) for trial in each.trials]
    assert kinds.count(Wrong) == 1
    assert kinds.count(Failed) == 2 + (len(each.trials) == ALL)
    assert Skipped not in kinds
    for trial in each.trials:
        if isinstance(trial, Timed):
            assert trial == RECORDING.outcome(DECODE, trial.variant)


def test_compiling_and_measuring_take_the_recorded_seconds() -> None:
    def seconds(processes: int) -> float:
        (each,) = replay(RECORDING, [CHUNK], Settings(trials=ALL, sampler="random"), processes=processes)
        assert each.result.measuring_seconds >= ALL * 0.03125
        return each.result.seconds

    # 18 codes of 3.5 s each.
    assert seconds(1) > 18 * 3.5 > seconds(9) > 2 * 3.5


def test_the_time_limit_counts_simulated_seconds() -> None:
    (each,) = replay(RECORDING, [CHUNK], Settings(trials=ALL, sampler="random", seconds=8.0), processes=2)
    assert 3 <= len(each.trials) < ALL
    assert each.result.seconds <= 8
    (nothing,) = replay(RECORDING, [CHUNK], Settings(seconds=1.0, sampler="random"))
    assert nothing.result.best is None
    assert (nothing.loss, nothing.within(), nothing.trials) == (None, None, ())


def test_a_listener_is_called_as_in_a_run() -> None:
    heard: list[str] = []

    class Ear(Listener):
        def started(self, task: object, valid: int, reused: int) -> None:
            heard.append(f"{valid} valid")

        def tried(self, progress: Progress) -> None:
            heard.append("tried")

        def racing(self, task: object, variants: tuple[object, ...]) -> None:
            heard.append("racing")

        def finished(self, result: TaskResult) -> None:
            heard.append("finished")

    replay(RECORDING, [CHUNK], Settings(trials=5, sampler="random"), Ear())
    assert [what for what, _ in itertools.groupby(heard)] == ["54 valid", "tried", "racing", "finished"]


def test_a_default_that_is_not_recorded_fails_and_the_search_goes_on() -> None:
    held = {v: r for v, r in RECORDING.trials[CHUNK].items() if v.number("num_warps") == 2}
    (each,) = replay(replace(RECORDING, trials={CHUNK: held}), [CHUNK], Settings(trials=30, sampler="random"))
    assert each.loss == 0
    assert [t.reason for t in each.trials if isinstance(t, Failed)] == [NOT_RECORDED]


def test_variants_near_the_optimum_are_counted() -> None:
    assert near(RECORDING, DECODE) == 1
    assert near(RECORDING, DECODE, 1.1) > 1
    assert near(RECORDING, DECODE, 1e9) == 50
    assert near(RECORDING, replace(DECODE, page_size=128)) == 0


def test_a_replay_loads_no_torch_and_leaves_no_database(tmp_path: Path) -> None:
    RECORDING.save(tmp_path / "small.json.gz")
    script = (
        "import sys; from attention_tuner.tuner.recording import Recording; "
        "from attention_tuner.tuner.replay import replay; from attention_tuner.tuner.run import Settings; "
        "recording = Recording.load(sys.argv[1]); "
        "replay(recording, recording.tasks, Settings(trials=5, sampler='random')); "
        "sys.exit(bool({'torch', 'triton'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "ATTENTION_TUNER_DB": str(tmp_path / "tuner.db"), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "small.json.gz")], check=True, env=environment)
    assert [path.name for path in tmp_path.iterdir()] == ["small.json.gz"]


def test_every_recording_that_ships_can_be_searched() -> None:
    for name in shipped("recordings", (".json.gz", ".json")):
        recording = Recording.load(name)
        for each in replay(recording, recording.tasks, Settings(trials=20, sampler="random")):
            assert len(each.trials) >= 20, (name, each.result.task)
            assert not [t for t in each.trials if isinstance(t, Failed) and t.reason == NOT_RECORDED]
            assert each.result.best is not None
            assert each.result.best.speedup >= 1, (name, each.result.task)


def finals(recording: Recording, task: Task, sampler: str, seeds: int) -> list[float]:
    """The ratio of the best of so many trials to the optimum, by seed, in searches without leads."""
    optimum = recording.optimum(task)
    assert optimum is not None
    found: list[float] = []
    for seed in range(seeds):
        study, best_ms = Study(recording.variants(task), sampler=sampler, seed=seed), math.inf
        for _ in range(TRIALS):
            variant = study.ask()
            assert variant is not None
            outcome = recording.outcome(task, variant)
            assert outcome is not None
            study.tell(outcome)
            if isinstance(outcome, Timed):
                best_ms = min(best_ms, outcome.timing.median_ms)
        found.append(best_ms / optimum.timing.median_ms)
    return found


def test_the_sampler_comes_near_recorded_optima_without_leads_where_chance_does_not() -> None:
    recording = Recording.load("h200_llama_3_8b")
    task = recording.tasks[5]
    found, chance = (finals(recording, task, sampler, SEEDS) for sampler in (DEFAULT_SAMPLER, "random"))
    assert max(found) <= 1 + TOLERATED, found
    assert statistics.mean(found) <= 1 + TOLERATED_MEAN < statistics.mean(chance), (found, chance)
    assert max(chance) > 1 + TOLERATED, chance
