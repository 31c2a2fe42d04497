from typing import Any

import pytest
from job_faults import VARIANT, Echo

from attention_tuner.kernel_templates.outcome import JobError
from attention_tuner.tuner.processes.child import REASON_LENGTH, At, Context, one_line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", "ValueError"),
        ("one", "ValueError: one"),
        ("\n  one\ntwo", "ValueError: one"),
        ("at 12:5:\n    x = tl.dot(a, b)\n        ^\nshapes do not fit", "ValueError: shapes do not fit"),
    ],
)
def test_a_reason_is_the_line_that_says_most(message: str, line: str) -> None:
    assert one_line(ValueError(message)) == line


def test_a_reason_is_bounded() -> None:
    assert len(one_line(ValueError("x" * 10_000))) == REASON_LENGTH


def test_a_context_keeps_the_last_key_and_frees_the_one_before_first() -> None:
    context = Context(False, lambda message: None)
    made: list[str] = []

    class Resource:
        def __init__(self, name: str) -> None:
            made.append(name)

        def __del__(self) -> None:
            made.append("freed")

    first = id(context.keep("a", lambda: Resource("a")))
    assert id(context.keep("a", lambda: Resource("again"))) == first
    context.keep("b", lambda: Resource("b"))
    assert made == ["a", "freed", "b"]


def test_a_context_keeps_nothing_of_a_failed_making() -> None:
    context = Context(False, lambda message: None)
    with pytest.raises(ZeroDivisionError):
        context.keep("a", lambda: 1 // 0)
    assert context.keep("a", lambda: 7) == 7


def test_a_context_tells_the_parent_what_it_is_at() -> None:
    sent: list[Any] = []
    Context(False, sent.append).at("check", VARIANT)
    assert sent == [At("check", VARIANT)]


def test_a_job_without_a_variant_settles_by_raising() -> None:
    with pytest.raises(JobError, match="killed"):
        Echo(1).settle(JobError("killed by SIGKILL"), lambda job: 1)


def test_a_context_frees_what_it_keeps_when_told_to() -> None:
    context = Context(interpret=True, send=lambda message: None)
    kept = context.keep("task", object)
    assert context.keep("task", object) is kept
    context.forget()
    assert context.keep("task", object) is not kept
