from attention_tuner.kernel_templates import errors
from attention_tuner.kernel_templates.outcome import JobError


def test_every_error_is_in_the_tree_that_the_docstring_draws():
    declared = {value for value in vars(errors).values() if isinstance(value, type)}
    assert errors.TunerError in declared
    for error in {*declared, JobError}:
        assert issubclass(error, errors.TunerError)
        assert error.__name__ in (errors.__doc__ or "")


def test_input_errors_end_with_status_2_and_the_others_with_1():
    assert errors.StoreError("x").exit_status == errors.SpecError("x").exit_status == 2
    assert errors.NothingValidError("x").exit_status == 1
