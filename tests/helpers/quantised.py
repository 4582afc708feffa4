"""Models that bitsandbytes has quantised."""

import itertools
from typing import Any

import torch
from torch import nn


def scales_of(model: Any) -> list[torch.Tensor]:
    """What bitsandbytes keeps beside quantised weights: scales, and scales of scales."""
    weights = [getattr(module, "weight", None) for module in model.modules()]
    states = [weight.quant_state for weight in weights if hasattr(weight, "quant_state")]
    scales = [(state.absmax, state.code) for state in states]
    scales += [(state.offset, state.state2.absmax, state.state2.code) for state in states if state.nested]
    states_of_8_bits = [vars(module)["state"] for module in model.modules() if "state" in vars(module)]
    of_8_bits = [tensor for state in states_of_8_bits for tensor in (state.CB, state.SCB) if tensor is not None]
    of_8_bits += [weight.SCB for weight in weights if getattr(weight, "SCB", None) is not None]
    return [*itertools.chain(*scales), *of_8_bits]


def in_8_bits(model: nn.Module) -> nn.Module:
    """The model, with the linear layers of its blocks in 8 bits, as bitsandbytes runs them on a CPU."""
    import bitsandbytes

    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and "lm_head" not in name:
            sizes = layer.in_features, layer.out_features
            eight = bitsandbytes.nn.Linear8bitLt(*sizes, layer.bias is not None, has_fp16_weights=False)
            eight.load_state_dict(layer.state_dict())
            model.set_submodule(name, eight.to("cpu"))
    vars(model)["is_loaded_in_8bit"] = True  # by which PEFT chooses its layers
    return model.requires_grad_(False)
