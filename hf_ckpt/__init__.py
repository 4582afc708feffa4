"""Activation checkpointing for Hugging Face models: one flag, per-block plans, the same gradients.

`__all__` lists the public names. They are imported on first use, so `import hf_ckpt` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module below `hf_ckpt` that defines it.
_HOME = {
    "Description": "spec.description",
    "Family": "models.families",
    "Forecast": "forecast.answer",
    "HfCkptError": "errors",
    "MemoryTimeCallback": "training.callback",
    "OomGuard": "training.guard",
    "OomGuardMixin": "training.guard",
    "Plan": "spec.plan",
    "Spec": "spec.spec",
    "SpecError": "errors",
    "describe": "attach.attach",
    "find_blocks": "models.blocks",
    "install": "training.install",
    "paused": "attach.attach",
    "predict": "forecast.forecast",
    "register_family": "models.families",
    "uninstall": "training.install",
    "verify": "training.verify",
}

if TYPE_CHECKING:
    from hf_ckpt.attach.attach import describe, paused
    from hf_ckpt.errors import HfCkptError, SpecError
    from hf_ckpt.forecast.answer import Forecast
    from hf_ckpt.forecast.forecast import predict
    from hf_ckpt.models.blocks import find_blocks
    from hf_ckpt.models.families import Family, register_family
    from hf_ckpt.spec.description import Description
    from hf_ckpt.spec.plan import Plan
    from hf_ckpt.spec.spec import Spec
    from hf_ckpt.training.callback import MemoryTimeCallback
    from hf_ckpt.training.guard import OomGuard, OomGuardMixin
    from hf_ckpt.training.install import install, uninstall
    from hf_ckpt.training.verify import verify

__all__ = [
    "Description",
    "Family",
    "Forecast",
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
    "predict",
    "register_family",
    "uninstall",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hf_ckpt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hf_ckpt.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
