"""The bytes of an optimizer's state and of its step: read, tried out on fake tensors, or counted by its name."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.prediction.optimizer_names import COUNTED, NAMES
from hf_ckpt.prediction.skeleton import Weights
from hf_ckpt.prediction.workload import Workload

log = logging.getLogger(__name__)

Parameters = list[nn.Parameter]


@dataclasses.dataclass(frozen=True)
class OptimizerBytes:
    """What an optimizer needs beside weights and gradients, in bytes."""

    state: int = 0
    """Of the tensors that it keeps from step to step."""
    step: int = 0
    """Most bytes that a step takes for a moment, beside the state."""


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state on this rank, as it is now.

    Where there is an accelerator, only tensors on it count: state that FSDP2 keeps in host memory is no part of a peak.
    """
    here = compat.accelerator_type() or "cpu"
    return sum(tensor.nbytes for tensor in _state_of(optimizer) if tensor.device.type == here)


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
"""Name -> makes the optimizer as Trainer does, to be tried out on fake tensors."""
_BLOCK_8BIT, _SMALL_8BIT = 256, 4096
"""Elements that share a float32 scale in bitsandbytes' 8-bit state, and below how many a state is float32."""
_DTYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}
"""Bytes of an element -> a type of this size."""


def optimizer_bytes(weights: Weights, name: str, device_type: str = "cpu") -> OptimizerBytes:
    """What an optimizer needs for the trainable ones of `weights`, which are on a device of the type `device_type`.

    Raises `HfCkptError` for a name that is not known.
    """
    if name not in NAMES:
        raise HfCkptError(f"optimizer must be one of {', '.join(NAMES)}, but is {name!r} instead.")
    trained = [(shape, size) for shape, size, trainable in weights.tensors if trainable]
    if name in COUNTED:
        return OptimizerBytes(sum(_counted(math.prod(shape), size, *COUNTED[name]) for shape, size in trained))
    with compat.FakeTensorMode():
        fakes = [
            nn.Parameter(torch.empty(shape, dtype=_DTYPES[size], device=device_type), requires_grad=size > 1)
            for shape, size in trained
        ]
        return _tried(_TRIED[name](fakes), fakes) if fakes else OptimizerBytes()


def _counted(elements: int, size: int, tensors: int, each: int | None) -> int:
    """Bytes of the state of one parameter."""
    if each == 1:
        return tensors * (4 * elements if elements < _SMALL_8BIT else elements + 4 * -(-elements // _BLOCK_8BIT))
    return tensors * elements * (size if each is None else each)


# --- live optimizers --------------------------------------------------------------------------------------------------


def bytes_of(optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerBytes:
    """What live optimizers need: their state as it is, or as it will be while there is none, and their largest step."""
    known = sum(map(state_bytes, optimizers))
    tried = [_bytes_of_one(optimizer) for optimizer in optimizers]
    state = known or sum(found.state for found in tried)
    return OptimizerBytes(state, max((found.step for found in tried), default=0))


def _bytes_of_one(optimizer: torch.optim.Optimizer) -> OptimizerBytes:
    """What a copy of an optimizer needs on fake tensors. One that cannot run there is counted, or taken for AdamW."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    row = _row_of_bitsandbytes(optimizer)
    if row is not None:
        return OptimizerBytes(sum(_counted(compat.local(p).numel(), p.element_size(), *row) for p in trained))
    if not trained:
        return OptimizerBytes()
    try:
        with compat.FakeTensorMode():
            copied, fakes = _on_fakes(optimizer)
            return _tried(copied, fakes)
    except Exception as error:  # whatever an optimizer does that fake tensors cannot
        warn_once(
            log,
            "hf_ckpt: what %s will need is not known, because it does not run on tensors without values (%s: %s). "
            "It is counted like AdamW until its state exists.",
            type(optimizer).__name__,
            type(error).__name__,
            error,
        )
        local = (compat.local(p) for p in trained)
        shapes = Weights(tuple((tuple(p.shape), p.element_size(), True) for p in local))
        return optimizer_bytes(shapes, "adamw")


def _row_of_bitsandbytes(optimizer: torch.optim.Optimizer) -> tuple[int, int] | None:
    """The row, as in `COUNTED`, of an optimizer of bitsandbytes, whose kernels take no fake tensors; else None."""
    kind = type(optimizer)
    if not kind.__module__.startswith("bitsandbytes"):
        return None
    name = kind.__name__.lower()
    tensors = next((count for word, count in (("ademamix", 3), ("adam", 2), ("lamb", 2)) if word in name), 1)
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 8 if "8bit" in name else 32)
    return tensors, bits // 8


def _on_fakes(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, Parameters]:
    """A copy of an optimizer without its hooks and its schedule, with fake parameters and state; and the former."""
    copied: Any = object.__new__(type(optimizer))
    hooks: dict[str, Any] = {name: type(value)() for name, value in vars(optimizer).items() if name.endswith("_hooks")}
    state: dict[Any, Any] = collections.defaultdict(dict)
    vars(copied).update({**vars(optimizer), **hooks, "state": state, "param_groups": []})
    vars(copied).pop("step", None)  # a schedule puts a counting one there
    fakes: Parameters = []
    for group in optimizer.param_groups:
        mine = [parameter for parameter in group["params"] if parameter.requires_grad]
        made = [nn.Parameter(_fake(parameter)) for parameter in mine]
        copied.param_groups.append({**group, "params": made})
        fakes += made
        for parameter, fake in zip(mine, made, strict=True):
            if parameter in optimizer.state:
                state[fake] = {name: _fake(value) for name, value in optimizer.state[parameter].items()}
    return copied, fakes


def _fake(value: Any) -> Any:
    """A fake tensor like this rank's part of a tensor; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    local = compat.local(value)
    return torch.empty(local.shape, dtype=local.dtype, device=local.device)


# --- trying an optimizer out ------------------------------------------------------------------------------------------


class _StepBytes(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts live bytes of a step on fake tensors, and answers what the step asks of their values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.5  # neither 0 nor 1, because some divide by what is left of 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def _tried(optimizer: torch.optim.Optimizer, parameters: Parameters) -> OptimizerBytes:
    """Two steps of an optimizer on fake tensors: its state then, and what the second took beside it.

    Counters of steps are left out of the state.
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


LEARNING_RATE = 1e-5
"""Learning rate of timed steps, so small that random weights stay finite."""


def optimizer_for(workload: Workload, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer that `workload` names, for the trainable parameters of `model`, to be timed.

    None where PyTorch has no optimizer of that name.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if workload.optimizer in ("adamw", "adamw_torch_fused"):  # as the Trainer has it
        return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    if workload.optimizer in ("sgd", "momentum"):
        return torch.optim.SGD(
            trained, lr=LEARNING_RATE, momentum=0.9 if workload.optimizer == "momentum" else 0.0, fused=True
        )
    return None
