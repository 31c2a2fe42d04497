"""Interface of an engine: attention with configs from the table, and a replacement for vLLM's function."""
