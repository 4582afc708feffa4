"""The families: one row of data for each group of models that share a structure.

A row lists the model types, where the stacks are, which config keys count the blocks, which small modules may be
recomputed as a whole, and how to make a small random model. No other file names a family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from hf_ckpt.errors import HfCkptError

Depths = Mapping[str, tuple[str, ...]]
"""Stack name -> the config keys that may hold the stack's number of blocks, in the order of lookup."""

_DEPTH_OF_ALL = ("num_hidden_layers", "num_layers", "n_layer")
GENERIC_DEPTHS: Depths = {
    "encoder": ("num_encoder_layers", "encoder_layers", *_DEPTH_OF_ALL),
    "decoder": ("num_decoder_layers", "decoder_layers", *_DEPTH_OF_ALL),
}
"""The usual keys. Stacks with other names use the keys of `_DEPTH_OF_ALL`."""


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """How to make a small random model of a family."""

    config: str
    """Name of its config class in transformers."""
    model: str
    """Name of its model class in transformers, which decides the task."""
    dropouts: tuple[str, ...] = ()
    """The config keys that hold a dropout probability."""
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further config keys, beside the sizes."""
    labels: str = "tokens"
    """What the labels are: `tokens` of the input, a class for each `sequence`, or the tokens of a `target` sequence."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A group of models that share a structure, and where their parts are.

        family = hf_ckpt.Family("opt", model_types=("opt",), stacks=(("decoder", "decoder.layers"),))
        hf_ckpt.register_family(family)

    Models without a family work, too. A family names the stacks.
    """

    name: str
    """Name of the family, as plans write it."""
    model_types: tuple[str, ...]
    """Values of `config.model_type` that belong to the family."""
    stacks: tuple[tuple[str, str], ...]
    """(stack name, ending of the qualified name of the list that holds its blocks), in the order the stacks run."""
    cheap: tuple[str, ...] = ()
    """Class names of small modules that `selective` may recompute as a whole, in addition to `CHEAP_EVERYWHERE` and to
    norms of transformers. They take one tensor and return one, draw no random numbers, and change nothing in place."""
    depths: Depths = dataclasses.field(default_factory=lambda: GENERIC_DEPTHS)
    """The config keys that hold the number of blocks of each stack; by default, the usual ones."""
    learned_positions: tuple[str, ...] = ()
    """The model types with learned position embeddings, so that `max_position_embeddings` limits a sequence."""
    tiny: TinyModel | None = None
    """How to make a small random model, for `hf-ckpt check` and for tests; None if unknown."""

    def name_stack(self, path: str, paths: Collection[str]) -> str:
        """Name the stack at a path, one of these. Without a name for it in the family, that is `encoder` or `decoder`
        if no other path has that word, else the path."""
        for stack, ending in self.stacks:
            if f".{path}".endswith(f".{ending}"):  # a head or an adapter puts its name in front of the path
                return stack
        for word in ("encoder", "decoder"):
            if word in path.split(".") and sum(word in other.split(".") for other in paths) == 1:
                return word
        return path or "blocks"


GENERIC = Family("generic", model_types=(), stacks=())
"""The family of models without a row."""
# Norms, and activations that consist of several operations; single operations have rows in `engines/rebuild/ops.py`.
CHEAP_EVERYWHERE = (
    "LayerNorm",
    "RMSNorm",
    "NewGELUActivation",
    "FastGELUActivation",
    "QuickGELUActivation",
    "AccurateGELUActivation",
    "ReLUSquaredActivation",
)
"""Class names of small modules that `selective` may recompute in models of every family; see `Family.cheap`."""

FAMILIES: dict[str, Family] = {}
"""Family name -> its row."""


def register_family(family: Family) -> None:
    """Add a family, or replace the one of the same name.

        family = hf_ckpt.Family("opt", model_types=("opt",), stacks=(("decoder", "decoder.layers"),))
        hf_ckpt.register_family(family)

    Raises `ValueError` if one of its model types belongs to another family.
    """
    for other in FAMILIES.values():
        taken = set(other.model_types) & set(family.model_types)
        if other.name != family.name and taken:
            raise ValueError(f"model types {sorted(taken)} already belong to the family {other.name!r}.")
    FAMILIES[family.name] = family


def family_of(config: Any) -> Family:
    """Return the row of a config, by its `model_type`; `GENERIC` for models of no known family."""
    model_type = str(getattr(config, "model_type", ""))  # code from the hub may have none
    return next((family for family in FAMILIES.values() if model_type in family.model_types), GENERIC)


def depth_keys(config: Any, stack: str) -> list[str]:
    """Return the keys of this config that hold the number of blocks of a stack.

    Properties are left out: the config computes them from other keys.
    """
    keys = family_of(config).depths.get(stack, _DEPTH_OF_ALL)
    stored = [key for key in keys if not isinstance(getattr(type(config), key, None), property)]
    return [key for key in stored if isinstance(getattr(config, key, None), int)]


def refuse_long(config: Any, tokens: int, name: str) -> None:
    """Raise `HfCkptError` if the model of this name has learned embeddings for fewer positions than `tokens`."""
    family = family_of(config)
    most = getattr(config, "max_position_embeddings", None) or tokens
    # Beyond these, the embedding has no row, and the run would end in an IndexError.
    if config.model_type in family.learned_positions and tokens > most:
        raise HfCkptError(f"{name} has positions for {most} tokens, but {tokens} are asked for.")


for _row in (
    Family(
        name="llama",
        model_types=("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"),
        stacks=(("decoder", "layers"),),
        tiny=TinyModel("LlamaConfig", "LlamaForCausalLM", ("attention_dropout",)),
    ),
    Family(
        name="gpt2",
        model_types=("gpt2", "gpt_neo", "gptj"),
        stacks=(("decoder", "h"),),
        learned_positions=("gpt2", "gpt_neo"),
        tiny=TinyModel("GPT2Config", "GPT2LMHeadModel", ("attn_pdrop", "embd_pdrop", "resid_pdrop")),
    ),
    Family(
        name="gpt_neox",
        model_types=("gpt_neox",),
        stacks=(("decoder", "layers"),),
    ),
    Family(
        name="bert",
        model_types=("bert", "roberta", "electra", "camembert", "xlm-roberta"),
        stacks=(("encoder", "encoder.layer"),),
        learned_positions=("bert", "roberta", "electra", "camembert", "xlm-roberta"),
        tiny=TinyModel(
            "BertConfig",
            "BertForSequenceClassification",
            ("attention_probs_dropout_prob", "hidden_dropout_prob"),
            {"num_labels": 2},
            labels="sequence",
        ),
    ),
    Family(
        name="t5",
        model_types=("t5", "mt5", "umt5", "longt5"),
        stacks=(("encoder", "encoder.block"), ("decoder", "decoder.block")),
        depths={"encoder": ("num_layers",), "decoder": ("num_decoder_layers",)},
        tiny=TinyModel(
            "T5Config",
            "T5ForConditionalGeneration",
            ("dropout_rate",),
            {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
            labels="target",
        ),
    ),
):
    register_family(_row)
