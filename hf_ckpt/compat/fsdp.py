"""How FSDP2, FSDP1 and ZeRO-3 split a model over ranks, and the marks that they leave on modules and parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

FOREIGN_OWNER_SEGMENT = "_checkpoint_wrapped_module"
"""The part that torch's own checkpoint wrapper, which accelerate's FSDP plugin applies, adds to qualified names."""
WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", FOREIGN_OWNER_SEGMENT})
"""The parts that wrappers add to qualified names: torch.compile of a block, FSDP1, and torch's checkpoint wrapper."""
COMPOSABLE_STATE = "__composable_api_state_key"
"""The beginning of the names of module attributes in which FSDP2 and other composable APIs keep their state."""
GATHERED = "_hf_ckpt_gathered"
"""An attribute that marks copies of modules whose own parameters come and go during a step. Those of copies stay."""


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


@dataclasses.dataclass(frozen=True)
class Shard:
    """One parameter under FSDP2, as this rank holds it."""

    parameter: nn.Parameter
    """This rank's part, a DTensor. It is on the model only while the parameter is not gathered."""
    gathered: nn.Parameter | None
    """The whole parameter; None before it was gathered for the first time."""
    ranks: int
    """Number of ranks that the parameter is split over."""
    numel: int
    """Number of elements of this rank's part, padded to that of the largest part."""
    compute: torch.dtype
    """Type of the gathered parameter and of its gradient."""
    reduce: torch.dtype
    """Type that gradients are summed in over ranks."""
    copied: bool
    """Whether a copy of the part in `compute` is made before it is sent to the other ranks."""
    on_device: bool
    """Whether this rank's part lies where the model runs."""


@dataclasses.dataclass(frozen=True)
class ShardUnit:
    """The modules and parameters of one call of `fully_shard`, which are gathered, reduced and freed together."""

    modules: tuple[nn.Module, ...]
    shards: tuple[Shard, ...]
    let_go: bool
    """Whether the gathered parameters are freed after the forward and gathered again for backward."""


def shard_units(model: nn.Module) -> list[ShardUnit]:
    """Return how FSDP2 splits the model and, once a forward has begun, the module around it; empty without FSDP2."""
    units = []
    for group in _shard_groups(model):
        shards = tuple(_shard(found, getattr(group.mesh_info, "shard_mesh_size", 1)) for found in group.fsdp_params)
        let_go = group._reshard_after_forward and not group._use_post_forward_mesh
        units.append(ShardUnit(tuple(group.modules), shards, let_go))
    return units


def holds_gradients_back(model: nn.Module) -> bool:
    """Whether FSDP2 was told not to reduce gradients in the next backward, so that they stay whole until it does."""
    return any(not group.reduce_grads for group in _shard_groups(model))


def _shard_groups(model: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters, read from private names: no public one tells what a forward or backward gathers."""
    modules: Iterator[Any] = model.modules()
    own = (module._get_fsdp_state() for module in modules if hasattr(module, "_get_fsdp_state"))
    states = {id(state): state for found in own for state in (found, *getattr(found._state_ctx, "all_states", ()))}
    for state in states.values():
        several = getattr(state, "_fsdp_param_groups", None)
        yield from several if several is not None else filter(None, [state._fsdp_param_group])  # one, in older torch


def _shard(found: Any, ranks: int) -> Shard:
    policy, own = found.mp_policy, found.sharded_param.dtype
    compute = policy.param_dtype or own
    return Shard(
        parameter=found.sharded_param,
        gathered=getattr(found, "_unsharded_param", None),
        ranks=ranks,
        numel=found.padded_sharded_param_size.numel(),
        compute=compute,
        reduce=policy.reduce_dtype or compute,
        copied=policy.param_dtype is not None,
        on_device=not found.offload_to_cpu or found.device.type == "cpu",
    )


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
        or GATHERED in vars(inner)
        or any(hasattr(p, "ds_id") or hasattr(p.data, "device_mesh") for p in inner.parameters(recurse=False))
        for inner in module.modules()
    )
