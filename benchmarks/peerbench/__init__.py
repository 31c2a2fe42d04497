"""The parts of `peers.py`: workloads, contenders, the race between them, results and tables."""
