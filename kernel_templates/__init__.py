"""Variants of the kernel: their records, their launch and their reference. The only folder that imports triton."""
