"""What a variant of the kernel is, how it runs, and what is right; the only folder that imports triton."""
