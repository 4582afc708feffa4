"""TRL's changes to a model: a forward that returns log probabilities of labels instead of logits."""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import nn

from hf_ckpt.errors import MissingDependencyError


def trl_trains() -> bool:
    """Whether a trainer of TRL is imported. For adapters under ZeRO-3, they set `use_reentrant=True` themselves.

    https://github.com/huggingface/trl/blob/main/trl/trainer/sft_trainer.py
    """
    return any(name.startswith("trl.trainer.") and name.endswith("trainer") for name in sys.modules)


def fused_forward(model: nn.Module, outputs: tuple[str, ...] = ("log_probs",)) -> types.MethodType | None:
    """Return the forward that TRL's trainers set on a model; the model itself is not changed.

    Called with `fused_lm_head=True`, it returns log probabilities of labels without computing logits. None if this
    version of TRL (before 1.9) has no such forward; its trainers compute their loss from logits.

    Args:
        model: a causal language model.
        outputs: what it computes for each token, as for TRL's `add_fused_lm_head`.

    Raises `MissingDependencyError` if TRL is not installed.
    """
    try:
        from trl.trainer import utils
    except ImportError as error:
        raise MissingDependencyError("trl", "planning for its trainers", "pip install trl") from error
    add: Any = getattr(utils, "add_fused_lm_head", None)
    if add is None:
        return None
    add(model, outputs=outputs)
    forward: types.MethodType = vars(model).pop("forward")
    return forward
