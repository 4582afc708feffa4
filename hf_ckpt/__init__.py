"""Activation checkpointing for Hugging Face models: one flag, per-block plans, the same gradients.

Names are loaded on first use, so that importing hf_ckpt does not import torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Description": "plan",
    "Family": "families",
    "HfCkptError": "errors",
    "MemoryTimeCallback": "callback",
    "OomGuard": "oom",
    "OomGuardMixin": "oom",
    "Plan": "plan",
    "Spec": "spec",
    "SpecError": "errors",
    "describe": "install",
    "find_blocks": "families",
    "install": "install",
    "paused": "install",
    "register_family": "families",
    "uninstall": "install",
    "verify": "verify",
}

if TYPE_CHECKING:
    from hf_ckpt.callback import MemoryTimeCallback
    from hf_ckpt.errors import HfCkptError, SpecError
    from hf_ckpt.families import Family, find_blocks, register_family
    from hf_ckpt.install import describe, install, paused, uninstall
    from hf_ckpt.oom import OomGuard, OomGuardMixin
    from hf_ckpt.plan import Description, Plan
    from hf_ckpt.spec import Spec
    from hf_ckpt.verify import verify

__all__ = [
    "Description",
    "Family",
    "HfCkptError",
    "MemoryTimeCallback",
    "OomGuard",
    "OomGuardMixin",
    "Plan",
    "Spec",
    "SpecError",
    "describe",
    "find_blocks",
    "install",
    "paused",
    "register_family",
    "uninstall",
    "verify",
]


class _Package(types.ModuleType):
    """`hf_ckpt.install` is the function, also after the module of that name was imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hf_ckpt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hf_ckpt.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
