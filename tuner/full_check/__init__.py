"""The full check: every case that a variant must pass for its layer."""
