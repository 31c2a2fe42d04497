"""What `check --full` shows."""

from __future__ import annotations

from collections.abc import Sequence

from ...kernel_templates.gpu import Gpu
from ...kernel_templates.outcome import FullCheck
from ..full_check.checks import Subject
from . import documents
from .output import note, print_json, print_table, say
from .text import counted, full_check_cells, unrun_cases


def note_full_checks(subjects: Sequence[Subject]) -> None:
    """Write on stderr which variants' cases begin to run."""
    first = subjects[0]
    note(f"full check of {counted(len(subjects), 'variant')}: {first.spec.key()}, pages of {first.variant.page_size}")


def print_full_checks(database: str, gpu: Gpu, checks: Sequence[FullCheck], *, as_json: bool) -> None:
    """Write what came of full checks: a table for each layer, every failure in full, and what was not run."""
    if as_json:
        print_json({"database": database, "gpu": gpu.name, "checks": list(map(documents.full_check_document, checks))})
        return
    groups: dict[str, list[FullCheck]] = {}
    for check in checks:
        groups.setdefault(f"{gpu.name}, {check.spec.key()}", []).append(check)
    columns = ("page", "variant", "result", "cases", "worst ratio", "in case")
    for title, members in groups.items():
        print_table(title, columns, map(full_check_cells, members))
    for check in checks:
        if check.failure is not None:
            say(f"{check.variant.key()} failed {check.failure.name!r}: {check.failure.reason}")
    for reason, names in unrun_cases(checks).items():
        say(f"{counted(len(names), 'case')} not run, {reason}: {', '.join(names)}")
    passed = sum(check.passed for check in checks)
    say(f"{passed} of {counted(len(checks), 'variant')} passed, stored in {database}" if checks else
        f"every best config in {database} that can be checked here has passed")
