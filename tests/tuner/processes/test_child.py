from typing import Any

import pytest
from job_faults import VARIANT, Echo

from attention_tuner.kernel_templates.outcome import JobError
from attention_tuner.tuner.processes.child import Context, Stage, one_line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", "ValueError"),
        ("one", "ValueError: one"),
        ("\n  one\ntwo", "ValueError: one"),
        ("at 12:5:\n    x = tl.dot(a, b)\n        ^\nshapes do not fit", "ValueError: shapes do not fit"),
    ],
)
def test_a_reason_is_the_most_telling_line(message: str, line: str) -> None:
    assert one_line(ValueError(message)) == line


def test_a_full_cache_frees_its_oldest_object_before_a_new_one_is_made() -> None:
    context = Context(False, lambda message: None)
    made: list[str] = []

    class Resource:
        def __init__(self, name: str) -> None:
            made.append(name)

        def __del__(self) -> None:
            made.append("freed")

    first = id(context.cached("a", lambda: Resource("a")))
    assert id(context.cached("a", lambda: Resource("again"))) == first
    context.cached("b", lambda: Resource("b"))
    assert made == ["a", "freed", "b"]


def test_an_object_whose_making_failed_is_not_cached() -> None:
    context = Context(False, lambda message: None)
    with pytest.raises(ZeroDivisionError):
        context.cached("a", lambda: 1 // 0)
    assert context.cached("a", lambda: 7) == 7


def test_a_stage_is_sent_to_the_parent() -> None:
    sent: list[Any] = []
    Context(False, sent.append).report_stage("check", VARIANT)
    assert sent == [Stage("check", VARIANT)]


def test_a_failed_job_raises_its_error_by_default() -> None:
    with pytest.raises(JobError, match="killed"):
        Echo(1).result_after(JobError("killed by SIGKILL"), lambda job: 1)
