"""LoRA adapters for the small models of every family."""

import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model

TARGETS = {
    "llama": ["q_proj", "up_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "bert": ["query", "dense"],
    "t5": ["q", "wi"],
}
"""Linear layers of the attention and the feed-forward."""


def lora_config(family, targets=None, **options):
    """Adapters with random values: PEFT initialises B with zeros, so that A would get no gradient."""
    chosen = {"target_modules": targets or TARGETS[family], "fan_in_fan_out": family == "gpt2"}
    return LoraConfig(r=4, init_lora_weights=False, **chosen, **options)


def add_inside(model, config):
    """Add adapters inside a transformers model, without a wrapper.

    Its own `add_adapter` does the same, but requires a newer PEFT than there is for some versions of transformers.
    """
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


def two_adapters(model):
    """A LLaMA with two adapters, `default` and `critic`, and trained norms and embeddings."""
    model = with_lora(model, "llama")
    model.add_adapter("critic", lora_config("llama", lora_dropout=0.1))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "norm" in name or "embed" in name)
    return model
