"""What was found: trials and best configs in a database, exports of them, and the lookup that an engine asks."""

from .answer import Answer, Chain, Origin, Source
from .coverage import Coverage, Miss
from .engine import default_path
from .export import SCHEMA_VERSION, Exported, export_json, import_json
from .files import read_configs, write_configs
from .live import LiveTable
from .lookup import default_table, load_table, lookup, shipped_configs
from .merge import merged
from .misses import read_misses, write_misses
from .records import EnvironmentOf, Setting, TrialRecord
from .store import Store
from .table import ConfigTable

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
