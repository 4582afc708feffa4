"""A small random model and a batch for any transformers model type, made from its default config.

Widths are divided by one factor, so that sizes still divide and add up; depth, vocabulary, images, audio and the
number of experts are cut.
"""

from __future__ import annotations

import inspect
import itertools
import re

import torch
import transformers
from torch.utils._pytree import tree_leaves
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_ckpt import compat

DEPTH, VOCABULARY, BATCH, TOKENS = 4, 512, 2, 16
MOST_PARAMETERS = 60_000_000
"""Larger models try the next factor; a model that is too large for all factors is left out."""
FACTORS = (8, 4, 2, 1, 16, 32)
"""Widths are divided by the first factor with which the model trains."""
_TASKS = (
    *("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "SPEECH_SEQ_2_SEQ", "CTC"),
    *("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION"),
    *("MULTIMODAL_LM", "PRETRAINING", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "SEMANTIC_SEGMENTATION"),
    *("DEPTH_ESTIMATION", "TIME_SERIES_PREDICTION", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "RETRIEVAL"),
)
_DEPTHS = re.compile(
    r"(^|_)(n|num)_(\w+_)?(layers?|blocks)$|^(\w+_)?(layers|depth)$|^n_layers?$|^num_layers_per_stack$"
)
_NO_DEPTHS = re.compile(
    r"conv|fc|mlp|cross_attention|hidden_states|adapter|postnet|predictor|upsample|dense|feat_extract"
)
_WIDTHS = re.compile(
    r"(hidden|intermediate|embedding|embed|inner|projection|ffn?|input|output|condition|mlp|expand|proj)_?(size|sizes|dim|dims)$"
    r"|_(dim|dims|rank|width)$|^(dim|dims|width|d_model|d_kv|d_ff|d_inner|n_embd|n_inner|rotary_dim)$|_channels$"
    r"|^mrope_section$|_model$|_embed$|(^|_)d_head$|headdim$|^(attention|linear)_\w*_dim$"
)
_NO_WIDTHS = re.compile(r"^(num|in|audio)_channels$|patch|image|vocab|^codebook|output_dim$|state_dim|label")
_OF_DEFAULTS = ("model_type", "transformers_version", "out_features", "out_indices", "stage_names", "_name_or_path")
"""Keys that are derived from others or cannot be passed."""
_MISSING = {"diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}}
"""Keys missing in the default config of a type."""
_CAPS = {
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "n_group"), 2),
    **dict.fromkeys(("topk_group", "num_nextn_predict_layers", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx"), 512),
    **dict.fromkeys(("max_source_positions",), 50),
    **dict.fromkeys(("num_queries", "num_query_tokens"), 16),
}


def types():
    """Every model type of transformers, in order."""
    return list(CONFIG_MAPPING_NAMES)


def classes(model_type):
    """The model classes that Auto classes create for a type; classes that compute a loss come first."""
    mappings = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in _TASKS]
    mappings += ["MODEL_FOR_PRETRAINING_MAPPING_NAMES", "MODEL_MAPPING_NAMES"]
    every = sorted(name for name in dir(modeling_auto) if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES"))
    found = []
    for name in dict.fromkeys((*mappings, *every)):
        names = getattr(modeling_auto, name, {}).get(model_type, ())
        found += [names] if isinstance(names, str) else names
    return list(dict.fromkeys(found))


def small_config(model_type, factor):
    """The type's default config with small sizes; see `shrunk`."""
    default = transformers.CONFIG_MAPPING[model_type]()
    return type(default)(**shrunk(default.to_dict(), factor))


def shrunk(keys, factor, ids=None):
    """The keys of a config with widths divided by `factor`, and with depth and other sizes cut.

    Lists with an entry per layer are cut with the depth. Ids of special tokens move into the vocabulary; a name gets
    the same id in all parts of the model (`ids`).
    """
    ids = {} if ids is None else ids
    keys = {**keys, **_MISSING.get(keys.get("model_type"), {})}
    deep = {value for key, value in keys.items() if _is_depth(key, value)}
    made = {}
    for key, value in keys.items():
        if key in _OF_DEFAULTS or (str(key).isdigit() and int(key) >= DEPTH and isinstance(value, dict)):
            continue
        if isinstance(value, dict):
            value = shrunk(value, factor, ids) if key != "id2label" and key != "label2id" else value
        elif _is_depth(key, value):
            value = min(value, DEPTH)
        elif isinstance(value, (list, tuple)) and value and all(isinstance(item, dict) for item in value):
            value = [shrunk(item, factor, ids) for item in value]
        elif isinstance(value, (list, tuple)) and len(value) in deep and len(value) > DEPTH:
            value = list(value[:DEPTH])
        else:
            value = _shrunk(key, value, factor, ids)
        made[key] = value
    if isinstance(made.get("patch_size"), int) and isinstance(made.get("image_size"), int):
        made["image_size"] = min(made["image_size"], 4 * made["patch_size"])
    hidden, heads = made.get("hidden_size"), made.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and hidden % heads and "head_dim" not in made:
        made["num_attention_heads"] = 4
    for key in ("decoder_start_token_id", "pad_token_id") if made.get("is_encoder_decoder") else ():
        made[key] = 0 if made.get(key) is None else made[key]
    return made


def _is_depth(key, value):
    key = str(key)
    counts = isinstance(value, int) and not isinstance(value, bool) and value > 1
    return counts and bool(_DEPTHS.search(key)) and not _NO_DEPTHS.search(key)


def _shrunk(key, value, factor, ids):
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return _shrunk_number(key, value, factor, ids)
    if isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
        if key == "depths":
            return [min(item, 2) for item in value]
        if key == "mrope_section" or (_WIDTHS.search(key) and not _NO_WIDTHS.search(key)):
            return [_divided(item, factor, 8) for item in value]
        if key.endswith("_layers") and value:  # indices of layers
            return [item for item in value if item < DEPTH] or [1]
    return value


def _shrunk_number(key, value, factor, ids):
    if key in _CAPS:
        return min(value, _CAPS[key])
    if "vocab_size" in key:
        return min(value, VOCABULARY)
    if key.endswith(("token_id", "token_index", "_id")) and value >= VOCABULARY:
        return ids.setdefault(key.replace("_index", "_id"), VOCABULARY - 1 - len(ids))
    if "experts" in key and value > 8:
        return 8
    return _divided(value, factor, 32) if _WIDTHS.search(key) and not _NO_WIDTHS.search(key) else value


def _divided(value, factor, least):
    return value // factor if value >= least and value % factor == 0 else value


def small_model(name, config):
    """A model of the class `name` in train mode, the same each time; `ValueError` if it is too large."""
    model_class = getattr(transformers, name)
    with torch.device("meta"), compat.transformers.uninitialised():
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters are more than {MOST_PARAMETERS}")
    torch.manual_seed(0)
    model = model_class(config).float().train()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # gradients would not pass through zeros
        if parameter.requires_grad and parameter.is_floating_point() and not bool(parameter.any()):
            parameter.data.normal_(0.0, 0.02, generator=generator)
    return model


# --- batches --------------------------------------------------------------------------------------------------------


def batches(model):
    """Yield batches that the model may accept, the likeliest first: with labels, then with additional inputs."""
    parameters = inspect.signature(model.forward).parameters
    makers = _makers(model.config)
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    first = dict.fromkeys([model.main_input_name, *required])
    more = [name for name in ("pixel_values", "decoder_input_ids", "input_features", "bbox") if name not in first]
    for labels, extra in itertools.product((True, False), ((), *((name,) for name in more))):
        wanted = [name for name in (*first, *extra) if name in makers and (name in parameters or name in first)]
        if any(name not in parameters for name in extra) or not wanted:
            continue
        found = {name: makers[name]() for name in wanted}
        if labels and "labels" not in parameters:
            continue
        yield from _with_labels(model, found) if labels else [found]


def _with_labels(model, found):
    """Add labels in the shapes that losses expect: one per token, then one per sequence."""
    generator = torch.Generator().manual_seed(2)
    ids = found.get("decoder_input_ids", found.get("input_ids"))
    most = getattr(model.config, "num_labels", 2) or 2
    each_token = torch.randint(3, 100, (BATCH, TOKENS), generator=generator) if ids is None else ids.clone()
    if "Classification" not in type(model).__name__:
        yield {**found, "labels": each_token}
    yield {**found, "labels": torch.randint(0, most, (BATCH,), generator=generator)}


def _makers(config):
    """Name of an input -> function that creates it."""
    generator = torch.Generator().manual_seed(1)
    try:
        text = config.get_text_config()
    except ValueError:  # there are several text configs
        text = config.decoder
    vocabulary = min(_known(config, "vocab_size", VOCABULARY), _known(text, "vocab_size", VOCABULARY), VOCABULARY) // 2
    channels, size = _known(config, "num_channels", 3), _known(config, "image_size", 32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    mels = _known(config, "num_mel_bins", _known(config, "feature_size", 80))
    frames = _known(config, "num_frames", 4)
    films = (frames,) if hasattr(config, "num_frames") or hasattr(config, "tubelet_size") else ()
    width_of_frames = 2 * _known(config, "max_source_positions", 50)

    def ids():
        return torch.randint(10, max(vocabulary, 20), (BATCH, TOKENS), generator=generator)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "attention_mask": lambda: torch.ones(BATCH, TOKENS, dtype=torch.long),
        "bbox": lambda: torch.arange(4).mul(20).expand(BATCH, TOKENS, 4).contiguous(),
        "pixel_values": lambda: normal(BATCH, *films, channels, height, width),
        "pixel_values_videos": lambda: normal(BATCH, frames, channels, height, width),
        "input_features": lambda: normal(BATCH, mels, width_of_frames),
        "input_values": lambda: normal(BATCH, 16000),
        "inputs_embeds": lambda: normal(BATCH, TOKENS, _known(text, "hidden_size", 64)),
        "hidden_states": lambda: normal(BATCH, TOKENS, _known(text, "hidden_size", 64)),
        "past_values": lambda: normal(
            BATCH, _known(config, "context_length", 16), _known(config, "num_input_channels", 1)
        ),
        "inputs": ids,
    }


def _known(config, name, otherwise):
    """The value in a config, or in one of its sub-configs."""
    parts = (part for part in vars(config).values() if isinstance(part, transformers.PretrainedConfig))
    found = (getattr(part, name, None) for part in (config, *parts))
    return next((value for value in found if value is not None), otherwise)


def loss_of(outputs):
    """The model's own loss, or the sum of the mean squares of its outputs."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss.squeeze()
    values = outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
    found = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not found:
        raise ValueError("nothing that the model returns has a gradient")
    return torch.stack([each.abs().float().square().mean() for each in found]).sum()
