"""Tables of tests that are YAML: what users write as YAML is then tested as they write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def keyed(rows: list[dict[str, Any]], *names: str) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Arguments of `parametrize`, from rows that name their values. What a row leaves out is None."""
    strange = {name for row in rows for name in row} - {*names}
    assert not strange, f"keys that no test reads: {strange}"
    return names, [tuple(row.get(name) for name in names) for row in rows]


def table(test: str, name: str) -> Any:
    """The table in the file `name` beside a test, which gives its `__file__`."""
    return yaml.safe_load(Path(test).with_name(name).read_text(encoding="utf-8"))
