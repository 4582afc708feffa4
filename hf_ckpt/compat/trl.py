"""TRL's changes to a model: a forward that returns log probabilities of labels instead of logits."""

from __future__ import annotations

import types

from torch import nn

from hf_ckpt.errors import MissingDependencyError


def fused_forward(model: nn.Module, outputs: tuple[str, ...]) -> types.MethodType:
    """Return the forward that TRL's trainers set on a causal language model; the model itself is not changed.

    Called with `fused_lm_head=True`, it returns log probabilities of labels without computing logits. `outputs` are
    what it computes for each token. Raises `MissingDependencyError` without TRL 1.9 or later.
    """
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as error:
        raise MissingDependencyError("trl>=1.9", "planning for its trainers", 'pip install "trl>=1.9"') from error
    add_fused_lm_head(model, outputs=outputs)
    forward: types.MethodType = vars(model).pop("forward")
    return forward
