"""Small mixture-of-experts models."""

import torch
import transformers

from helpers.tables import table
from hf_ckpt import compat

_MODELS = table(__file__, "models.yaml")
EXPERTS = _MODELS["experts"]
"""Model type -> its own config keys."""
MORE_EXPERTS = _MODELS["more_experts"]
"""More of them, some without auxiliary losses."""
ONE_BY_ONE = "eager" if len(compat.transformers.ENABLE_NAMES) > 1 else None
"""The implementation that calls experts one by one; in transformers 4 it is the only one and has no name."""
IMPLEMENTATIONS = (ONE_BY_ONE, "batched_mm", "grouped_mm") if ONE_BY_ONE else (None,)


def experts(name, implementation=None):
    """A mixture of experts, with its auxiliary loss, that runs its experts with these kernels."""
    keys = _MODELS["every_expert"] | (EXPERTS | MORE_EXPERTS)[name]
    if name != "deepseek_v3":
        keys |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    config = transformers.AutoConfig.for_model(name, **keys)
    config._attn_implementation = "eager" if name == "gpt_oss" else "sdpa"
    if implementation is not None:
        config._experts_implementation = implementation
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    for key, parameter in model.named_parameters():
        if key.endswith((".gate.weight", ".router.weight")) and not parameter.any():  # some are zero until loaded
            torch.nn.init.normal_(parameter, std=0.02)
    return model
