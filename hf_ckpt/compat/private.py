"""Looks up private names of torch. Attributes of tensors, modules and autograd nodes are read where they are needed.

`tests/compat/test_private_names.py` checks that each release of torch has all of them.
"""

from __future__ import annotations

import functools
import pkgutil
from typing import Any

import torch

from hf_ckpt.errors import HfCkptError


@functools.cache  # blocks call this in every forward, and importing by name is slow
def private(name: str) -> Any:
    """Return torch's object of a private name, such as `torch._C._current_graph_task_id`. It must not change later.

    Raises `HfCkptError` if torch lacks it.
    """
    try:
        return pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        advice = "Install a torch that hf_ckpt is tested with (docs/versions.md)."
        raise HfCkptError(f"torch {torch.__version__} has no {name}, which hf_ckpt needs. {advice}") from None
