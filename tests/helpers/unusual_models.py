"""Small models outside the four families that people fine-tune: vision-language, experts, BART; and their batches.

They are large enough for budgets: saved tensors are a third of the peak or more, and a step takes about 0.2 s.
"""

from __future__ import annotations

import torch
import transformers

LAYERS, HIDDEN, HEADS, VOCABULARY = 6, 64, 4, 320
BATCH, TOKENS = 4, 128
IMAGE_SIZE, PATCH = 64, 8
SIDE = IMAGE_SIZE // PATCH
IMAGE_TOKEN = 300

_SIZES = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN}
_HEADS = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2, "head_dim": HIDDEN // HEADS}
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_TEXT = {**_SIZES, **_HEADS, **_TOKENS, "num_hidden_layers": LAYERS, "max_position_embeddings": 512}
_TOWER = {**_SIZES, "image_size": IMAGE_SIZE, "patch_size": PATCH, "num_hidden_layers": 4, "num_attention_heads": HEADS}
_LAYER_TYPES = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]
_ROPES = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
_QWEN_TOWER = {**_SIZES, "depth": 4, "num_heads": HEADS, "patch_size": PATCH, "out_hidden_size": HIDDEN}
_QWEN_TOWER |= {"num_position_embeddings": SIDE**2, "deepstack_visual_indexes": [1, 2]}
_BART = {"d_model": HIDDEN, "max_position_embeddings": 512, "decoder_start_token_id": 1}
for _key, _size in (("layers", 4), ("attention_heads", HEADS), ("ffn_dim", 2 * HIDDEN)):
    _BART |= {f"encoder_{_key}": _size, f"decoder_{_key}": _size}
_CONFIGS = {
    "gemma3": {
        "text_config": {**_TEXT, "layer_types": _LAYER_TYPES, "sliding_window": 64},
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 16,
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": IMAGE_TOKEN + 1,
        "eoi_token_index": IMAGE_TOKEN + 2,
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "projection_dim": HIDDEN},
        "image_token_index": IMAGE_TOKEN,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": _ROPES, "rope_scaling": _ROPES},
        "vision_config": _QWEN_TOWER,
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": IMAGE_TOKEN + 1,
        "vision_start_token_id": IMAGE_TOKEN + 2,
        "vision_end_token_id": IMAGE_TOKEN + 3,
    },
    "mixtral": {**_TEXT, "num_experts_per_tok": 2, "output_router_logits": True, "num_local_experts": 4},
    "bart": {**_BART, "vocab_size": VOCABULARY, "pad_token_id": 0},
}
IMAGE_TOKENS = {"gemma3": 16, "llava": SIDE**2, "qwen3_vl": SIDE**2 // 4}
"""Tokens that stand for one image; every sequence has one image."""
MODELS = tuple(_CONFIGS)


def unusual_model(name):
    """The model of this name in train mode and float32, the same each time."""
    config = transformers.AutoConfig.for_model(name, **_CONFIGS[name])
    for each in (config, *(part for part in vars(config).values() if isinstance(part, transformers.PretrainedConfig))):
        if hasattr(each, "use_cache"):
            each.use_cache = False
    config._attn_implementation = "sdpa"
    kinds = {"bart": "Seq2SeqLM", **dict.fromkeys(IMAGE_TOKENS, "ImageTextToText")}
    torch.manual_seed(0)
    mapping = getattr(transformers, f"AutoModelFor{kinds.get(name, 'CausalLM')}")
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
    if name == "gemma3":
        found["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    if name == "qwen3_vl":
        ids[:, 3] = IMAGE_TOKEN + 2
        found["image_grid_thw"] = torch.tensor([[1, SIDE, SIDE]] * batch)
        found["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
        images = torch.randn(batch * SIDE**2, 3 * 2 * PATCH * PATCH, generator=generator)
    found["pixel_values"] = images
    return found
