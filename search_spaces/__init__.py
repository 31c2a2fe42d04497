"""Space of a search: the variants of a shape, the layers of known models, and suites of batches."""
