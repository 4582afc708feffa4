"""Small random models of every family, with batches and a tokenizer, for checks and tests without weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from hf_ckpt.models import families

VOCABULARY = 320
"""Entries of the vocabulary: 256 bytes and the special tokens, rounded up."""
TINY_FAMILIES = tuple(row.name for row in families.FAMILIES.values() if row.tiny is not None)
"""Names of the families that have small models."""
FIRST_TOKEN = 7
"""The least token in random batches. The special tokens come before it."""


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
    """
    tiny = families.FAMILIES[family].tiny
    assert tiny is not None
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "d_ff": 2 * hidden,  # T5
        "d_kv": hidden // 4,
        "num_decoder_layers": layers,
    }
    config_class = getattr(transformers, tiny.config)
    default = config_class()
    # A config stores what it has no key for, too, and `num_decoder_layers` would then count the blocks of LLaMA.
    sizes = {config_class.attribute_map.get(key, key): size for key, size in sizes.items() if hasattr(default, key)}
    dropouts = dict.fromkeys(tiny.dropouts, dropout)
    config = config_class(**{**tokens, **sizes, **dropouts, **tiny.keys, **overrides})
    config._attn_implementation = attention
    torch.manual_seed(seed)  # transformers initialises weights with the default generator only
    model: transformers.PreTrainedModel = getattr(transformers, tiny.model)(config).to(dtype)
    if model.loss_type is None:  # transformers cannot derive it from GPT-2's class name, and warns in every run
        model.loss_type = "ForCausalLM"
    return model.train()


def tiny_batch(family: str, *, batch: int = 2, tokens: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make random inputs for a small model: `input_ids` and `attention_mask` [batch, tokens], and `labels`.

    The labels are [batch, tokens] of the same tokens for a causal LM, [batch] classes for a classifier, and
    [batch, tokens // 2] of other tokens for seq2seq.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_TOKEN, VOCABULARY, (batch, tokens), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    tiny = families.FAMILIES[family].tiny
    if tiny is None or tiny.labels == "tokens":
        return {**inputs, "labels": ids.clone()}
    if tiny.labels == "sequence":
        return {**inputs, "labels": torch.randint(0, 2, (batch,), generator=generator)}
    target = torch.randint(FIRST_TOKEN, VOCABULARY, (batch, tokens // 2), generator=generator)
    return {**inputs, "labels": target}


def byte_tokenizer() -> transformers.PreTrainedTokenizer:
    """Make a tokenizer whose tokens are the 256 bytes, after `<pad>`, `</s>` and `<unk>`. It needs no file."""
    # Further tokens fill the vocabulary: a random model generates all of them, and each must have a text.
    return transformers.ByT5Tokenizer(extra_ids=VOCABULARY - 259, model_max_length=512)
