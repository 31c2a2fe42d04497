"""What an engine calls on its way: the kernel with configs from the table, and a stand-in for vLLM's function."""
