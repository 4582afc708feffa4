"""Models that bitsandbytes has quantised."""

import itertools
from typing import Any

import torch


def scales_of(model: Any) -> list[torch.Tensor]:
    """What bitsandbytes keeps beside quantised weights: scales, and scales of scales."""
    weights = (getattr(module, "weight", None) for module in model.modules())
    states = [weight.quant_state for weight in weights if hasattr(weight, "quant_state")]
    scales = [(state.absmax, state.code) for state in states]
    scales += [(state.offset, state.state2.absmax, state.state2.code) for state in states if state.nested]
    return list(itertools.chain(*scales))
