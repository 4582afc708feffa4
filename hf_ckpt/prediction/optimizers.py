"""The bytes of an optimizer's state and of its step: read, measured on fake tensors, or computed from its name."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.prediction.optimizer_names import COUNTED, NAMES
from hf_ckpt.prediction.skeleton import Weights

log = logging.getLogger(__name__)

Parameters = list[nn.Parameter]


@dataclasses.dataclass(frozen=True)
class OptimizerBytes:
    """What an optimizer needs in addition to weights and gradients, in bytes."""

    state: int = 0
    """The tensors that it keeps from step to step."""
    step: int = 0
    """Most temporary bytes of a step, in addition to the state."""


def state_bytes(optimizer: torch.optim.Optimizer, device_types: Collection[str]) -> int:
    """Bytes of the tensors in an optimizer's current state on this rank, on these types of device.

    State that FSDP2 keeps in host memory is not part of an accelerator's peak.
    """
    return sum(tensor.nbytes for tensor in _state_of(optimizer) if tensor.device.type in device_types)


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors in an optimizer's state, on this rank."""
    values = (value for state in list(optimizer.state.values()) for value in state.values())
    return [compat.local(value) for value in values if isinstance(value, torch.Tensor)]


# --- optimizers by name -----------------------------------------------------------------------------------------------


def _adafactor(parameters: Parameters) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    made: torch.optim.Optimizer = Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
    return made


_FUSED = functools.partial(torch.optim.AdamW, fused=True)
_TRIED: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    **dict.fromkeys(("adamw", "adam", "adamw_torch_fused"), _FUSED),
    "adamw_torch": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": _adafactor,
}
"""Name -> constructs the optimizer as Trainer does, to run it on fake tensors."""
_BLOCK_8BIT, _SMALL_8BIT = 256, 4096
"""Elements that share a float32 scale in bitsandbytes' 8-bit state, and the size below which a state is float32."""
_DTYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}
"""Bytes of an element -> a type of this size."""


def optimizer_bytes(weights: Weights, name: str, device_type: str = "cpu") -> OptimizerBytes:
    """What an optimizer needs for the trainable parameters in `weights` on a device of type `device_type`.

    Raises `HfCkptError` for an unknown name.
    """
    if name not in NAMES:
        raise HfCkptError(f"optimizer must be one of {', '.join(NAMES)}, but is {name!r} instead.")
    trained = [(shape, size) for shape, size, trainable in weights.tensors if trainable]
    if name in COUNTED:
        return OptimizerBytes(sum(_counted(math.prod(shape), size, *COUNTED[name]) for shape, size in trained))
    with compat.FakeTensorMode():
        return _tried_by_shape(functools.partial(_tried_on, name, device_type), trained)


_Shaped = tuple[tuple[int, ...], int]
"""(shape of a parameter, bytes of an element)."""


def _tried_by_shape(tried: Callable[[Sequence[_Shaped]], OptimizerBytes], trained: Sequence[_Shaped]) -> OptimizerBytes:
    """What `tried` returns for all parameters, computed from one parameter of each shape.

    State adds up. A step either updates one parameter after the other or all at once: its bytes are those of the
    largest, or add up, too. If two parameters of each shape match neither, all parameters are tried.
    """
    counts = collections.Counter(trained)
    if not counts:
        return OptimizerBytes()
    alone = {shaped: tried([shaped]) for shaped in counts}
    steps = [found.step for found in alone.values()]
    twice = tried([*counts, *counts]).step
    if twice not in (max(steps), 2 * sum(steps)):
        return tried(trained)
    step = max(steps) if twice == max(steps) else sum(alone[shaped].step * count for shaped, count in counts.items())
    return OptimizerBytes(sum(alone[shaped].state * count for shaped, count in counts.items()), step)


def _tried_on(name: str, device_type: str, shapes: Sequence[_Shaped]) -> OptimizerBytes:
    """What the named optimizer needs for parameters of these shapes."""
    fakes = [
        nn.Parameter(torch.empty(shape, dtype=_DTYPES[size], device=device_type), requires_grad=size > 1)
        for shape, size in shapes
    ]
    return _tried(_TRIED[name](fakes), fakes)


def _counted(elements: int, size: int, tensors: int, each: int | None) -> int:
    """Bytes of the state of one parameter."""
    if each == 1:
        return tensors * (4 * elements if elements < _SMALL_8BIT else elements + 4 * -(-elements // _BLOCK_8BIT))
    return tensors * elements * (size if each is None else each)


# --- live optimizers --------------------------------------------------------------------------------------------------


def held_bytes(model: nn.Module) -> int:
    """Bytes that a model now holds on this rank: parameters, gradients, buffers, and the state of its optimizers."""
    total = sum(buffer.nbytes for buffer in model.buffers())
    for parameter in model.parameters():
        total += compat.local(parameter).nbytes
        total += 0 if parameter.grad is None else compat.local(parameter.grad).nbytes
    types = {device.type for device in compat.devices_of_model(model)}
    return total + sum(state_bytes(optimizer, types) for optimizer in compat.optimizers_of(model))


def bytes_of(optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerBytes:
    """What live optimizers need: their state, predicted if they have none yet, and their largest step.

    Optimizers are recognised by class name. An unknown one counts as AdamW until it has state.
    """
    found = [_bytes_of_one(optimizer) for optimizer in optimizers]
    return OptimizerBytes(sum(each.state for each in found), max((each.step for each in found), default=0))


def _bytes_of_one(optimizer: torch.optim.Optimizer) -> OptimizerBytes:
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    name = {known.replace("_", ""): known for known in NAMES}.get(type(optimizer).__name__.lower(), "adamw")
    options = optimizer.defaults
    if name in ("adam", "adamw") and not options.get("fused"):
        name = "adamw_torch"
    elif name == "sgd" and options.get("momentum"):
        name = "momentum"
    sizes = Weights(tuple((tuple(p.shape), p.element_size(), True) for p in trained))
    types = {parameter.device.type for parameter in trained} or {"cpu"}
    found = optimizer_bytes(sizes, name, next(iter(types - {"cpu"}), "cpu"))
    there = all(parameter in optimizer.state for parameter in trained)
    return dataclasses.replace(found, state=state_bytes(optimizer, types)) if optimizer.state and there else found


# --- measuring an optimizer -------------------------------------------------------------------------------------------


class _StepBytes(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts live bytes of a step on fake tensors, and answers operations that ask for their values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.5  # neither 0 nor 1, because some optimizers divide by 1 minus the value
        return super().__torch_dispatch__(func, types, args, kwargs)


def _tried(optimizer: torch.optim.Optimizer, parameters: Parameters) -> OptimizerBytes:
    """Run two steps of an optimizer on fake tensors; return its state, and the temporary bytes of the second step.

    Step counters do not count as state.
    """
    step = inspect.unwrap(type(optimizer).step)  # without the hooks of profilers
    above = 0
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        held = {"held": (parameters, [parameter.grad for parameter in parameters])}
        with _StepBytes(optimizer, held) as live, torch.no_grad():
            step(optimizer)
        above = live.peak_bytes - live.start_bytes
    return OptimizerBytes(_nbytes(value for value in _state_of(optimizer) if value.dim()), above)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
