"""The bytes of an optimizer's state, read from a live optimizer or estimated by its name, and optimizers to time."""

from __future__ import annotations

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.prediction.choices import OPTIMIZERS
from hf_ckpt.prediction.skeleton import Weights
from hf_ckpt.prediction.workload import Workload


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state on this rank, as it is now.

    Where there is an accelerator, only tensors on it count: state that FSDP2 keeps in host memory is no part of a peak.
    """
    values = (value for state in list(optimizer.state.values()) for value in state.values())
    found = (compat.local(value) for value in values if isinstance(value, torch.Tensor))
    here = compat.accelerator_type() or "cpu"
    return sum(tensor.nbytes for tensor in found if tensor.device.type == here)


_BLOCK_8BIT, _SMALL_8BIT = 256, 4096
"""Elements that share a scale in bitsandbytes' 8-bit state, and below how many a parameter's state is float32."""


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The name by which `optimizer_state` knows an optimizer; `adamw` for one that it does not know."""
    name = type(optimizer).__name__.lower()
    if name == "sgd":
        return "momentum" if any(group.get("momentum") for group in optimizer.param_groups) else "sgd"
    if "8bit" in name:
        return "adamw8bit"
    return name if name in OPTIMIZERS else "adamw"


def optimizer_state(weights: Weights, name: str) -> int:
    """Bytes of an optimizer's state for the trainable ones of `weights`.

    PyTorch's optimizers keep their state in the type of the parameters. `adamw8bit` of bitsandbytes keeps a byte for
    every element and a float32 scale for every 256, and float32 for parameters below 4096 elements.

    Raises `HfCkptError` for a name that is not known.
    """
    if name not in OPTIMIZERS:
        raise HfCkptError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, but is {name!r} instead.")
    states, total = OPTIMIZERS[name], 0
    for elements, size, trainable in weights.tensors:
        if trainable and name == "adamw8bit":
            small = elements < _SMALL_8BIT
            total += states * (4 * elements if small else elements + 4 * -(-elements // _BLOCK_8BIT))
        elif trainable:
            total += states * elements * size
    return total


LEARNING_RATE = 1e-5
"""Learning rate of timed steps, so small that random weights stay finite."""


def optimizer_for(workload: Workload, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer that `workload` names, for the trainable parameters of `model`, to be timed.

    None where PyTorch has no optimizer of that name.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if workload.optimizer == "adamw":  # fused, as the Trainer has it, which takes no memory beside its state
        return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    if workload.optimizer in ("sgd", "momentum"):
        return torch.optim.SGD(
            trained, lr=LEARNING_RATE, momentum=0.9 if workload.optimizer == "momentum" else 0.0, fused=True
        )
    return None
