"""Small random models of other families than the four that `models.tiny` makes."""

from __future__ import annotations

import torch
import transformers

from hf_ckpt.models.tiny import VOCABULARY

_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
_GROUPED = {**_TOKENS, **_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_BART = {
    **_TOKENS,
    "d_model": 32,
    **{
        f"{side}_{what}": size
        for side in ("encoder", "decoder")
        for what, size in (("attention_heads", 4), ("ffn_dim", 64))
    },
}
OTHERS = {
    "OPTForCausalLM": {**_TOKENS, **_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "Qwen3ForCausalLM": _GROUPED,
    "Gemma2ForCausalLM": _GROUPED,
    "MistralForCausalLM": _GROUPED,
    "GraniteForCausalLM": _GROUPED,
    "Phi3ForCausalLM": {**_TOKENS, **_SIZES},
    "MixtralForCausalLM": {**_GROUPED, "num_local_experts": 4},
    "GPTNeoXForCausalLM": {**_TOKENS, **_SIZES},
    "FalconForCausalLM": {**_TOKENS, **_SIZES},
    "RobertaForMaskedLM": {**_TOKENS, **_SIZES},
    "BertForMaskedLM": {**_TOKENS, **_SIZES},
    "DebertaV2ForMaskedLM": {**_TOKENS, **_SIZES},
    "BartForConditionalGeneration": _BART,
    "ViTForImageClassification": {**_SIZES, "image_size": 16, "patch_size": 4},
}
"""Class -> sizes in its config, except the number of layers."""


def other_model(name, *, layers=2, dropout=None, attention=None, dtype=torch.float32, **keys):
    """A model of this class in train mode, the same each time; `dropout=None` keeps the config's dropout."""
    model_class = getattr(transformers, name)
    depth = ("encoder_layers", "decoder_layers") if "d_model" in OTHERS[name] else ("num_hidden_layers",)
    config = model_class.config_class(**{**OTHERS[name], **dict.fromkeys(depth, layers), **keys})
    if dropout is not None:
        for key, value in config.to_dict().items():
            if key.endswith(("dropout", "dropout_prob")) and isinstance(value, float):
                setattr(config, key, dropout)
    if attention is not None:
        config._attn_implementation = attention
    torch.manual_seed(0)
    return model_class(config).to(dtype).train()
