"""What a benchmark trains with: random batches, and an optimizer of PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import base_model
from hf_ckpt.prediction.batches import step_of_model
from hf_ckpt.prediction.workload import Workload

LEARNING_RATE = 1e-5
"""So small that random weights stay finite."""
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    **dict.fromkeys(("adamw", "adamw_torch_fused"), torch.optim.AdamW),  # fused, like the Trainer's
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
}
"""Name of an optimizer in a workload -> makes it."""


def random_inputs(workload: Workload, model: nn.Module, device: str, seed: int = 0) -> dict[str, Any]:
    """Random inputs of one micro-step, as keyword arguments of the model's forward. Nothing is masked.

    Args:
        workload: sizes of the batch.
        model: plain or wrapped.
        device: device of the tensors, such as `cuda`.
        seed: of the random values.
    """
    base: Any = base_model(model)
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Any] = {}
    for name, shaped in step_of_model(workload, model).batch.items():
        most = _labels(base) if name == "labels" else base.config.vocab_size
        inputs[name] = torch.randint(most, shaped.shape, generator=generator)
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    inputs = {name: value.to(device) for name, value in inputs.items()}
    return {**inputs, "use_cache": False} if compat.wants_use_cache(base) else inputs


def _labels(base: Any) -> int:
    """How many values a label may have: one per class, or one per token of the vocabulary."""
    name = type(base).__name__
    if name.endswith("ForMultipleChoice"):
        return 1  # there is one choice
    return int(base.config.num_labels if name.endswith("Classification") else base.config.vocab_size)


def optimizer_for(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of this name for the trainable parameters of `model`. Raises `HfCkptError` for another name."""
    if name not in OPTIMIZERS:
        raise HfCkptError(f"a benchmark trains with an optimizer of PyTorch's own, not with {name}.")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return OPTIMIZERS[name](trained, lr=LEARNING_RATE, fused=True)
