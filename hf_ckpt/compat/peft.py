"""LoRA adapters from PEFT."""

from __future__ import annotations

from collections.abc import Mapping
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


def merged_adapters(attributes: Mapping[str, Any]) -> list[Any] | None:
    """Return the names of the adapters that are merged into the weight of a layer; None if it is no layer of PEFT's.

    PEFT adds to the list when it merges, and neither the weight's address nor its version tells of that.
    """
    found = attributes.get("merged_adapters")
    return found if type(found) is list else None
