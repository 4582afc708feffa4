"""Small random models of every family, with batches and a tokenizer, for checks and tests without weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from hf_ckpt.models import families

VOCABULARY = 320
"""Entries of the vocabulary: 256 bytes and the special tokens, rounded up."""
FAMILIES = tuple(row.name for row in families.FAMILIES.values() if row.tiny is not None)
"""Names of the families that have small models."""
SPECIAL_TOKENS = ("<pad>", "</s>", "<s>", "<unk>", "<mask>", "<cls>", "<sep>")
"""The first tokens of the vocabulary, in the order of their ids from 0."""


def tiny_model(
    family: str,
    *,
    layers: int = 4,
    hidden: int = 32,
    dropout: float = 0.0,
    attention: str = "eager",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> transformers.PreTrainedModel:
    """Make a random model in train mode: a causal LM for `llama` and `gpt2`, a classifier for `bert`, seq2seq for `t5`.

    Args:
        family: `llama`, `gpt2`, `bert`, `t5`, or a registered family with a `tiny` model.
        layers: number of blocks in each stack.
        hidden: hidden size, a multiple of 8.
        dropout: probability of every dropout that the family's config has a key for.
        attention: `eager`, `sdpa`, or any other implementation that transformers knows.
        dtype: type of the parameters.
        seed: seed of the initialisation.
        overrides: further keys of the family's config.

    Raises `ValueError` for a family that has no small models.
    """
    tiny = _row(family)
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = getattr(transformers, tiny.config)(**tokens | tiny.keys(layers, hidden, dropout) | overrides)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model: transformers.PreTrainedModel = getattr(transformers, tiny.model)(config).to(dtype)
    if model.loss_type is None:  # transformers cannot derive it from GPT-2's class name, and warns in every run
        model.loss_type = "ForCausalLM"
    return model.train()


def tiny_batch(family: str, *, batch: int = 2, tokens: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make random inputs for a small model: `input_ids` and `attention_mask` [batch, tokens], and `labels`.

    The labels are [batch, tokens] of the same tokens for a causal LM, [batch] classes for a classifier, and
    [batch, tokens // 2] of other tokens for seq2seq. Raises `ValueError` for a family that has no small models.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(SPECIAL_TOKENS), VOCABULARY, (batch, tokens), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    labels = _row(family).labels
    if labels == "tokens":
        return {**inputs, "labels": ids.clone()}
    if labels == "sequence":
        return {**inputs, "labels": torch.randint(0, 2, (batch,), generator=generator)}
    target = torch.randint(len(SPECIAL_TOKENS), VOCABULARY, (batch, tokens // 2), generator=generator)
    return {**inputs, "labels": target}


def _row(family: str) -> families.TinyModel:
    """Return how to make a family's small model. Raises `ValueError` if unknown."""
    row = families.FAMILIES.get(family)
    if row is None or row.tiny is None:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, but is {family!r} instead.")
    return row.tiny


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are the 256 bytes, after the special tokens. It needs no file and no training."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    roles = [f"{role}_token" for role in ("pad", "eos", "bos", "unk", "mask", "cls", "sep")]
    special = dict(zip(roles, SPECIAL_TOKENS, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **special)
