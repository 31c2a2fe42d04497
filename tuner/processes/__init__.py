"""Child processes: workers that measure, and the pool that compiles ahead."""
