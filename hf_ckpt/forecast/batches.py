"""The micro-step of a training: a batch in the shapes that the model trains on, and its loss."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError, MissingDependencyError
from hf_ckpt.forecast.question import DTYPE_NAMES, FIELDS, Question
from hf_ckpt.models.blocks import vocabulary_head

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
"""Names of the types that weights and autocast may have."""
NO_PLAN = "this cannot be planned for before a run. `full`, `selective` and a budget measured in the run work."
"""The end of errors about models."""
_OF_CLASSES = ("SequenceClassification", "NextSentencePrediction", "ImageClassification", "AudioClassification")
"""Ends of names of models with one label a sequence or image."""
_FRAMES = 100
"""Whisper's frames of a second."""
_SAMPLES = 16_000
"""Samples of a second of recordings that models such as wav2vec 2.0 take."""
_OF_CHOICES = "ForMultipleChoice"
"""End of names of models that score several sequences for each label."""


class MicroStep(NamedTuple):
    """What runs in one micro-step of a training."""

    batch: dict[str, Any]
    """Keyword arguments of the model's forward. Only the shapes and types of tensors matter."""
    loss: Callable[[Any], torch.Tensor] = operator.attrgetter("loss")
    """Computes the loss from the outputs of the model; by default, the model's own."""
    forward: types.MethodType | None = None
    """A forward that replaces the class's own on the model; None if the class's own runs."""


def micro_step(training: Question, base: Any) -> MicroStep:
    """The micro-step of a training on a model. Call it under a mode of fake tensors, whose batch needs no memory.

    Raises `HfCkptError` for models of speech or of pairs of images and texts, for images of a text model, and for a
    trainer of TRL with a model that has no language-model head; `MissingDependencyError` without TRL.
    """
    name = type(base).__name__
    takes = compat.transformers.forward_parameters(base)
    if "return_loss" in takes:  # such as CLIP's
        raise HfCkptError(f"{name} compares every image of a batch with every text: {NO_PLAN}")
    batch = _inputs(training, base)
    has_loss = "labels" in takes and not name.endswith("ForCTC")
    if has_loss or base.config.is_encoder_decoder:
        shape: tuple[int, ...] = training.shape
        if name.endswith((*_OF_CLASSES, _OF_CHOICES)):
            shape = (training.rows,)
        elif base.config.is_encoder_decoder:
            shape = training.rows, training.target_tokens or training.tokens
        batch["labels" if has_loss else "decoder_input_ids"] = torch.zeros(shape, dtype=torch.long)
    if training.trainer is None:
        is_ctc = name.endswith("ForCTC") and "input_values" in batch
        other_loss = functools.partial(_of_alignments, batch["input_values"]) if is_ctc else mean_square
        return MicroStep(batch) if has_loss else MicroStep(batch, other_loss)
    if vocabulary_head(base) is None or base.config.is_encoder_decoder:
        raise HfCkptError(f"{name} is not a causal language model, which the trainer {training.trainer} needs.")
    loss, outputs = _OF_TRL[training.trainer]
    # Its trainers put this forward on the model. It runs the head in tiles, on the labels' positions only, so that no
    # logits are ever alive: with the plain forward, a forecast would add gigabytes to the peak.
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as error:
        raise MissingDependencyError("trl>=1.9", "planning for its trainers", 'pip install "trl>=1.9"') from error
    add_fused_lm_head(base, outputs=("log_probs", "entropy", *outputs))
    forward = vars(base).pop("forward")  # the model itself is not changed
    return MicroStep({**batch, "fused_lm_head": True}, loss, forward)


