"""Describes a training before it exists (`Workload`), and makes its model: a skeleton to trace, a real one to time."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from hf_ckpt import compat
from hf_ckpt.compat.peft import add_lora
from hf_ckpt.errors import HfCkptError, reason_of, shown
from hf_ckpt.models.families import learned_positions
from hf_ckpt.prediction.choices import DTYPE_NAMES, MOST_TOKENS
from hf_ckpt.prediction.skeleton import Skeleton, at_depth, skeleton_from_config
from hf_ckpt.spec.files import read_values

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
"""Names of the types that weights and autocast may have."""
_PACKAGE = Path(__file__).parent.parent
_PRESETS = (_PACKAGE / "presets", _PACKAGE.parent / "configs" / "models")
"""Where the configs of presets lie: inside an installed package, or beside the package in a checkout."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained: a model, its batch, adapters, types and optimizer.

    Raises `HfCkptError` for a number below 1, for a type that is not in `DTYPES`, and for more than `MOST_TOKENS` in a
    micro-step.
    """

    model: str
    """A preset, the folder or the hub id of a model, or the path of a `config.json`."""
    batch: int = 1
    """Sequences of one micro-step."""
    tokens: int = 512
    """Tokens of each sequence."""
    target_tokens: int | None = None
    """Tokens of each sequence in the decoder of an encoder-decoder model; as many as `tokens` unless given."""
    lora: int | None = None
    """Rank of the LoRA adapters on every linear layer, which alone are trained; None trains every weight."""
    dtype: str = "bfloat16"
    """Type of the weights: a name in `DTYPES`."""
    autocast: str | None = None
    """Type that autocast computes in: a name in `DTYPES`; None trains without autocast."""
    optimizer: str = "adamw"
    """Its name, one of `optimizer_names.NAMES`."""
    accumulation: int = 1
    """Micro-steps of one optimizer step."""
    attention: str = "sdpa"
    """As transformers' `attn_implementation`."""
    padded: bool = False
    """Whether sequences are padded, so that attention runs with a mask."""
    architecture: str | None = None
    """Class of the model, as `BertForSequenceClassification`, in place of the one that its config names."""

    def __post_init__(self) -> None:
        for name, value in (("dtype", self.dtype), ("autocast", self.autocast)):
            if value is not None and value not in DTYPES:
                raise HfCkptError(f"{name} must be one of {', '.join(DTYPES)}, but is {value!r} instead.")
        for name in ("batch", "tokens", "accumulation", "target_tokens", "lora"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise HfCkptError(f"{name} must be at least 1, but is {number} instead.")
        tokens = self.batch * max(self.tokens, self.target_tokens or 0)
        if tokens > MOST_TOKENS:
            raise HfCkptError(f"a micro-step may have {MOST_TOKENS} tokens at most, but has {tokens}.")


def presets() -> dict[str, Path]:
    """The models whose configs come with hf_ckpt: name -> path of the config."""
    folder = next((folder for folder in _PRESETS if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.json"))}


def load_config(name: str) -> Any:
    """The config of a preset, a folder, a hub id, or a `config.json`.

    Raises `HfCkptError` where none can be read.
    """
    path = presets().get(name, Path(name))
    try:
        if path.exists() and not path.is_dir():
            keys = read_values(path)
            if not isinstance(keys, dict):
                raise ValueError(f"it is no mapping of keys, but {type(keys).__name__}")
            if not isinstance(keys.get("model_type"), str):
                raise ValueError("it names no `model_type`")
            return transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
        return transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # configs check themselves, and raise errors of all kinds for values that do not fit
        raise HfCkptError(
            f"cannot read a model's config from {shown(name)}: {reason_of(error)}.\nGive a folder, a config.json, "
            f"a hub id, or one of {', '.join(presets())}."
        ) from error


def skeleton_of_workload(workload: Workload, config: Any = None) -> Skeleton:
    """The skeleton of the model that `workload` names, with its adapters.

    Args:
        workload: what is trained.
        config: of the model, in place of the one that the workload names.

    Raises `HfCkptError` where there is no such config or class, or the sequences are longer than the model's positions.
    """
    config = load_config(workload.model) if config is None else config
    _refuse_too_long(config, workload)
    return skeleton_from_config(config, _maker(config, workload), _adapter(workload))


def real_model(workload: Workload, depth: int | None = None) -> nn.Module:
    """The model that `workload` names, with random weights and with its adapters.

    Args:
        workload: what is trained.
        depth: most blocks in every stack; None for all of them.

    Raises `HfCkptError` as `skeleton_of_workload`.
    """
    config = load_config(workload.model)
    _refuse_too_long(config, workload)
    if depth is not None:
        config = at_depth(config, depth)
    model = _maker(config, workload)(config)
    adapt = _adapter(workload)
    return model if adapt is None else adapt(model)


def _adapter(workload: Workload) -> Callable[[nn.Module], nn.Module] | None:
    """What adds the workload's adapters to a model; None where it has none."""
    return None if workload.lora is None else functools.partial(add_lora, rank=workload.lora)


def _maker(config: Any, workload: Workload) -> Callable[[Any], nn.Module]:
    """What makes a model of the workload's class from a config."""
    names = [workload.architecture] if workload.architecture else getattr(config, "architectures", None)
    names = names if isinstance(names, (list, tuple)) else ()
    classes = [getattr(transformers, name, None) for name in names if isinstance(name, str)]
    model_class = next((found for found in classes if hasattr(found, "_from_config")), None)
    if workload.architecture and model_class is None:
        raise HfCkptError(f"transformers has no model class {workload.architecture!r}.")
    return functools.partial(_make, model_class or transformers.AutoModelForCausalLM, workload)


def _make(model_class: Any, workload: Workload, config: Any) -> nn.Module:
    dtype = DTYPES[workload.dtype]
    build = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    try:
        try:
            model: nn.Module = build(copy.deepcopy(config), dtype=dtype, attn_implementation=workload.attention)
        except ValueError as error:
            if workload.attention != "sdpa" or "attention" not in str(error):
                raise
            model = build(copy.deepcopy(config), dtype=dtype)  # T5 has only its own attention before transformers 5
    except Exception as error:  # models take values from configs unchecked: any error may come of them
        if compat.is_out_of_memory(error):
            raise
        made_as = f" as {workload.architecture}" if workload.architecture else ""
        raise HfCkptError(f"{workload.model} cannot be made{made_as} from its config: {reason_of(error)}.") from error
    return model


def _refuse_too_long(config: Any, workload: Workload) -> None:
    most = learned_positions(config)
    if most is not None and workload.tokens > most:
        raise HfCkptError(f"{workload.model} has positions for {most} tokens, but {workload.tokens} are asked for.")
