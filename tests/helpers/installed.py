"""Visible effects of a plan on a small LLaMA: flags, hooks, and recomputed blocks."""

import hf_ckpt
from helpers.steps import step
from hf_ckpt.models.tiny import tiny_batch

ALL = [f"model.layers.{index}" for index in range(4)]
"""Names of the blocks of `tiny_model("llama")`."""


def forward_hooks(model):
    """Number of hooks of each kind on every module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {name: [len(vars(module)[kind]) for kind in kinds] for name, module in model.named_modules()}


def flags(model):
    """Names of the modules whose checkpointing flag is on."""
    return [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)]


def active(model):
    """Names of the blocks that a training step recomputes."""
    before = hf_ckpt.describe(model).recomputed
    step(model, tiny_batch("llama"))
    model.zero_grad()
    after = hf_ckpt.describe(model).recomputed
    return [name for name, times in after.items() if times == before[name] + 1]
