"""Tables of tests that are YAML: what users write as YAML is then tested as they write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def table(test: str, name: str) -> Any:
    """The table in the file `name` beside a test, which gives its `__file__`."""
    return yaml.safe_load(Path(test).with_name(name).read_text(encoding="utf-8"))
