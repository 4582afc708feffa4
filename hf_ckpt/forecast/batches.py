"""The micro-step of a training: a batch in the shapes that the model trains on, and its loss."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.question import DTYPE_NAMES, Workload
from hf_ckpt.models.blocks import base_model, vocabulary_head

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
"""Names of the types that weights and autocast may have."""
_SAMPLES_A_SECOND = 16_000


@dataclasses.dataclass(frozen=True)
class MicroStep:
    """One micro-step, and what a forecast must know about the step around it."""

    batch: Mapping[str, Any]
    """Keyword arguments of the model's forward. Only the shapes and types of tensors matter."""
    padded: bool = False
    """Whether an attention mask masks anything."""
    autocast: torch.dtype | None = None
    """The type that autocast computes in; None without autocast."""
    accumulation: int = 1
    """Micro-steps of one optimizer step."""
    optimizer: str = "adamw"
    """Its name, a row of `optimizers.csv`."""
    loss: Callable[[Any], torch.Tensor] | None = None
    """Computes the loss from the outputs of a model that does not compute its own."""
    forward: types.MethodType | None = None
    """A forward that replaces the class's own on the model; None if the class's own runs."""
    reference: str | None = None
    """How the loss gets its reference: `adapters-off` and `model` run a pass without gradients after the forward;
    `precomputed` and None run no such pass."""
    sharded: bool = False
    """Whether blocks run as under FSDP2."""

    @property
    def shapes(self) -> tuple[object, ...]:
        """What its memory and time depend on: equal for two steps that need the same."""
        batch = tuple(
            (name, (value.shape, value.dtype) if isinstance(value, torch.Tensor) else repr(value))
            for name, value in self.batch.items()
        )
        runs = self.loss, self.forward, self.reference, self.sharded
        return batch, self.padded, self.autocast, self.accumulation > 1, *runs

    @property
    def tokens(self) -> int:
        """Tokens of the micro-step: elements of the largest input of integers, such as [sequences, tokens]."""
        ids = (value for value in self.batch.values() if isinstance(value, torch.Tensor))
        return max((value.numel() for value in ids if value.dim() > 1 and not value.is_floating_point()), default=0)


def micro_step(workload: Workload, model: nn.Module) -> MicroStep:
    """The micro-step of a workload on a model. All elements of a tensor share one place in memory.

    Raises `HfCkptError` for models of pairs of images and texts, for images of a text model, and for a trainer of TRL
    with a model that has no language-model head; `MissingDependencyError` without TRL.
    """
    base = base_model(model)
    takes = compat.forward_parameters(base)
    if "return_loss" in takes:
        raise HfCkptError(
            f"{type(base).__name__} compares every image of a batch with every text, which cannot be planned for. "
            "`full`, `selective` and a budget measured in the run work."
        )
    batch = _inputs(workload, base)
    own_loss = "labels" in takes and not type(base).__name__.endswith("ForCTC")
    if own_loss:
        batch["labels"] = torch.zeros((), dtype=torch.long).expand(_labels(workload, base))
    elif base.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.zeros((), dtype=torch.long).expand(_labels(workload, base))
    autocast = workload.autocast_name
    step = MicroStep(
        batch=batch,
        padded=workload.padded or (workload.packing and not workload.attention.startswith("flash_attention")),
        autocast=DTYPES[autocast] if autocast else None,
        accumulation=workload.accumulation,
        optimizer=workload.optimizer,
        loss=None if own_loss else _mean_square,
        reference=workload.reference_name,
        sharded=workload.sharded,
    )
    if workload.trainer is None:
        return step
    if vocabulary_head(base) is None or base.config.is_encoder_decoder:
        raise HfCkptError(
            f"{type(base).__name__} is no causal language model, which the trainer {workload.trainer} needs."
        )
    loss, outputs = _OF_TRL[workload.trainer]
    forward = compat.fused_forward(base, ("log_probs", "entropy", *outputs))
    batch = {**batch, "fused_lm_head": True} if forward is not None else batch
    return dataclasses.replace(step, batch=batch, loss=loss, forward=forward)


def _inputs(workload: Workload, base: Any) -> dict[str, Any]:
    """The inputs of a model: text [sequences, tokens], images [images, channels, height, width], or speech."""
    rows, kind = workload.rows, getattr(base, "main_input_name", "input_ids")
    vision = getattr(base.config, "vision_config", base.config)
    batch: dict[str, Any] = {}
    if kind == "input_values":  # samples of speech
        batch["input_values"] = _floats(base, rows, round(workload.seconds * _SAMPLES_A_SECOND))
    elif kind == "input_features":  # spectra, of a fixed length for Whisper, otherwise a frame every 10 ms
        fixed = getattr(base.config, "max_source_positions", None) if hasattr(base.config, "num_mel_bins") else None
        bins = getattr(base.config, "num_mel_bins", None) or getattr(base.config, "feature_projection_input_dim", 80)
        frames = 2 * fixed if fixed else round(100 * workload.seconds)
        batch["input_features"] = _floats(base, rows, *((bins, frames) if fixed else (frames, bins)))
    elif kind == "pixel_values" or workload.images:
        size = workload.image_size or getattr(vision, "image_size", None)
        if size is None:
            raise HfCkptError(f"{type(base).__name__} takes no images, or none of a fixed size: leave `images` out.")
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        number = rows * (workload.images if kind == "input_ids" else 1)
        batch["pixel_values"] = _floats(base, number, getattr(vision, "num_channels", 3), height, width)
    if kind == "input_ids":
        shape: tuple[int, ...] = (1, rows * workload.tokens) if workload.packing else (rows, workload.tokens)
        shape = (rows, 1, workload.tokens) if type(base).__name__.endswith("ForMultipleChoice") else shape
        ids = torch.zeros((), dtype=torch.long).expand(shape)
        # Packed sequences have position ids, which mark where each begins, in place of a mask.
        batch |= {"input_ids": ids, "position_ids" if workload.packing else "attention_mask": ids}
    return batch


def _floats(base: Any, *shape: int) -> torch.Tensor:
    dtype = next((p.dtype for p in base.parameters() if p.is_floating_point()), torch.float32)
    return torch.zeros((), dtype=dtype).expand(shape)


def _labels(workload: Workload, base: Any) -> tuple[int, ...]:
    """The shape of labels: a class for each sequence or image, or one for each token."""
    name, rows = type(base).__name__, workload.rows
    if name.endswith(("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")):
        return (rows,)
    if name.endswith(("ForImageClassification", "ForAudioClassification", "ForVideoClassification")):
        return (rows,)
    if base.config.is_encoder_decoder:
        return rows, workload.target_tokens or workload.tokens
    return (1, rows * workload.tokens) if workload.packing else (rows, workload.tokens)


def _mean_square(outputs: Any) -> torch.Tensor:
    scores: torch.Tensor = outputs.logits if "logits" in outputs else outputs[0]
    return scores.float().square().mean()


def _label_scores(outputs: Any) -> torch.Tensor:
    """Log probabilities of labels, [sequences, tokens], from the outputs of TRL's forward, or from logits."""
    scores = getattr(outputs, "log_probs", None)
    if isinstance(scores, torch.Tensor):
        return scores
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
    sizes: dict[str, Any] = {"batch": ids.shape[0], "tokens": ids.shape[1]}
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if isinstance(mask, torch.Tensor):
        sizes["padded"] = bool((mask == 0).any())
    if isinstance(labels, torch.Tensor) and labels.dim() == 2:
        sizes["target_tokens"] = labels.shape[1]
    return sizes
