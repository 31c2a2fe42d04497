"""The templates in plain Triton: `unified`, `fused`, `two_launch` and `persistent`."""
