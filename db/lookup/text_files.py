"""Files of text that are read as a whole, and written as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ...kernel_templates.errors import StoreError


def read_text(path: str | os.PathLike[str], expected: str = "") -> str:
    """The text of a file in UTF-8. Raises `StoreError`, which ends with what was `expected`."""
    ending = f"; {expected}" if expected else ""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error.strerror}{ending}") from error
    except UnicodeDecodeError as error:
        raise StoreError(f"{str(path)!r} is no text in UTF-8{ending}") from error
    except (ValueError, RuntimeError) as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error}{ending}") from error


def replace_file(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to the file `path`. Raises `StoreError` where that cannot be done, and the file is as it was."""
    path = Path(path).expanduser().resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():
            raise StoreError(f"{str(path)!r} is no regular file; expected the path of a file to write")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be written: {error.strerror}; expected the path of a file in a folder "
                         "that exists and can be written") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
