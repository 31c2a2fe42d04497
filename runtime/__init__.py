"""Interface for engines: attention with tuned configs, and a replacement for vLLM's `unified_attention`."""
