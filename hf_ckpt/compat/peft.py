"""LoRA adapters from PEFT."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from hf_ckpt.errors import HfCkptError, reason_of


def add_adapters(model: nn.Module, config: Any) -> nn.Module:
    """Add adapters of a config of PEFT to a model. Raises `HfCkptError` if PEFT refuses them."""
    from peft import get_peft_model

    try:
        adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        raise HfCkptError(f"PEFT puts no adapters on {type(model).__name__}: {reason_of(error)}.") from error
    return adapted


def has_inputs_held(block: nn.Module) -> bool:
    """Whether layers of a block hold their inputs in attributes of autograd nodes, which no saved-tensor hook sees.

    So do `MatMul8bitFp` and `MatMul8bitLt` of bitsandbytes (`bitsandbytes/autograd/_functions.py`).
    """
    # By name, because other models must not wait for the import of bitsandbytes. The second is hf_ckpt's own.
    return any(type(module).__name__ in ("Linear8bitLt", "EightBitLinear") for module in block.modules())


def like_bitsandbytes(model: nn.Module, layer_class: type[nn.Module], *, bits: int) -> None:
    """Make adapters on layers of a class run like PEFT's own for so many bits (`peft/tuners/lora/bnb.py`)."""
    from peft.tuners.lora.layer import Linear

    class Adapted(Linear):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor = self.base_layer(x, *args, **kwargs)
            if self.disable_adapters:
                return result
            if bits == 4:
                result = result.clone()  # PEFT avoids failing backwards through views, and so allocates this
            casts = not torch.is_autocast_enabled()
            for name in self.active_adapters:
                if casts:
                    x = self._cast_input_dtype(x, self.lora_A[name].weight.dtype)
                output = self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * self.scaling[name]
                if casts:
                    output = output.to(result.dtype)
                result = result + output
            return result

    # PEFT has put its plain kind of layer around these, which are no layers of bitsandbytes.
    for module in model.modules():
        if type(module) is Linear and isinstance(module.base_layer, layer_class):
            module.__class__ = Adapted


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable a model's adapters inside this context, as PEFT's `disable_adapter` does."""
    # That method also sets `requires_grad` of adapters, and models with adapters inside do not have it.
    with contextlib.ExitStack() as off:
        for module in model.modules():
            if hasattr(module, "_disable_adapters"):
                off.enter_context(mock.patch.object(module, "_disable_adapters", True))
        yield


def is_adapter(kind: type) -> bool:
    """Whether a class of modules is one of PEFT's layers with adapters, apart from Arrow's, which route tokens."""
    # By name, because models without adapters must not wait for the import of PEFT.
    return kind.__module__.startswith("peft.tuners.") and kind.__module__ != "peft.tuners.lora.arrow"


def is_merged(name: str, value: Any) -> bool:
    """Whether an attribute is PEFT's list of the adapters that are merged into the weight of a layer.

    Neither the weight's address nor its version shows a merge.
    """
    return name == "merged_adapters" and type(value) is list


def counts_tokens(module: nn.Module) -> bool:
    """Whether adapters in a module act on the last tokens of each row only (activated LoRA).

    PEFT passes their number by hooks that it registers for one forward.
    """
    variants = (variant for inner in module.modules() for variant in getattr(inner, "lora_variant", {}).values())
    return any(type(variant).__name__.startswith("ALora") for variant in variants)
