"""Activation checkpointing for Hugging Face models: one flag, per-block plans, the same gradients.

`__init__.pyi` lists the public names. They are imported on first use, so `import hf_ckpt` does not import torch.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# As in scientific Python's SPEC 1 (https://scientific-python.org/specs/spec-0001/): one list for the runtime, type
# checkers and documentation. A second list would differ from it some day.
_MODULES: dict[str, str] = {}
for _statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body:
    if isinstance(_statement, ast.ImportFrom):
        _MODULES.update(dict.fromkeys([alias.name for alias in _statement.names], str(_statement.module)))
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hf_ckpt' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
