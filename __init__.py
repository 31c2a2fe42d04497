"""Autotuner for the hybrid attention kernel of a serving engine: finds, stores and looks up the best configs.

The names here are the public interface. Each is imported at its first use, so `import attention_tuner` loads neither
torch nor triton. A lookup loads neither of them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .db.lookup.lookup import lookup as lookup
    from .db.lookup.table import ConfigTable as ConfigTable
    from .db.store import Store as Store
    from .kernel_templates.batch import Batch as Batch
    from .kernel_templates.batch import BatchBucket as BatchBucket
    from .kernel_templates.batch import Shape as Shape
    from .kernel_templates.errors import TunerError as TunerError
    from .kernel_templates.gpu import Gpu as Gpu
    from .kernel_templates.launch.launcher import Tensors as Tensors
    from .kernel_templates.launch.launcher import make_launcher as make_launcher
    from .kernel_templates.outcome import BestConfig as BestConfig
    from .kernel_templates.spec import AttentionSpec as AttentionSpec
    from .kernel_templates.task import Task as Task
    from .kernel_templates.variant import Variant as Variant
    from .runtime.hybrid_attention import HybridAttention as HybridAttention
    from .runtime.merge import merge as merge
    from .runtime.unified_attention import unified_attention as unified_attention
    from .tuner.run import Executor as Executor
    from .tuner.run import executor_on as executor_on
    from .tuner.settings import Settings as Settings
    from .tuner.tune import tune as tune

    __version__: str

# The module of each public name.
_HOMES = {
    "AttentionSpec": ".kernel_templates.spec",
    "Batch": ".kernel_templates.batch",
    "BatchBucket": ".kernel_templates.batch",
    "BestConfig": ".kernel_templates.outcome",
    "ConfigTable": ".db.lookup.table",
    "Executor": ".tuner.run",
    "Gpu": ".kernel_templates.gpu",
    "HybridAttention": ".runtime.hybrid_attention",
    "Settings": ".tuner.settings",
    "Shape": ".kernel_templates.batch",
    "Store": ".db.store",
    "Task": ".kernel_templates.task",
    "Tensors": ".kernel_templates.launch.launcher",
    "TunerError": ".kernel_templates.errors",
    "Variant": ".kernel_templates.variant",
    "executor_on": ".tuner.run",
    "lookup": ".db.lookup.lookup",
    "make_launcher": ".kernel_templates.launch.launcher",
    "merge": ".runtime.merge",
    "tune": ".tuner.tune",
    "unified_attention": ".runtime.unified_attention",
}

__all__ = sorted([*_HOMES, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name == "__version__":
        value = _installed_version()
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _installed_version() -> str:
    """The installed version, or "unknown" for a checkout that is run without being installed."""
    try:
        return importlib.metadata.version("attention-tuner")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
