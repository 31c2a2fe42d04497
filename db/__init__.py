"""What was found: trials and best configs in a database, exports of them, and the lookup that an engine asks."""

from .answer import Answer, Chain, Origin, Source
from .coverage import Coverage, Miss
from .export import SCHEMA_VERSION, export_json, import_json
from .lookup import load_table, lookup, shipped_configs
from .merge import merged
from .records import EnvironmentOf, Setting, TrialRecord
from .store import Store, default_path
from .table import ConfigTable

__all__ = [
    "SCHEMA_VERSION",
    "Answer",
    "Chain",
    "ConfigTable",
    "Coverage",
    "EnvironmentOf",
    "Miss",
    "Origin",
    "Setting",
    "Source",
    "Store",
    "TrialRecord",
    "default_path",
    "export_json",
    "import_json",
    "load_table",
    "lookup",
    "merged",
    "shipped_configs",
]
