"""Runs the real loop over a faulty template, with the real worker and store, and checks the result."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cli_samples
import pytest
from faulty_template import DELAYS_MS, GOOD

from attention_tuner.db.records import Setting
from attention_tuner.db.store import Store
from attention_tuner.kernel_templates.batch import Batch, Shape
from attention_tuner.kernel_templates.gpu import INTERPRETER, Gpu
from attention_tuner.kernel_templates.outcome import BestConfig, Failed, Regime, Timed
from attention_tuner.kernel_templates.registry import ENTRY_POINTS, templates
from attention_tuner.kernel_templates.sources import environment
from attention_tuner.kernel_templates.spec import AttentionSpec
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.processes.worker import Worker
from attention_tuner.tuner.run import Compiler, Executor
from attention_tuner.tuner.settings import Listener, Settings, TaskResult
from attention_tuner.tuner.tune import tune

TASK = Task(AttentionSpec(2, 1, 64, dtype="float16"), Batch.parse("1x9@20,1x1@24"), 16)
SETTINGS = Settings(trials=len(DELAYS_MS) + 1, sampler="random")


def install(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the template with `fault`, here and in the processes that are started from here."""
    info = folder / "faulty_template-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-template\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{fault} = faulty_template:{fault.upper()}\n")
    monkeypatch.syspath_prepend(str(folder))
    templates.cache_clear()
    assert f"faulty_{fault}" in templates()


def only_faulty(gpu: Gpu) -> Gpu:
    """`gpu` with less shared memory than any variant needs that multiplies matrices: the faulty ones remain."""
    return replace(gpu, shared_memory_bytes=2048)


class Impatient(Worker):
    """A worker whose jobs are given less time than the search would give them."""

    def __init__(self, interpret: bool, limit_s: float) -> None:
        super().__init__(interpret)
        self._limit_s = limit_s

    def run(self, job: Any, timeout_s: float, *rest: float) -> Any:
        return super().run(job, min(timeout_s, self._limit_s), *rest)


@dataclass
class Faulty:
    """A database, and the search over the variants with `fault` that is stored there."""

    path: Path
    fault: str
    gpu: Gpu = INTERPRETER

    def tune(
        self,
        worker: Any,
        pool: Compiler | None = None,
        listener: Listener | None = None,
        settings: Settings = SETTINGS,
    ) -> TaskResult:
        with Store.open(self.path) as store:
            store.put_best(self._neighbour())
            executor = Executor(worker, pool)
            try:
                (result,) = tune([TASK], only_faulty(self.gpu), store, settings, executor, listener)
            finally:
                executor.close()
        return result

    def outcomes(self) -> dict[Variant, Any]:
        """Stored outcome of each variant, in the order of storing."""
        regime = Regime("interpreter" if self.gpu.is_interpreter else "graph")
        setting = Setting(TASK.spec, TASK.batch, TASK.page_size, self.gpu, regime)
        with Store.open(self.path, create=False) as store:
            return {r.outcome.variant: r.outcome for r in store.known_trials(setting, environment).reusable}

    def check_blame(self, result: TaskResult, stage: str, reason: str) -> None:
        """The faulty variant failed at `stage` because of `reason`; later ones were timed, and the fastest won."""
        outcomes = self.outcomes()
        assert len(outcomes) == SETTINGS.trials == result.tried
        # With several compiling at once, the first to be asked for need not be the first to be ready.
        assert stage == "compile" or [variant.text("fault") for variant in outcomes][-1] == GOOD
        for variant, outcome in outcomes.items():
            if variant.text("fault") == GOOD:
                assert isinstance(outcome, Timed), outcome
            else:
                assert isinstance(outcome, Failed), outcome
                assert outcome.stage == stage
                assert re.search(reason, outcome.reason), outcome.reason
        assert result.best is not None
        assert result.best.variant.as_dict() == {"fault": GOOD, "delay_ms": DELAYS_MS[0]}
        with Store.open(self.path, create=False) as store:
            assert store.best_configs(bucket=result.best.shape.bucket) == [result.best]

    def _neighbour(self) -> BestConfig:
        """A config that makes a search try the faulty variant first: it won for a larger batch."""
        batch = Batch.parse("3x1@100")
        values = {"fault": self.fault, "delay_ms": DELAYS_MS[0]}
        variant = Variant.of(f"faulty_{self.fault}", TASK.page_size, values)
        return replace(cli_samples.config(self.gpu, batch), shape=Shape.of(TASK.spec, batch), variant=variant)


class Watcher(Listener):
    """Calls `act` after each trial with the number of trials so far."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act

    def tried(self, progress: Any) -> None:
        self._act(progress.done)


MakeFaulty = Callable[..., Faulty]
