"""LoRA adapters from PEFT."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_ckpt.errors import MissingDependencyError


def add_lora(model: nn.Module, *, rank: int, **config: Any) -> nn.Module:
    """Put LoRA adapters of rank `rank` on every linear layer; `config` are further keys of PEFT's `LoraConfig`.

    Raises `MissingDependencyError` where PEFT is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingDependencyError("peft", "training LoRA adapters", "pip install 'hf-ckpt[demo]'") from error
    adapted: nn.Module = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", **config))
    return adapted
