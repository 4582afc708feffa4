"""TRL's changes to a model: a forward that returns log probabilities of labels instead of logits."""

from __future__ import annotations

import types

from torch import nn

from hf_ckpt.errors import MissingDependencyError


def fused_forward(model: nn.Module, outputs: tuple[str, ...]) -> types.MethodType:
    """Return the forward that TRL's trainers set on a causal language model, which is not changed itself.

    Called with `fused_lm_head=True`, it computes `outputs` for each token, but no logits.
    """
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as error:
        raise MissingDependencyError("trl>=1.9", "planning for its trainers", 'pip install "trl>=1.9"') from error
    add_fused_lm_head(model, outputs=outputs)
    forward: types.MethodType = vars(model).pop("forward")
    return forward
