"""The kernel hash: which source a variant's result and time came from."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

from .errors import TunerError
from .gpu import Gpu
from .outcome import Environment
from .registry import templates


@functools.cache
def kernel_hash(template: str) -> str:
    """A hash over the text of every module that affects a variant of `template`, as 16 hexadecimal digits.

    Those are the launcher's module and the template's `sources`. Raises `TunerError` when one cannot be found, or the
    template is not installed.
    """
    record = templates().get(template)
    if record is None:
        raise TunerError(f"template {template!r} is not installed")
    modules = sorted({record.launcher.partition(":")[0], *record.sources})
    digest = hashlib.sha256()
    for module in modules:
        found = _find(module)
        if found is None or found.origin is None:
            raise TunerError(f"template {template!r} names module {module!r}, which cannot be found")
        digest.update(Path(found.origin).read_bytes())
    return digest.hexdigest()[:16]


def environment(template: str, gpu: Gpu) -> Environment:
    """What a time of `template` measured here on `gpu` would depend on. Imports neither torch nor triton.

    The version of one that is not installed under its name, such as a build called pytorch-triton, is "": unknown.
    Raises `TunerError` like `kernel_hash`.
    """
    triton, torch = map(_version, ("triton", "torch"))
    return Environment(kernel_hash(template), triton, torch, gpu.driver)


def _find(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except ImportError:
        # Of a module whose package is missing or broken.
        return None


@functools.cache
def _version(package: str) -> str:
    # Asked for with every trial, and reading it takes milliseconds.
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
