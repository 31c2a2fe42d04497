"""Measuring one variant: inputs, check, stopwatch, race."""
