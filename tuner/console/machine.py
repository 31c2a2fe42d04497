"""The command about this machine: doctor."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from . import options

MEASURE_LIMIT_S = 120.0


def doctor(
    measure: Annotated[bool, typer.Option(
        "--measure", help="Measure the GPU's read bandwidth and matmul rate.")] = False,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Say what this machine has for tuning.

    And what will therefore happen.

    \b
    Example:
      attention-tuner doctor --measure
    """
    from ...db import default_path
    from ..measure.rates import RatesJob
    from ..processes.compile import triton_cache
    from ..processes.worker import Worker
    from . import output as report
    from .doctor import consequences, examine

    machine = examine(default_path() if db is None else db, triton_cache())
    rates = None
    if measure and machine.gpu is None:
        report.note("nothing is measured: there is no GPU whose rates could be")
    elif measure and machine.gpu is not None:
        with Worker.on(machine.gpu) as worker:
            rates = worker.run(RatesJob(), MEASURE_LIMIT_S)
    if json:
        report.print_json({
            **asdict(machine),
            "rates": rates and asdict(rates),
            "consequences": list(consequences(machine)),
        })
    else:
        report.print_machine(machine, rates)
