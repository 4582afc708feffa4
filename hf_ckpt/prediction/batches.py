"""Creates the batches and the loss for tracing and timing a model, from a workload or from sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import base_model, find_blocks, vocabulary_head
from hf_ckpt.prediction.question import Workload
from hf_ckpt.prediction.skeleton import Skeleton
from hf_ckpt.prediction.trace import Step
from hf_ckpt.prediction.workload import DTYPES


def batch_for(model: nn.Module, sizes: Mapping[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Zeros in the shapes that `model` trains on: input ids and attention mask, and labels if it accepts them.

    They are for tracing: all elements of a tensor share one place in memory, so no size is too large.
    Shapes are [sequences, tokens]; labels of classifiers are [sequences], and a model for multiple choice gets one
    choice: [sequences, 1, tokens].

    Args:
        model: its class decides which inputs it gets.
        sizes: stack -> (sequences, tokens) of the stack's input.
    """
    base = base_model(model)
    first = next(iter(sizes.values()))
    zero = torch.zeros((), dtype=torch.long)
    found = {name: zero.expand(first) for name in ("input_ids", "attention_mask")}
    last = sizes["decoder"] if len(sizes) > 1 and "decoder" in sizes else first
    name = type(base).__name__
    per_sequence = name.endswith(("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction"))
    if name.endswith("ForMultipleChoice"):  # one choice for every sequence
        found = {key: value[:, None] for key, value in found.items()}
    if _takes_labels(base):
        found["labels"] = zero.expand(last[:1] if per_sequence else last)
    elif len(sizes) > 1:
        found["decoder_input_ids"] = zero.expand(last)
    return found


def _takes_labels(base: nn.Module) -> bool:
    return "labels" in compat.forward_parameters(base)


def loss_for(model: nn.Module) -> Callable[[Any], torch.Tensor] | None:
    """A function that computes a loss from a model's outputs; None if the model computes its own from labels."""
    return None if _takes_labels(base_model(model)) else _mean_square


def _mean_square(outputs: Any) -> torch.Tensor:
    scores: torch.Tensor = outputs.logits if "logits" in outputs else outputs[0]
    return scores.float().square().mean()


def step_of_workload(workload: Workload, skeleton: Skeleton) -> Step:
    """The micro-step of `workload` on a skeleton, for tracing."""
    return _step(workload, skeleton.base, [stack.name for stack in skeleton.stacks])


def step_of_model(workload: Workload, model: nn.Module) -> Step:
    """The micro-step of `workload` on a model with weights, for timing."""
    return _step(workload, model, list(dict.fromkeys(block.stack for block in find_blocks(model).blocks)))


def _step(workload: Workload, model: nn.Module, stacks: Sequence[str]) -> Step:
    rows, tokens = (1, workload.rows * workload.tokens) if workload.packing else (workload.rows, workload.tokens)
    sizes = dict.fromkeys(stacks, (rows, tokens))
    if len(sizes) > 1 and "decoder" in sizes and workload.target_tokens is not None:
        sizes["decoder"] = workload.rows, workload.target_tokens
    batch: dict[str, Any] = batch_for(model, sizes)
    if workload.packing:  # position ids replace the mask and mark where a sequence begins
        batch = {**batch, "position_ids": batch["input_ids"]}
        del batch["attention_mask"]
    autocast = workload.autocast_name
    step = Step(
        batch=batch,
        padded=workload.padded or (workload.packing and not workload.attention.startswith("flash_attention")),
        autocast=DTYPES[autocast] if autocast else None,
        accumulation=workload.accumulation,
        optimizer=workload.optimizer,
        loss=loss_for(model),
        reference=workload.reference_name,
    )
    return step if workload.trainer is None else _step_of_trl(step, workload.trainer, model)


def _step_of_trl(step: Step, trainer: str, model: nn.Module) -> Step:
    """The micro-step as one of TRL's trainers runs it.

    Raises `HfCkptError` for a model without a language-model head, and `MissingDependencyError` without TRL.
    """
    base = base_model(model)
    if vocabulary_head(base) is None or getattr(base.config, "is_encoder_decoder", False):
        raise HfCkptError(f"{type(base).__name__} is no causal language model, which the trainer {trainer} needs.")
    loss, told = _OF_TRL[trainer]
    forward = compat.fused_forward(base, ("log_probs", "entropy", *told))
    batch = {**step.batch, "fused_lm_head": True} if forward is not None else step.batch
    return dataclasses.replace(step, batch=batch, loss=loss, forward=forward)


def _label_scores(outputs: Any) -> torch.Tensor:
    """Log probabilities of labels, [sequences, tokens], from the outputs of TRL's forward, or from logits."""
    found = getattr(outputs, "log_probs", None)
    if isinstance(found, torch.Tensor):
        return found
    logits: torch.Tensor = outputs.logits[:, :-1]
    return logits.log_softmax(-1)[..., 0]


def _preference(outputs: Any) -> torch.Tensor:
    """DPO's loss (https://arxiv.org/abs/2305.18290, equation 7); the reference's scores are a few numbers."""
    chosen, rejected = _label_scores(outputs).sum(1).chunk(2)
    return -nn.functional.logsigmoid(chosen - rejected).mean()


def _policy(outputs: Any) -> torch.Tensor:
    """GRPO's loss without a reference, with a clipped ratio to the old policy."""
    scores = _label_scores(outputs)
    ratio = torch.exp(scores - scores.detach())
    return -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()


_OF_TRL: dict[str, tuple[Callable[[Any], torch.Tensor] | None, tuple[str, ...]]] = {
    "sft": (None, ("is_top1",)),
    "dpo": (_preference, ("mean_logits", "is_top1")),
    "grpo": (_policy, ()),
}
"""Trainer -> (its loss, None for the model's own; further outputs per token, for its logs)."""


def sizes_of_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Workload` that follow from a batch: its sequences, its tokens, and whether anything is masked.

    Raises `HfCkptError` if the batch has no `input_ids` of shape [sequences, tokens].
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise HfCkptError("the batch needs `input_ids` of shape [batch, tokens] to tell its size.")
    found: dict[str, Any] = {"batch": ids.shape[0], "tokens": ids.shape[1]}
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if isinstance(mask, torch.Tensor):
        found["padded"] = bool((mask == 0).any())
    if isinstance(labels, torch.Tensor) and labels.dim() == 2:
        found["target_tokens"] = labels.shape[1]
    return found
