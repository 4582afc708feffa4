"""Small models outside the four families that people fine-tune: vision-language, experts, BART; and their batches.

They are large enough for budgets: saved tensors are a third of the peak or more, and a step takes about 0.2 s.
"""

from __future__ import annotations

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS, HIDDEN, HEADS, VOCABULARY = 6, 64, 4, 320
BATCH, TOKENS = 4, 128
IMAGE_SIZE, PATCH = 64, 8
PATCHES = (IMAGE_SIZE // PATCH) ** 2
IMAGE_TOKEN = 300

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_TOWER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH,
}
_EXPERTS = {**_TEXT, "num_experts_per_tok": 2, "output_router_logits": True}


def _config(model_type, **keys):
    return CONFIG_MAPPING[model_type](**keys)


def _gemma3():
    text = {**_TEXT, "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"], "sliding_window": 64}
    return _config(
        "gemma3",
        text_config=text,
        vision_config={**_TOWER, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=16,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=IMAGE_TOKEN + 1,
        eoi_token_index=IMAGE_TOKEN + 2,
    )


def _llava():
    tower = {**_TOWER, "model_type": "clip_vision_model", "projection_dim": HIDDEN}
    return _config(
        "llava", text_config={**_TEXT, "model_type": "llama"}, vision_config=tower, image_token_index=IMAGE_TOKEN
    )


def _paligemma():
    return _config(
        "paligemma",
        text_config={**_TEXT, "model_type": "gemma"},
        vision_config={**_TOWER, "model_type": "siglip_vision_model", "projection_dim": HIDDEN},
        image_token_index=IMAGE_TOKEN,
        projection_dim=HIDDEN,
    )


def _idefics3():
    return _config(
        "idefics3",
        text_config={**_TEXT, "model_type": "llama"},
        vision_config=_TOWER,
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
    )


def _qwen3_vl():
    tower = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "depth": 4,
        "num_heads": HEADS,
        "patch_size": PATCH,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": PATCHES,
        "deepstack_visual_indexes": [1, 2],
    }
    ropes = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
    return _config(
        "qwen3_vl",
        text_config={**_TEXT, "rope_parameters": ropes, "rope_scaling": ropes},
        vision_config=tower,
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN + 1,
        vision_start_token_id=IMAGE_TOKEN + 2,
        vision_end_token_id=IMAGE_TOKEN + 3,
    )


def _bart():
    return _config(
        "bart",
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * HIDDEN,
        decoder_ffn_dim=2 * HIDDEN,
        max_position_embeddings=512,
        pad_token_id=0,
        decoder_start_token_id=1,
    )


_CONFIGS = {
    "gemma3": _gemma3,
    "llava": _llava,
    "paligemma": _paligemma,
    "idefics3": _idefics3,
    "qwen3_vl": _qwen3_vl,
    "jetmoe": lambda: _config("jetmoe", **_EXPERTS, kv_channels=16, num_local_experts=4),
    "mixtral": lambda: _config("mixtral", **_EXPERTS, num_local_experts=4),
    "qwen3_moe": lambda: _config("qwen3_moe", **_EXPERTS, num_experts=4, moe_intermediate_size=HIDDEN),
    "bart": _bart,
}
IMAGE_TOKENS = {
    "gemma3": 16,
    "llava": PATCHES,
    "paligemma": PATCHES,
    "idefics3": PATCHES // 4,
    "qwen3_vl": PATCHES // 4,
}
"""Tokens that stand for one image; every sequence has one image."""
MODELS = tuple(_CONFIGS)


def unusual_model(name):
    """The model of this name in train mode and float32, the same each time."""
    config = _CONFIGS[name]()
    for each in (config, *(part for part in vars(config).values() if isinstance(part, transformers.PretrainedConfig))):
        if hasattr(each, "use_cache"):
            each.use_cache = False
    config._attn_implementation = "sdpa"
    mapping = transformers.AutoModelForImageTextToText if name in IMAGE_TOKENS else transformers.AutoModelForCausalLM
    mapping = transformers.AutoModelForSeq2SeqLM if name == "bart" else mapping
    torch.manual_seed(0)
    return mapping.from_config(config).float().train()


def unusual_batch(name, seed=0, batch=BATCH, tokens=TOKENS):
    """A batch with labels, and with one image per sequence if the model takes images."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 290, (batch, tokens), generator=generator)
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    if name not in IMAGE_TOKENS:
        return found
    ids[:, 4 : 4 + IMAGE_TOKENS[name]] = IMAGE_TOKEN
    found["labels"] = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    images = torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    if name in ("gemma3", "paligemma"):
        found["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    if name == "qwen3_vl":
        ids[:, 3] = IMAGE_TOKEN + 2
        side = IMAGE_SIZE // PATCH
        found["image_grid_thw"] = torch.tensor([[1, side, side]] * batch)
        found["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
        images = torch.randn(batch * PATCHES, 3 * 2 * PATCH * PATCH, generator=generator)
    found["pixel_values"] = images[:, None] if name == "idefics3" else images
    return found
