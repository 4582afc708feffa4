"""Models that `hf-ckpt check` verifies: one by name, or a small random one of each family."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import transformers

from hf_ckpt import compat
from hf_ckpt.cli.arguments import told_as
from hf_ckpt.errors import HfCkptError, SpecError
from hf_ckpt.models.blocks import find_blocks, vocabulary_head
from hf_ckpt.models.families import learned_positions
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.spec.spec import Spec
from hf_ckpt.training.verify import Verification, verify

log = logging.getLogger(__name__)


def check_families(
    spec: Spec,
    *,
    batch: int,
    tokens: int,
    dtype: torch.dtype = torch.float32,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[tuple[str, Verification]]:
    """Verify a spec on a small random model of every family, and return (model, result) pairs.

    The models have dropout, unless their blocks are compiled or feed-forwards run in chunks.

    Args:
        spec: what to verify. Families without a stack or layer that it names are skipped with a warning.
        batch: sequences.
        tokens: tokens per sequence.
        dtype: type of the weights.
        on_progress: called with a few words before each family.

    Raises `SpecError` if the spec fits no family.
    """
    rows, refused = [], []
    for family in FAMILIES:
        # Compiled blocks and chunks draw random numbers of their own, so that gradients with dropout differ.
        dropout = 0.1 if spec.compile is None and spec.mlp == "full" else 0.0
        model = tiny_model(family, dropout=dropout, dtype=dtype)
        if spec.head != "full" and vocabulary_head(model) is None:
            log.warning("not checked on %s: its head is no projection onto a vocabulary", family)
            continue
        most = learned_positions(model.config)
        if most is not None and tokens > most:
            log.warning("not checked on %s: it has positions for %d tokens", family, most)
            continue
        on_progress(f"checking {family}")
        inputs = tiny_batch(family, batch=batch, tokens=tokens)
        try:
            rows.append((f"{family} (random)", verify(model, inputs, spec)))
        except SpecError as error:
            log.warning("not checked on %s: %s", family, "; ".join(error.problems))
            refused.append(error)
    if not rows:
        raise refused[0]
    return rows


def check_model(
    name: str,
    spec: Spec,
    *,
    batch: int,
    tokens: int,
    dtype: torch.dtype = torch.float32,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[str, Verification]:
    """Verify a spec on a model from the hub or a folder, with random tokens; return its name and the result.

    The model's own head is used if its config names a class. `on_progress` is called before each part. Raises
    `HfCkptError` if the model cannot be loaded.
    """
    on_progress(f"loading {name}")
    with told_as(f"cannot load a model from {name!r}"):
        config = transformers.AutoConfig.from_pretrained(name)
        model = _auto_class(config).from_pretrained(name, dtype=dtype)
    most = learned_positions(config)
    if most is not None and tokens > most:
        raise HfCkptError(f"{name} has positions for {most} tokens, but {tokens} are asked for.")
    device = compat.accelerator_type() or "cpu"
    model = model.to(device).train()
    on_progress(f"checking {name}")
    inputs = {key: value.to(device) for key, value in _random_batch(model, batch, tokens).items()}
    if spec.head != "full":  # a head in chunks computes a loss from labels, and no logits
        inputs["labels"] = inputs["input_ids"].clone()
        return name, verify(model, inputs, spec)
    return name, verify(model, inputs, spec, loss_fn=_loss)


def _auto_class(config: Any) -> Any:
    """Return the model class that the weights were saved from, or that of causal language models."""
    names = getattr(config, "architectures", None) or []
    saved = getattr(transformers, str(names[0]), None) if names else None
    return saved or transformers.AutoModelForCausalLM


def _random_batch(model: Any, batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """Make random token ids and an attention mask [batch, tokens], with the ids for a decoder, if there is one."""
    torch.manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (batch, tokens))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if {block.stack for block in find_blocks(model).blocks} >= {"encoder", "decoder"}:
        inputs["decoder_input_ids"] = ids.clone()
    return inputs


def _loss(outputs: Any) -> torch.Tensor:
    """Return a loss without labels: the mean square of the logits, or of the last hidden states without a head."""
    scores: torch.Tensor = outputs.logits if "logits" in outputs else outputs[0]
    return scores.float().square().mean()
