"""The command that races stored winners anew: verify."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...kernel_templates.errors import InputError, NothingValidError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import BestConfig, Regime
from . import options, output, request
from .text import batch_text, count_list, counted, milliseconds, variant_text

if TYPE_CHECKING:
    from ...db.store import Store
    from ..settings import Settings
    from ..verify import Verified

# Exit statuses beside 0, 1, 2 and 130, which all commands have.
MOVED_STATUS = 3
UNDECIDED_STATUS = 4


@options.command
def verify(
    layers: options.Layers,
    search: options.Search,
    clock: options.Clock,
    gpu: options.GpuName = None,
    every: Annotated[bool, typer.Option(
        "--all", help="Also race configs measured with the present kernel source, Triton, torch and driver.")] = False,
    retune: Annotated[bool, typer.Option(
        "--retune", help="Tune what has moved; --trials is for this, and half of --seconds is kept for it.")] = False,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Race stored winners anew after a change of the driver, Triton, torch or a kernel.

    Each is raced with the default, its runners-up and the variants one step beside it. A winner that still wins and
    takes as long as before holds, and is stored with its new times; the others have moved. The same command goes on
    where one ended. Ends with status 0 when all hold or were tuned, 1 when nothing is stored for this GPU, 3 when any
    has moved and was not tuned, and 4 when none has moved but the time was too short for some.

    \b
    Example:
      attention-tuner verify --retune --seconds 300
    """
    from ..verify import UNDECIDED

    begun = time.monotonic()
    specs = layers.specs_or_all()
    if search.trials is not None and not retune:
        raise InputError("--trials goes with --retune only: without it nothing is searched")
    on = request.running_gpu(gpu)
    settings = search.settings(on, regime=clock.regime)
    request.require_file(db)
    with request.open_store(db, create=True) as store:
        stored = _stored(store, on, settings, specs)
        job = _Job(on, store, settings, retune, begun)
        chosen = stored if every else job.stale(stored)
        found = job.run(chosen) if chosen else []
        name = store.name
    print_verified(name, on, found, len(stored) - len(chosen), as_json=json)
    if any(each.has_moved for each in found):
        raise typer.Exit(MOVED_STATUS)
    if any(each.state == UNDECIDED for each in found):
        raise typer.Exit(UNDECIDED_STATUS)


def _stored(store: Store, gpu: Gpu, settings: Settings, specs: Sequence[object] | None) -> list[BestConfig]:
    """Return the best configs of `gpu` in the regime of `settings`. Raises `NothingValidError` where there is none."""
    regime = Regime("interpreter") if gpu.is_interpreter else settings.regime
    found = [config for config in store.best_configs(gpu_name=gpu.name, regime=regime)
             if config.gpu.num_sms == gpu.num_sms and (specs is None or config.shape.spec in specs)]
    if not found:
        raise NothingValidError(f"database {store.name!r} holds no best config of {gpu.name} in regime {regime} to "
                                "verify; tune first")
    return found


@dataclass(frozen=True, slots=True)
class _Job:
    """One run of the command."""

    gpu: Gpu
    store: Store
    settings: Settings
    retune: bool
    # When the command began, by `time.monotonic`.
    begun: float

    def stale(self, configs: Sequence[BestConfig]) -> list[BestConfig]:
        """Configs that were measured in another environment than the present one."""
        from ...kernel_templates.sources import environment
        from ..verify import stale

        return stale(configs, self.gpu, environment)

    def run(self, configs: Sequence[BestConfig]) -> list[Verified]:
        """Verify `configs` and, with `retune`, tune what has moved, in the time that there is."""
        from ..run import executor_on, open_run
        from ..settings import Budget
        from ..tune import refuse
        from ..verify import Verified, retune, verify
        from .output import TuneProgress

        settings, gpu, store = self.settings, self.gpu, self.store
        total_s = settings.seconds or math.inf
        if gpu.is_interpreter and self.retune:
            tasks = [Verified(config).task for config in configs]
            refuse(tasks, gpu, replace(settings, seconds=Budget.retune_share * total_s))
        with contextlib.closing(executor_on(gpu)) as executor:
            closing_s = Budget.seconds_to_close(settings.seconds)
            executor = replace(executor, aside_s=time.monotonic() - self.begun + closing_s)
            share = 1 - Budget.retune_share if self.retune else 1.0
            with TuneProgress(gpu) as listener:
                with open_run(gpu, store, _within(settings, share * total_s), executor, listener) as run:
                    found = verify(configs, run)
                left_s = total_s - (time.monotonic() - self.begun)
                if self.retune and left_s > closing_s:
                    executor = replace(executor, aside_s=closing_s)
                    retune(found, gpu, store, _within(settings, left_s), executor, listener)
        return found


def _within(settings: Settings, seconds: float) -> Settings:
    return settings if settings.seconds is None else replace(settings, seconds=seconds)


def print_verified(database: str, gpu: Gpu, found: Sequence[Verified], fresh: int, *, as_json: bool) -> None:
    """Write the state of each winner that was raced; `fresh` others needed no race."""
    from ..verify import CHANGED

    states = Counter(each.state for each in found)
    retuned = sum(each.retuned is not None for each in found)
    if as_json:
        output.print_json({"database": database, "gpu": gpu, "fresh": fresh, "states": states, "retuned": retuned,
                           "verified": list(map(_verified_document, found))})
        return
    groups: dict[str, list[Verified]] = {}
    for each in found:
        groups.setdefault(f"{gpu.name}, {each.config.shape.spec.key()}", []).append(each)
    columns = ("batch", "page", "result", "before", "now", "fastest now", "tuned anew")
    for title, members in groups.items():
        output.print_table(title, columns, map(_verified_row, members))
    if fresh:
        output.say(f"{counted(fresh, 'best config')} of {database} not raced: measured with the present kernel source, "
                   "Triton, torch and driver")
    if found:
        output.say(f"{counted(len(found), 'best config')} raced with the runners-up and neighbours: "
                   f"{count_list(states)}; {retuned} tuned anew. Held: nothing is faster beyond noise, and the time "
                   f"is within {CHANGED:.0%} of before")


def _verified_row(each: Verified) -> tuple[str, ...]:
    now = fastest = retuned = ""
    if each.timing is not None and each.ratio is not None:
        now = f"{milliseconds(each.timing.median_ms)} ({each.ratio - 1:+.1%})"
    if each.fastest is not None and each.fastest_ms is not None:
        is_itself = each.fastest == each.config.variant
        fastest = "itself" if is_itself else f"{milliseconds(each.fastest_ms)} {variant_text(each.fastest)}"
    if each.retuned is not None:
        retuned = f"{milliseconds(each.retuned.timing.median_ms)} {variant_text(each.retuned.variant)}"
    return (batch_text(each.task.batch), str(each.task.page_size), each.state,
            milliseconds(each.config.timing.median_ms), now, fastest, retuned)


def _verified_document(each: Verified) -> dict[str, Any]:
    return {
        **output.encode(each.task), "variant": each.config.variant, "state": each.state,
        "before_ms": each.config.timing.median_ms, "now_ms": each.timing and each.timing.median_ms, "ratio": each.ratio,
        "fastest": each.fastest, "fastest_ms": each.fastest_ms, "retuned": each.retuned and each.retuned.variant,
        "retuned_ms": each.retuned and each.retuned.timing.median_ms,
    }  # fmt: skip
