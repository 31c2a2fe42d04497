"""The database of trials and best configs, exports of it, and the lookup that an engine asks."""

from .answer import Answer, Chain, Origin, Source
from .engine import default_path
from .lookup.coverage import Coverage, Miss, read_misses, write_misses
from .lookup.export import SCHEMA_VERSION, Exported, export_json, import_json, read_configs, write_configs
from .lookup.live import LiveTable
from .lookup.lookup import default_table, load_table, lookup, shipped_configs
from .lookup.merge import merged
from .lookup.table import ConfigTable
from .records import EnvironmentOf, Setting, TrialRecord
from .store import Store

__all__ = [
    "SCHEMA_VERSION",
    "Answer",
    "Chain",
    "ConfigTable",
    "Coverage",
    "EnvironmentOf",
    "Exported",
    "LiveTable",
    "Miss",
    "Origin",
    "Setting",
    "Source",
    "Store",
    "TrialRecord",
    "default_path",
    "default_table",
    "export_json",
    "import_json",
    "load_table",
    "lookup",
    "merged",
    "read_configs",
    "read_misses",
    "shipped_configs",
    "write_configs",
    "write_misses",
]
