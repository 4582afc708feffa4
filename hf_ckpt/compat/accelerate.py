"""What accelerate knows of the running process: its FSDP plugin and how many micro-steps make a step."""

from __future__ import annotations

import sys
from typing import Any


def accelerate_owns_checkpointing() -> bool:
    """Whether accelerate's FSDP plugin of this process is set to checkpoint activations itself."""
    state_module = sys.modules.get("accelerate.state")
    if state_module is None or not state_module.AcceleratorState._shared_state:
        return False
    plugin = state_module.AcceleratorState._shared_state.get("fsdp_plugin")
    return bool(plugin is not None and getattr(plugin, "activation_checkpointing", False))


def accelerator_class() -> Any:
    """Return `accelerate.Accelerator`, which takes a second to import."""
    from accelerate import Accelerator

    return Accelerator


def accumulated_steps() -> int:
    """Return how many micro-steps of gradient accumulation make a step; 1 where accelerate was not told."""
    state_module = sys.modules.get("accelerate.state")
    shared = state_module.GradientState._shared_state if state_module is not None else {}
    return int((shared.get("plugin_kwargs") or {}).get("num_steps", 1))
