from attention_tuner.kernel_templates import errors


def test_input_errors_end_with_status_2_and_the_others_with_1():
    assert errors.StoreError("x").exit_status == errors.SpecError("x").exit_status == 2
    assert errors.NothingValidError("x").exit_status == 1
