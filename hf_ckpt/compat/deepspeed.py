"""What depends on the version or private names of DeepSpeed."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version
from torch import nn

from hf_ckpt.versions import LAST_DEEPSPEED_WITH_EMPTY_SHAPES


def deepspeed_with_empty_shapes(model: nn.Module) -> str | None:
    """Return the version of the DeepSpeed in use, if it gives frozen parameters no shape while a block is recomputed.

    Returns None where the model has no frozen parameters under ZeRO-3, or where DeepSpeed is a later one.
    """
    if not any(hasattr(parameter, "ds_id") and not parameter.requires_grad for parameter in model.parameters()):
        return None
    found = importlib.metadata.version("deepspeed")
    return found if Version(found) <= Version(LAST_DEEPSPEED_WITH_EMPTY_SHAPES) else None


def counted_by_deepspeed(name: str) -> bool:
    """Whether an attribute of a module is a count or mark of DeepSpeed's, which changes in forward and backward."""
    return name.startswith("ds_") or name == "applied_pre_backward_ref_cnt"
