"""LoRA adapters for the small models of every family."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model

from helpers.versions import missing_for_add_adapter

TARGETS = {
    "llama": ["q_proj", "up_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "bert": ["query", "dense"],
    "t5": ["q", "wi"],
}
"""Linear layers of the attention and the feed-forward."""


def lora_config(family, targets=None, **options):
    """Adapters with random values: PEFT initialises B with zeros, so that A would get no gradient."""
    return LoraConfig(
        r=4,
        init_lora_weights=False,
        target_modules=targets or TARGETS[family],
        fan_in_fan_out=family == "gpt2",
        **options,
    )


def add_inside(model, config):
    """Add adapters inside a transformers model, without a wrapper, as its `add_adapter` does.

    If that method requires a newer PEFT than is installed, call PEFT's own function instead.
    """
    if missing_for_add_adapter() is None:
        model.add_adapter(config)
    else:
        model._hf_peft_config_loaded = True
        inject_adapter_in_model(config, model)


def with_lora(model, family, *, hub=False, lora_dropout=0.1, **options):
    """The model with the same adapters each time: wrapped by PEFT, or inside the model itself (`hub`)."""
    training = model.training
    torch.manual_seed(1)
    config = lora_config(family, lora_dropout=lora_dropout, **options)
    if hub:
        add_inside(model, config)
    else:
        model = get_peft_model(model, config)
    return model.train(training)
