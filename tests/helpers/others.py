"""Small random models of other families than the four that `models.tiny` makes."""

import torch
import transformers

from helpers.tables import table

_TABLE = table(__file__, "models.yaml")
OTHERS = _TABLE["others"]
"""Class -> sizes in its config, except the number of layers; for models that take text, or images."""
_SIZES = OTHERS | _TABLE["speech"]


def other_model(name, *, layers=2, dropout=None, attention=None, dtype=torch.float32, **keys):
    """A model of this class in train mode, the same each time; `dropout=None` keeps the config's dropout."""
    model_class = getattr(transformers, name)
    depth = ("encoder_layers", "decoder_layers") if "d_model" in _SIZES[name] else ("num_hidden_layers",)
    config = model_class.config_class(**{**_SIZES[name], **dict.fromkeys(depth, layers), **keys})
    if dropout is not None:
        for key, value in config.to_dict().items():
            if key.endswith(("dropout", "dropout_prob")) and isinstance(value, float):
                setattr(config, key, dropout)
    if attention is not None:
        config._attn_implementation = attention
    torch.manual_seed(0)
    return model_class(config).to(dtype).train()