def _inputs(training: Question, base: Any) -> dict[str, Any]:
    """The inputs of a model: text [sequences, tokens], images [images, channels, height, width], and the frames of
    recordings [sequences, bins, frames]; a model of multiple choice takes text [sequences, choices, tokens]."""
    kind = getattr(base, "main_input_name", "input_ids")
    frames = 2 * getattr(base.config, "max_source_positions", 0)  # Whisper's convolutions halve the number
    has_frames = kind == "input_features" and frames and hasattr(base.config, "num_mel_bins")
    has_samples = kind == "input_values" and hasattr(base.config, "conv_stride")
    if kind not in ("input_ids", "pixel_values") and not has_frames and not has_samples:
        raise HfCkptError(f"{type(base).__name__} takes {kind}, and not text, images or sound: {NO_PLAN}")
    if training.seconds is not None and not (has_frames or has_samples):
        raise HfCkptError(f"{type(base).__name__} takes no recordings: leave `seconds` out.")
    batch: dict[str, Any] = {}
    if has_frames:  # every recording is padded to the same length: 3000 frames, which are 30 seconds
        most = frames // _FRAMES
        if training.seconds is not None and training.seconds > most:
            raise HfCkptError(f"{type(base).__name__} takes {most} seconds, but {training.seconds} are asked for.")
        batch[kind] = torch.zeros((training.rows, base.config.num_mel_bins, frames), dtype=base.dtype)
    if has_samples:
        if training.seconds is None:
            raise HfCkptError(f"{type(base).__name__} takes recordings: give their length (seconds).")
        batch[kind] = torch.zeros((training.rows, training.seconds * _SAMPLES), dtype=base.dtype)
    if kind == "input_ids":
        # Packed sequences have position ids, which mark where each begins, in place of a mask: transformers makes
        # the mask from them (`find_packed_sequence_indices` in masking_utils.py).
        rows, tokens = training.shape
        choices = type(base).__name__.endswith(_OF_CHOICES)
        shape = (rows, training.choices, tokens) if choices else (rows, tokens)
        for name in ("input_ids", "position_ids" if training.packing else "attention_mask"):
            batch[name] = torch.zeros(shape, dtype=torch.long)
    if kind == "pixel_values" or training.images:
        vision = getattr(base.config, "vision_config", base.config)
        size = training.image_size or getattr(vision, "image_size", None)
        if size is None:
            raise HfCkptError(f"{type(base).__name__} takes no images, or none of a fixed size: leave `images` out.")
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        number = training.rows * max(training.images, 1)
        channels = getattr(vision, "num_channels", 3)
        batch["pixel_values"] = torch.zeros((number, channels, height, width), dtype=base.dtype)
    return batch


def without_effect(training: Question, base: Any) -> Iterator[str]:
    """Yield a sentence for each option of a question that changes nothing in a micro-step of this model."""
    name = type(base).__name__
    kind = getattr(base, "main_input_name", "input_ids")
    effects = {
        "target_tokens": has_targets(base),
        "image_size": kind == "pixel_values" or training.images > 0,
        "choices": kind == "input_ids" and name.endswith(_OF_CHOICES),
        "seconds": kind == "input_values",  # Whisper pads every recording to 30 seconds
    }
    for field, has_effect in effects.items():
        if not has_effect and getattr(training, field) != FIELDS[field].default:
            yield f"{FIELDS[field].flag} has no effect on {name}"


def has_targets(base: Any) -> bool:
    """Whether a model has a target sequence of its own beside its input."""
    return bool(base.config.is_encoder_decoder) and not type(base).__name__.endswith((*_OF_CLASSES, _OF_CHOICES))


def mean_square(outputs: Any) -> torch.Tensor:
    """A loss of a model that has none of its own, from its first output."""
    scores: torch.Tensor = outputs[0]
    return scores.float().square().mean()


def _of_alignments(samples: torch.Tensor, outputs: Any) -> torch.Tensor:
    """A loss of log probabilities, [frames, sequences, vocabulary], as CTC's, whose sums over alignments depend on
    values. These take a few numbers a frame, and the mask that models make of their samples more."""
    mask = torch.ones_like(samples, dtype=torch.long)  # noqa: F841  # alive while the loss is computed
    return nn.functional.log_softmax(outputs.logits, dim=-1, dtype=torch.float32).transpose(0, 1).square().mean()


def _of_label_scores(outputs: Any) -> torch.Tensor:
    """A loss of the labels' log probabilities, [sequences, tokens], from the outputs of TRL's forward.

    What DPO and GRPO compute from these takes little memory and time: they are two numbers a token.
    """
    return -nn.functional.logsigmoid(outputs.log_probs.sum(1)).mean()


_OF_TRL: dict[str, tuple[Callable[[Any], torch.Tensor], tuple[str, ...]]] = {
    "sft": (operator.attrgetter("loss"), ("is_top1",)),
    "dpo": (_of_label_scores, ("mean_logits", "is_top1")),
    "grpo": (_of_label_scores, ()),
}
"""Trainer -> (its loss; further outputs per token, for its logs)."""
