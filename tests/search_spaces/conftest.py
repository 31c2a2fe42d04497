"""Configs of small models, written to files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a config.json of a small model with these fields changed, and gives its path; None removes a field."""

    def write_config(**changes: Any) -> str:
        base = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 6}
        fields = {name: value for name, value in (base | changes).items() if value is not None}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        return str(path)

    return write_config
