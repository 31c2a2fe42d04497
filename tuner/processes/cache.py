"""The folder where compiled kernels are kept between processes and runs, and its bound."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

# A compiled kernel takes about 2.3 MB.
CACHE_BYTES = 4 << 30


def triton_cache() -> Path:
    """The folder that compile workers fill and the measurement worker reads, in the user's cache folder."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("attention-tuner")) / "triton"


def prune(folder: Path, limit_bytes: int = CACHE_BYTES) -> int:
    """Delete the oldest entries of `folder` when it holds more than `limit_bytes`, down to half; the bytes freed.

    For the start of a run: an entry that a running process is about to read may be among them.
    """
    entries = sorted(_entries(folder))
    total = sum(size for _, size, _ in entries)
    if total <= limit_bytes:
        return 0
    freed = 0
    for _, size, path in entries:
        # Down to half, or every run from then on would have to prune.
        if total - freed <= limit_bytes // 2:
            break
        shutil.rmtree(path, ignore_errors=True)
        freed += size
    return freed


def _entries(folder: Path) -> list[tuple[float, int, Path]]:
    """The time of change, bytes and path of each entry, one folder per kernel; those that vanish are left out."""
    found: list[tuple[float, int, Path]] = []
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                size = sum(file.stat().st_size for file in path.iterdir())
                found.append((path.stat().st_mtime, size, path))
    return found
