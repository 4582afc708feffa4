"""What TRL's trainers do to a model: the head that gives log probabilities of labels in place of logits."""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import nn

from hf_ckpt.errors import MissingDependencyError


def trl_trains() -> bool:
    """Whether a trainer of TRL is loaded. They set `use_reentrant=True` by themselves for adapters under ZeRO-3.

    https://github.com/huggingface/trl/blob/main/trl/trainer/sft_trainer.py
    """
    return any(name.startswith("trl.trainer.") and name.endswith("trainer") for name in sys.modules)


def fused_forward(model: nn.Module, outputs: tuple[str, ...] = ("log_probs",)) -> types.MethodType | None:
    """Return the forward that TRL's trainers put on a model, and leave the model as it was.

    Called with `fused_lm_head=True`, it returns log probabilities of labels without making logits. None where this
    version of TRL (before 1.9) has no such forward, and its trainers take their loss from logits.

    Args:
        model: a causal language model.
        outputs: what it computes for each token, as TRL's `add_fused_lm_head`.

    Raises `MissingDependencyError` where TRL is not installed.
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
