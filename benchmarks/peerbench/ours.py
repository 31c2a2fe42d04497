"""This project's contenders: for each template, the config of a lookup or a stored trial."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attention_tuner.db.lookup.export import import_json
from attention_tuner.db.lookup.lookup import load_table
from attention_tuner.db.lookup.table import ConfigTable
from attention_tuner.db.records import Setting
from attention_tuner.db.store import Store
from attention_tuner.kernel_templates.batch import BatchBucket
from attention_tuner.kernel_templates.gpu import Gpu
from attention_tuner.kernel_templates.heuristic import candidates as guesses
from attention_tuner.kernel_templates.launch.launcher import Launcher, Tensors
from attention_tuner.kernel_templates.outcome import BestConfig, Regime, Timed
from attention_tuner.kernel_templates.registry import template_of, why_invalid
from attention_tuner.kernel_templates.sources import environment
from attention_tuner.kernel_templates.task import Task
from attention_tuner.kernel_templates.variant import Variant
from attention_tuner.tuner.processes.compile import Builds, CompilePool, triton_cache

from .contender import Contender

GRAPH = Regime("graph")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant that may be this project's best."""

    variant: Variant
    source: str

    @property
    def is_plain(self) -> bool:
        """True if it is plain Triton, which also runs on other GPUs."""
        return template_of(self.variant).is_portable


class Ours(Contender):
    """A variant, launched with its own launcher."""

    def __init__(self, task: Task, launcher: Launcher) -> None:
        super().__init__(task)
        self.launcher = launcher

    def run(self, tensors: Tensors) -> Any:
        """Launch the kernels of one layer."""
        self.launcher.run(tensors)

    def prepare(self, tensors: Tensors) -> None:
        """Fill the workspaces with NaN, so that results of an earlier run cannot pass as new ones."""
        for workspace in self.launcher.workspaces():
            workspace.fill_(torch.nan)


class Configs:
    """The sources of candidates: databases (by default the user's), exported files and the shipped configs.

    Raises `StoreError` for an unreadable source.
    """

    def __init__(self, databases: Sequence[str] = (), exports: Sequence[Path] = ()) -> None:
        tables = [load_table(where) for where in databases] or [load_table()]
        configs = [config for table in tables for config in table.configs]
        configs += [config for path in exports for config in import_json(path)]
        self._databases = tuple(databases)
        self._configs = tuple(dict.fromkeys(configs))
        self.id = self._table(self._configs).id

    def candidates(self, task: Task, gpu: Gpu) -> list[Candidate]:
        """The candidates for `task`: one for each template with a config or a trial.

        If there is no candidate, or none in plain Triton, the heuristic's first choice is added.
        """
        found: dict[str, Candidate] = {}
        for template in dict.fromkeys(config.variant.template for config in self._configs):
            answer = self._table(c for c in self._configs if c.variant.template == template).lookup(
                task.spec, task.batch, task.page_size, gpu)  # fmt: skip
            if answer.config is not None:
                found[template] = Candidate(answer.variant, f"{answer.source}{', stale' * answer.stale}")
        for variant in self._tried(task, gpu):
            # A trial on this batch comes before a config of a neighbour.
            if variant.template not in found or found[variant.template].source.startswith("neighbour"):
                found[variant.template] = Candidate(variant, "trial")
        if not any(candidate.is_plain for candidate in found.values()):
            guess = self._guess(task, gpu, plain=True)
            found |= {each.template: Candidate(each, "heuristic") for each in guess}
        if not any(candidate.source != "heuristic" for candidate in found.values()):
            guess = self._guess(task, gpu, plain=False)
            found |= {each.template: Candidate(each, "heuristic") for each in guess}
        return list(found.values())

    def _tried(self, task: Task, gpu: Gpu) -> Iterable[Variant]:
        """The fastest timed variant of each template in the databases' trials on this batch."""
        best: dict[str, Timed] = {}
        for where in self._databases:
            with Store.open(where, create=False) as store:
                setting = Setting(task.spec, task.batch, task.page_size, gpu, GRAPH)
                trials = store.known_trials(setting, environment).reusable
            for outcome in (trial.outcome for trial in trials):
                if not isinstance(outcome, Timed) or why_invalid(outcome.variant, task.spec, gpu):
                    continue
                known = best.get(outcome.variant.template)
                if known is None or outcome.timing.median_ms < known.timing.median_ms:
                    best[outcome.variant.template] = outcome
        return [outcome.variant for outcome in best.values()]

    @staticmethod
    def _guess(task: Task, gpu: Gpu, plain: bool) -> list[Variant]:
        found = guesses(task.spec, BatchBucket.of(task.batch), task.page_size, gpu)
        return [variant for variant in found if not plain or template_of(variant).is_portable][:1]

    @staticmethod
    def _table(configs: Iterable[BestConfig]) -> ConfigTable:
        return ConfigTable.of(configs, environment)


def compile_ahead(candidates: Mapping[Task, Sequence[Candidate]], gpu: Gpu) -> None:
    """Compile all candidates on all cores, into this process's cache.

    A candidate that does not compile fails again when it runs, with the reason.
    """
    os.environ["TRITON_CACHE_DIR"] = str(triton_cache())
    with CompilePool() as pool:
        builds = Builds(pool, gpu)
        for task, found in candidates.items():
            for candidate in found:
                builds.request(task, candidate.variant)
        while pool.pending:
            builds.collect(1.0)
