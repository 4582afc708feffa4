"""How FSDP2, FSDP1 and ZeRO-3 split a model over ranks, and the marks that they leave on modules and parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

FOREIGN_OWNER_SEGMENT = "_checkpoint_wrapped_module"
"""The part that torch's own checkpoint wrapper, which accelerate's FSDP plugin applies, adds to qualified names."""
WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", FOREIGN_OWNER_SEGMENT})
"""The parts that wrappers add to qualified names: torch.compile of a block, FSDP1, and torch's checkpoint wrapper."""


def steps_in_lockstep(model: nn.Module) -> bool:
    """Whether ranks wait for each other inside forward and backward (FSDP, DeepSpeed): none can repeat a step alone."""
    return is_sharded(model) or any(
        kind.__name__ == "DeepSpeedEngine" for module in model.modules() for kind in type(module).__mro__
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are split over ranks, by FSDP or by ZeRO-3."""
    return any(
        type(module).__name__.startswith(("FSDP", "FullyShardedDataParallel")) for module in model.modules()
    ) or any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def ranks_recompute_together(model: nn.Module) -> bool:
    """Whether all ranks have to recompute the same blocks: ZeRO-3 gathers the parameters of a module again when it runs
    again in a recomputation."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def flat_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Return the flat parts of parameters that FSDP1 leaves to this rank; `parameters()` may give views of them."""
    handles: list[Any] = [getattr(module, "_handle", None) for module in model.modules()]
    return [handle.flat_param for handle in handles if hasattr(handle, "flat_param")]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds; a tensor that is not split is returned as it is."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before FSDP2 replaced it by a subclass called `FSDP<name>`."""
    return next((kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP")), type(module))


def parameters_stay(module: nn.Module) -> bool:
    """Whether all parameters lie whole on their device throughout a step.

    They do not where FSDP, ZeRO-3 or tensor parallelism splits them, or where accelerate's hooks move them in and out.
    """
    return not any(
        type(inner).__name__.startswith(("FSDP", "FullyShardedDataParallel"))
        or hasattr(inner, "_hf_hook")
        or any(hasattr(p, "ds_id") or hasattr(p.data, "device_mesh") for p in inner.parameters(recurse=False))
        for inner in module.modules()
    )
