"""A table that reloads when its database or files change."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

from ...kernel_templates.batch import Batch, BatchBucket
from ...kernel_templates.errors import StoreError
from ...kernel_templates.gpu import Gpu
from ...kernel_templates.spec import AttentionSpec
from ..answer import Answer, Chain
from ..engine import default_path, sqlite_path
from .lookup import SHIPPED, listed, load_table
from .table import ConfigTable


class LiveTable:
    """A `ConfigTable` that `refresh` replaces by a newer one. Each lookup is answered by one whole snapshot.

    No transaction stays open between two loads, so readers never block a tuner.
    """

    def __init__(self, where: str | None = None, gpu: Gpu | None = None, *,
                 files: Sequence[str | os.PathLike[str]] = (), chain: Chain | None = None) -> None:
        """Load as `load_table` does, with the same errors."""
        self._where, self._gpu, self._files, self._chain = where, gpu, listed(files), chain
        self._warned: set[str] = set()
        self._loading = threading.Lock()
        self._seen: tuple[object, ...] | None = self._state()
        self.table = self._load(where)

    def lookup(self, spec: AttentionSpec, asked: Batch | BatchBucket, page_size: int, gpu: Gpu) -> Answer:
        """The answer of the present table; see `ConfigTable.lookup`."""
        return self.table.lookup(spec, asked, page_size, gpu)

    def refresh(self) -> bool:
        """Take a new snapshot if the database or a file has changed; return True if one was taken.

        The old snapshot answers other threads until the new one is complete. If the new one cannot be read, a warning
        is given and the old one stays until the next change. If the database was deleted, a warning is given and its
        configs are dropped. Without a change this costs a few file system calls. A database that is no file is always
        read.
        """
        with self._loading:
            # Taken before the load, so that the next call notices a write during the load.
            state = self._state()
            if state is not None and state == self._seen:
                return False
            try:
                # The name is given, so that an unreadable default database raises instead of being skipped.
                table = self._load(self._where or default_path())
            except (StoreError, OSError) as error:
                warnings.warn(f"the newer configs cannot be read, and those at hand are kept: {error}", stacklevel=2)
                self._seen = state
                return False
            if self._seen and state and self._seen[0] and not state[0]:
                warnings.warn(f"database {self._where or default_path()!r} is gone: its configs answer no more",
                              stacklevel=2)
            table.take_over(self.table)
            self._seen, self.table = state, table
            return True

    def _load(self, where: str | None) -> ConfigTable:
        return load_table(where, self._gpu, files=self._files, chain=self._chain, warned=self._warned)

    def _state(self) -> tuple[object, ...] | None:
        """A value that changes with every write; None for a database that is no file."""
        try:
            paths = [sqlite_path(where) for where in (self._where or default_path(), *self._files)]
        except StoreError:
            return None
        if None in paths:
            return None
        # SQLite first writes a commit to the log (-wal), not to the database file.
        return tuple(_stamp(Path(f"{path}{ending}")) for path in (*paths, SHIPPED) for ending in ("", "-wal"))


def _stamp(path: Path) -> tuple[object, ...]:
    """A value that changes when the file, or a file in the folder, is written."""
    try:
        facts = path.stat()
        members = sorted((each.name, *_stamp(each)) for each in path.iterdir()) if path.is_dir() else ()
    except OSError:
        return ()
    return (facts.st_ino, facts.st_size, facts.st_mtime_ns, *members)
