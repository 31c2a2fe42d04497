"""What every run has in common: its record in the database, its deadline, and how it ends."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Generator
from dataclasses import asdict

from ..db.store import Store
from ..kernel_templates.errors import StoreError
from ..kernel_templates.gpu import Gpu
from .measure.card import card_state
from .processes.builds import Builds
from .run import Executor, Listener, Run, Settings


@contextlib.contextmanager
def running(
    gpu: Gpu, store: Store, settings: Settings, executor: Executor, listener: Listener | None = None
) -> Generator[Run]:
    """A run of `settings`, of which `store` keeps the card's state at its beginning and end.

    When it is interrupted, or fails, `executor` is closed; else it can go on being used. Raises `StoreError` when the
    run cannot be stored.
    """
    seconds = math.inf if settings.seconds is None else settings.seconds
    deadline = executor.clock() + seconds - executor.aside_s
    try:
        card = {"uuid": executor.uuid, "start": _card_state(executor)}
        processes = executor.pool and executor.pool.processes
        run_id = store.start_run({**settings.as_json(), "processes": processes, "card": card})
        builds = None if executor.pool is None else Builds(executor.pool, gpu)
        yield Run(gpu, store, settings, executor, listener or Listener(), run_id, deadline, builds)
        try:
            store.finish_run(run_id, {"card": {**card, "end": _card_state(executor)}})
        except StoreError as error:
            # All results are stored and can still be shown.
            warnings.warn(f"the card's state at the end of the run is not stored: {error}", stacklevel=2)
    except BaseException:
        executor.close()
        raise


def _card_state(executor: Executor) -> dict[str, object] | None:
    state = None if executor.uuid is None else card_state(executor.uuid)
    return None if state is None else asdict(state)
