"""Training on several ranks: torch's DistributedDataParallel and FSDP, DeepSpeed, and accelerate's settings."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from hf_ckpt.compat.devices import accelerators, current_accelerator

FOREIGN_OWNER_SEGMENT = "_checkpoint_wrapped_module"
"""What torch's own checkpoint wrapper, which accelerate's FSDP plugin applies, adds to qualified names."""
WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", FOREIGN_OWNER_SEGMENT})
"""What wrappers add to qualified names: torch.compile of a block, FSDP1, and torch's checkpoint wrapper."""

LAST_DEEPSPEED_WITH_EMPTY_SHAPES = "0.19.2"
"""The last DeepSpeed in which frozen parameters have no shape while a block is recomputed under ZeRO-3.
https://github.com/huggingface/transformers/issues/47254"""


ACCELERATES_HOOK = "_hf_hook"
"""The attribute of a module for which accelerate runs a hook around its forward, such as one that fetches its weights
from host memory or a disk. Before and after the forward, these weights have no values."""


def steps_in_lockstep(model: nn.Module) -> bool:
    """Whether ranks wait for each other inside forward and backward (FSDP, DeepSpeed): none can retry a step alone."""
    kinds = (kind for module in model.modules() for kind in type(module).__mro__)
    return is_sharded(model) or any(kind.__name__ == "DeepSpeedEngine" for kind in kinds)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP or ZeRO-3 shards the parameters over ranks."""
    return any(map(_is_fsdp, model.modules())) or ranks_recompute_together(model)


def _is_fsdp(module: nn.Module) -> bool:
    # FSDP1 is a wrapper; FSDP2 replaces a module's class by a subclass. By name, because importing either is slow.
    return type(module).__name__.startswith(("FSDP", "FullyShardedDataParallel"))


def parts_in_fsdp1(block: nn.Module) -> bool:
    """Whether FSDP1 shards modules inside a block by themselves, besides the block as a whole."""
    return any(type(part).__name__ == "FullyShardedDataParallel" for part in block.modules() if part is not block)


def ranks_recompute_together(model: nn.Module) -> bool:
    """Whether all ranks must recompute the same blocks: under ZeRO-3, recomputation gathers parameters again."""
    # DeepSpeed marks parameters under ZeRO-3 only. Its engine may not exist yet, and wraps the model from outside.
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def zero3_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers that step inside the optimizer step of ZeRO-3, which all ranks do together."""
    zero: Any = next((getattr(parameter, "_z3_optimizer", None) for parameter in model.parameters()), None)
    inner = [getattr(zero, name, None) for name in ("optimizer", "backup_optimizer")]
    return [optimizer for optimizer in inner if isinstance(optimizer, torch.optim.Optimizer)]


def why_no_common_step(model: nn.Module) -> str:
    """Return why ranks under ZeRO-3 do not all call the optimizer in the same steps; empty if they do."""
    if not zero3_optimizers(model):
        return "no optimizer of torch's kind steps in DeepSpeed's engine"
    zero: Any = next(model.parameters())._z3_optimizer  # type: ignore[attr-defined]
    if getattr(zero, "torch_autocast_gradscaler", None):  # each rank skips a step by itself
        return "DeepSpeed's `torch_autocast` in float16 skips steps on some ranks only"
    return "ZenFlow steps in other threads" if getattr(zero, "zenflow", False) else ""


def flat_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's flat parameters under FSDP1; `parameters()` may return views of them."""
    handles: list[Any] = [getattr(module, "_handle", None) for module in model.modules()]
    return [handle.flat_param for handle in handles if hasattr(handle, "flat_param")]


def is_part_of_flat(tensor: torch.Tensor) -> bool:
    """Whether a tensor is FSDP1's view of its flat parameter, which is an attribute while the module runs."""
    return hasattr(getattr(tensor, "_base", None), "_is_flat_param")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; an unsharded tensor is returned unchanged."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return part


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before FSDP2 replaced it by a subclass called `FSDP<name>`."""
    return next((kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP")), type(module))


def parameters_stay(module: nn.Module) -> bool:
    """Whether all parameters stay whole on their device throughout a step.

    They do not if FSDP, ZeRO-3 or tensor parallelism shards them, or if accelerate's hooks move them in and out.
    """
    is_moved = any(hasattr(inner, ACCELERATES_HOOK) for inner in module.modules())
    has_meshes = any(hasattr(parameter.data, "device_mesh") for parameter in module.parameters())
    return not (is_moved or has_meshes or is_sharded(module))


def can_gather(block: nn.Module) -> bool:
    """Whether `gathered` works for a block: FSDP2 shards it as a whole, and nothing else moves its parameters."""
    inner = [module for module in block.modules() if module is not block]
    meshes = {getattr(parameter.data, "device_mesh", None) for parameter in block.parameters()}
    is_moved = any(hasattr(module, ACCELERATES_HOOK) for module in block.modules())
    is_whole = hasattr(block, "unshard") and not any(map(_is_fsdp, inner))
    return is_whole and not is_moved and all(mesh is not None and mesh.ndim == 1 for mesh in meshes)


@contextlib.contextmanager
def gathered(block: Any) -> Iterator[None]:
    """Make a context in which FSDP2 has gathered the parameters of a block, outside of the block's own forward and
    backward."""
    is_sharded = any(hasattr(parameter.data, "device_mesh") for parameter in block.parameters())
    block.unshard()
    try:
        yield
    finally:
        if is_sharded:
            block.reshard()


def devices_of_model(model: nn.Module) -> set[torch.device]:
    """Return the devices that a model computes on: those of its parameters.

    Parameters that FSDP, FSDP2 or ZeRO-3 keep in host memory between their uses are computed on the accelerator.
    """
    parameters = list(model.parameters())
    devices = {parameter.device for parameter in parameters if not parameter.is_meta} or {torch.device("cpu")}
    # Parameters that wait in host memory tell nothing of where they are computed.
    here = current_accelerator()
    if here is None or any(accelerators(devices)) or not is_sharded(model):
        return devices
    by_mesh = {p.data.device_mesh.device_type for p in parameters if hasattr(p.data, "device_mesh")}
    return devices if by_mesh and here.type not in by_mesh else {here}


def ranks() -> int:
    """Return how many processes train together; 1 without torch.distributed."""
    return torch.distributed.get_world_size() if has_process_group() else 1


def has_process_group() -> bool:
    """Whether this process is a rank, perhaps the only one."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def of_all_ranks(value: Any) -> list[Any]:
    """Return `value` of every rank, in rank order; `[value]` without torch.distributed. All ranks must call it."""
    if not has_process_group():
        return [value]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def deepspeed_with_empty_shapes(model: nn.Module) -> str | None:
    """Return DeepSpeed's version, if frozen parameters have no shape while it recomputes a block.

    Returns None if the model has no frozen parameters under ZeRO-3, or if DeepSpeed is newer.
    """
    if not any(hasattr(parameter, "ds_id") and not parameter.requires_grad for parameter in model.parameters()):
        return None
    version = importlib.metadata.version("deepspeed")  # of a release: whether it has the fault cannot be detected
    return version if Version(version) <= Version(LAST_DEEPSPEED_WITH_EMPTY_SHAPES) else None


def counted_by_deepspeed(name: str) -> bool:
    """Whether a module's attribute is a counter or mark of DeepSpeed, which changes in forward and backward."""
    return name.startswith("ds_") or name == "applied_pre_backward_ref_cnt"
