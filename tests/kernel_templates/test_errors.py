from attention_tuner.kernel_templates import errors


def test_every_error_is_in_the_tree_that_the_docstring_draws():
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes
    for error in classes:
        assert issubclass(error, errors.TunerError)
        assert error.__name__ in (errors.__doc__ or "")


def test_input_errors_end_with_status_2_and_the_others_with_1():
    assert errors.StoreError("x").exit_status == errors.SpecError("x").exit_status == 2
    assert errors.NothingValidError("x").exit_status == 1
