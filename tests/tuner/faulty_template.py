"""Templates of another package whose variants are right and timed, but for the one whose `fault` is not "none"."""

from __future__ import annotations

from attention_tuner.kernel_templates.template import Constraint, Dimension, Template

GOOD = "none"
FAULTS = ("illegal_address", "endless_kernel", "endless_compile", "compiler_abort", "out_of_memory", "sigkill")
DELAYS_MS = (0, 20, 40)


ONE_IS_ENOUGH = Constraint(
    "one faulty variant is enough",
    lambda variant, spec, gpu: variant.text("fault") == GOOD or variant.number("delay_ms") == DELAYS_MS[0],
)


def template(fault: str) -> Template:
    """Three good variants that differ in speed, and one with `fault`."""
    dimensions = (Dimension("delay_ms", DELAYS_MS), Dimension("fault", (GOOD, fault)))
    return Template(f"faulty_{fault}", "faulty_launch:FaultyLauncher", dimensions, (ONE_IS_ENOUGH,))


ILLEGAL_ADDRESS, ENDLESS_KERNEL, ENDLESS_COMPILE, COMPILER_ABORT, OUT_OF_MEMORY, SIGKILL = map(template, FAULTS)
