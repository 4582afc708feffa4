"""Small random models, a byte tokenizer and batches of every family, for where no weights are at hand."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 320  # 256 bytes, the special tokens, rounded up
SPECIAL_TOKENS = ("<pad>", "</s>", "<s>", "<unk>", "<mask>", "<cls>", "<sep>")


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
    """A random model in train mode: causal LM for `llama` and `gpt2`, classifier for `bert`, seq2seq for `t5`.

    Args:
        family: `llama`, `gpt2`, `bert` or `t5`.
        layers: blocks in each stack.
        hidden: hidden size, a multiple of 8.
        dropout: every dropout probability the family has.
        attention: `eager` or `sdpa` (or any implementation transformers knows).
        dtype: of the parameters.
        seed: of the initialisation.
        overrides: further keys of the family's config.

    Raises `ValueError` for an unknown family.
    """
    if family not in _CONFIGS:
        raise ValueError(f"family must be one of {', '.join(_CONFIGS)}, but is {family!r} instead.")
    config_class, model_class, keys = _CONFIGS[family]
    values = (
        keys(layers, hidden, dropout) | {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1} | overrides
    )
    config = config_class(**values)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model: transformers.PreTrainedModel = model_class(config).to(dtype)
    if model.loss_type is None:  # GPT-2: transformers cannot read it off the class name, and warns in every run
        model.loss_type = "ForCausalLM"
    return model.train()


def tiny_batch(family: str, *, batch: int = 2, tokens: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random inputs: `input_ids` and `attention_mask` [batch, tokens], and labels as the family's task has them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(SPECIAL_TOKENS), VOCABULARY, (batch, tokens), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family == "bert":
        return {**inputs, "labels": torch.randint(0, 2, (batch,), generator=generator)}
    if family == "t5":
        labels = torch.randint(len(SPECIAL_TOKENS), VOCABULARY, (batch, tokens // 2), generator=generator)
        return {**inputs, "labels": labels}
    return {**inputs, "labels": ids.clone()}


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes: 256 of them behind the special ones. Needs no file and no training."""
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
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        mask_token="<mask>",
        cls_token="<cls>",
        sep_token="<sep>",
        model_max_length=512,
    )


def _llama(layers: int, hidden: int, dropout: float) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_dropout": dropout,
        "max_position_embeddings": 512,
        "bos_token_id": 2,
    }


def _gpt2(layers: int, hidden: int, dropout: float) -> dict[str, Any]:
    return {
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": 4,
        "n_positions": 512,
        "attn_pdrop": dropout,
        "embd_pdrop": dropout,
        "resid_pdrop": dropout,
        "bos_token_id": 2,
    }


def _bert(layers: int, hidden: int, dropout: float) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "attention_probs_dropout_prob": dropout,
        "hidden_dropout_prob": dropout,
        "bos_token_id": 2,
        "num_labels": 2,
    }


def _t5(layers: int, hidden: int, dropout: float) -> dict[str, Any]:
    return {
        "d_model": hidden,
        "d_ff": 2 * hidden,
        "d_kv": hidden // 4,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": 4,
        "dropout_rate": dropout,
        "bos_token_id": 2,
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": 0,
    }


_CONFIGS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, _llama),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, _gpt2),
    "bert": (transformers.BertConfig, transformers.BertForSequenceClassification, _bert),
    "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration, _t5),
}
FAMILIES = tuple(_CONFIGS)
