"""Small models outside the four families that people fine-tune: vision-language, experts, BART; and their batches.

They are large enough for budgets: saved tensors are a third of the peak or more, and a step takes about 0.2 s.
"""

import torch
import transformers

from helpers.tables import table

BATCH, TOKENS = 4, 128
_MODELS = table(__file__, "models.yaml")["unusual"]
MODELS = tuple(_MODELS)
IMAGE_SIZE, PATCH = 64, 8
SIDE = IMAGE_SIZE // PATCH
IMAGE_TOKEN = 300
IMAGE_TOKENS = {"gemma3": 16, "llava": SIDE**2, "qwen3_vl": SIDE**2 // 4}
"""Tokens that stand for one image; every sequence has one image."""


def unusual_model(name):
    """The model of this name in train mode and float32, the same each time."""
    config = transformers.AutoConfig.for_model(name, **_MODELS[name])
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
