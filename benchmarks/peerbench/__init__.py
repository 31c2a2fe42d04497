"""What `peers.py` is made of: workloads, contenders, the race between them, and what is kept and shown of it."""
