"""Makes the keys of Triton's cache the same in every process, whatever each has compiled before.

Before Triton 3.8 the key of a kernel holds the global constants of a function that it calls only if that function's own
key was known by then, as it is when another kernel that calls it came first. So a process that measures would not find
what other processes compiled for it. (Constants of one name in two modules must have one value: their order there is by
address.)
"""

# pyright: basic
from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable

from ..gpu import Gpu
from ..spec import AttentionSpec
from ..variant import Variant
from .launcher import Launcher, make_launcher


def settled_launcher(variant: Variant, spec: AttentionSpec, gpu: Gpu) -> Launcher:
    """As `make_launcher`, for a process that compiles or launches: its kernels have the keys that others give them."""
    launcher = make_launcher(variant, spec, gpu)
    settle_cache_keys(launcher)
    return launcher


def settle_cache_keys(launcher: Launcher) -> None:
    """Work out the keys of all functions that the kernels of `launcher` call, before those of their callers."""
    seen: set[int] = set()
    for each in type(launcher).__mro__:
        for value in tuple(vars(sys.modules[each.__module__]).values()):
            if isinstance(value, JITCallable):
                _settle(value, seen)


def _settle(function: Any, seen: set[int]) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    for called in _called(function):
        _settle(called, seen)
    function.cache_key  # noqa: B018 - kept once it is known


def _called(function: Any) -> Iterator[Any]:
    """The jitted functions that `function` names, its own and Triton's, as `max` of `tl.max` is."""
    code, known = function.fn.__code__, function.fn.__globals__
    for name in code.co_names:
        value = known.get(name)
        if isinstance(value, JITCallable):
            yield value
        for attribute in code.co_names if isinstance(value, ModuleType) else ():
            found = getattr(value, attribute, None)
            if isinstance(found, JITCallable):
                yield found
