from attention_tuner.kernel_templates.hopper import compat as gluon_compat


def test_both_loads_are_functions_of_this_triton():
    assert gluon_compat.load_to_shared.__name__ in {"async_load", "async_copy_global_to_shared"}
    assert gluon_compat.copy_to_shared.__name__ in {"async_load", "async_copy_global_to_shared"}
    assert "tma" in gluon_compat.load_to_shared.__module__
    assert "async_copy" in gluon_compat.copy_to_shared.__module__
