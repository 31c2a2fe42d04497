"""Measuring variants: jobs, inputs, check, stopwatch, race and the state of the GPU."""
