"""The command that sees whether stored winners still are: verify."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from ...kernel_templates.errors import InputError, NothingValidError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import BestConfig
from . import options, request
from .tune import ENDING_S, ENDING_SHARE, SECONDS_WITHOUT_GPU, TRIALS, TRIALS_WITHOUT_GPU

if TYPE_CHECKING:
    from ...db.store import Store
    from ..settings import Settings
    from ..verify import Verified

# Beside 0, 1 and 2, which all commands have, and 130.
MOVED_STATUS = 3
UNDECIDED_STATUS = 4


def verify(
    model: options.Model = None,
    tp: options.Tp = 1,
    dtype: options.Dtype = None,
    kv_dtype: options.KvDtype = None,
    q_dtype: options.QDtype = None,
    tree: options.Tree = False,
    spec: options.Spec = None,
    gpu: options.GpuName = None,
    every: Annotated[bool, typer.Option(
        "--all", help="Also what was measured with the kernel source, Triton, torch and driver of now.")] = False,
    retune: Annotated[bool, typer.Option("--retune", help="Tune anew what has moved.")] = False,
    trials: Annotated[int | None, typer.Option(
        parser=options.whole_number, metavar="NUMBER", help="With --retune: variants to try for each.",
        show_default=f"{TRIALS}, without a GPU {TRIALS_WITHOUT_GPU}")] = None,
    seconds: Annotated[float | None, typer.Option(
        "--seconds", parser=options.positive_seconds, metavar="SECONDS",
        help="Time for the whole run; with --retune half of it is kept for that.",
        show_default=f"no limit, without a GPU {SECONDS_WITHOUT_GPU:g}")] = None,
    seed: options.Seed = 0,
    warm: options.Warm = False,
    eager: options.Eager = False,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Race stored winners anew after a change of the driver, Triton, torch or a kernel.

    Each is raced with the default, its runners-up and the variants one step beside it. What still wins and takes as
    long as before is stored with its new times; the rest has moved. The same command goes on where one ended. Ends with
    status 0 when all hold or were tuned anew, 1 when nothing is stored for this GPU, 3 when any has moved and was not
    tuned anew, and 4 when none has moved and any could not be decided in time.

    \b
    Example:
      attention-tuner verify --retune --seconds 300
    """
    from ...db import Store, default_path
    from ...db.engine import sqlite_path
    from ..settings import Settings
    from ..verify import UNDECIDED
    from . import verify_report

    begun = time.monotonic()
    specs = request.layers(model, tp, dtype, spec, kv_dtype, q_dtype, tree) if model or spec else None
    if trials is not None and not retune:
        raise InputError("--trials goes with --retune only: without it nothing is searched")
    on = request.runnable(gpu)
    settings = Settings(
        trials=trials or (TRIALS_WITHOUT_GPU if on.is_interpreter else TRIALS),
        seconds=seconds or (SECONDS_WITHOUT_GPU if on.is_interpreter else None),
        seed=seed, regime=request.regime(warm, eager))
    where = default_path() if db is None else db
    if (path := sqlite_path(where)) is not None and not path.exists():
        raise InputError(f"there is no database {str(path)!r}, so there is no best config to verify; tune first")
    with Store.open(where) as store:
        stored = _stored(store, on, settings, specs)
        job = _Job(on, store, settings, retune, begun)
        chosen = stored if every else job.stale(stored)
        found = job.run(chosen) if chosen else []
        name = store.name
    verify_report.print_verified(name, on, found, len(stored) - len(chosen), as_json=json)
    if any(each.has_moved for each in found):
        raise typer.Exit(MOVED_STATUS)
    if any(each.state == UNDECIDED for each in found):
        raise typer.Exit(UNDECIDED_STATUS)


def _stored(store: Store, gpu: Gpu, settings: Settings, specs: Sequence[object] | None) -> list[BestConfig]:
    """The best configs of `gpu`, in the regime that is asked for. Raises `NothingValidError` where there is none."""
    from ...kernel_templates.outcome import Regime

    regime = Regime("interpreter") if gpu.is_interpreter else settings.regime
    found = [config for config in store.best_configs(gpu_name=gpu.name, regime=regime)
             if config.gpu.num_sms == gpu.num_sms and (specs is None or config.shape.spec in specs)]
    if not found:
        raise NothingValidError(f"database {store.name!r} holds no best config of {gpu.name} in regime {regime} that "
                                "could be verified; tune first")
    return found


@dataclass(frozen=True, slots=True)
class _Job:
    """What was asked for, and when, by `time.monotonic`."""

    gpu: Gpu
    store: Store
    settings: Settings
    retune: bool
    begun: float

    def stale(self, configs: Sequence[BestConfig]) -> list[BestConfig]:
        from ...kernel_templates.sources import environment
        from ..verify import stale

        return stale(configs, self.gpu, environment)

    def run(self, configs: Sequence[BestConfig]) -> list[Verified]:
        """Verify `configs`, and tune anew what has moved where that is asked for, in the time that there is."""
        from ..run import executor_on, open_run
        from ..tune import refuse_long
        from ..verify import RETUNE_SHARE, Verified, retune, verify
        from .progress import TuneProgress

        settings, gpu, store = self.settings, self.gpu, self.store
        total_s = settings.seconds or math.inf
        if gpu.is_interpreter and self.retune:
            tasks = [Verified(config).task for config in configs]
            refuse_long(tasks, replace(settings, seconds=RETUNE_SHARE * total_s))
        with contextlib.closing(executor_on(gpu)) as executor:
            ending_s = min(ENDING_S, ENDING_SHARE * total_s)
            executor = replace(executor, aside_s=time.monotonic() - self.begun + ending_s)
            share = 1 - RETUNE_SHARE if self.retune else 1.0
            first = settings if settings.seconds is None else replace(settings, seconds=share * total_s)
            with TuneProgress(gpu) as listener:
                with open_run(gpu, store, first, executor, listener) as run:
                    found = verify(configs, run)
                left_s = total_s - (time.monotonic() - self.begun)
                if self.retune and left_s > ending_s:
                    executor = replace(executor, aside_s=ending_s)
                    rest = settings if settings.seconds is None else replace(settings, seconds=left_s)
                    retune(found, gpu, store, rest, executor, listener)
        return found
