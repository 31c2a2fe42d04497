"""Search inputs: the variants of a shape, the layers of models, and suites of batches."""
