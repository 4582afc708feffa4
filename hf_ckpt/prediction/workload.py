"""Creates the model of a `Workload`: a skeleton to trace, or a real one to time."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import nn

from hf_ckpt import compat
from hf_ckpt.compat.peft import add_lora, like_bitsandbytes
from hf_ckpt.errors import HfCkptError, reason_of
from hf_ckpt.forecast.devices import Device
from hf_ckpt.models.families import learned_positions
from hf_ckpt.prediction.presets import no_model, presets
from hf_ckpt.prediction.quantised import QuantisedLinear, prepare_for_kbit_training, quantise
from hf_ckpt.prediction.question import DTYPE_NAMES, Workload
from hf_ckpt.prediction.skeleton import Skeleton, skeleton_from_config
from hf_ckpt.spec.files import read_values

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
"""Names of the types that weights and autocast may have."""
Trained = TypeVar("Trained", bound=Workload)


def on_device(workload: Trained, device: Device) -> Trained:
    """The workload as it is trained on a device: without bfloat16 support, float16 replaces it.

    Autocast then computes in float16, for which Trainer scales the loss. Trainable weights are in float32, because
    float16 gradients cannot be unscaled.
    """
    if device.bfloat16 or "bfloat16" not in (workload.dtype, workload.autocast_name):
        return workload
    dtype = workload.dtype
    if dtype == "bfloat16":
        dtype = "float32" if workload.lora is None else "float16"
    autocast = "none" if workload.autocast == "none" else "float16"
    return dataclasses.replace(workload, dtype=dtype, autocast=autocast)


def load_config(name: str) -> Any:
    """The config of a preset, a folder, a hub id, a `config.json`, a GGUF file, or a folder with GGUF files only.

    Raises `HfCkptError` if none can be read, and `MissingDependencyError` for GGUF files without the package gguf.
    """
    path = presets().get(name, Path(name))
    try:
        if (gguf := _gguf_file(path)) is not None:
            return copy.deepcopy(_gguf_config(gguf, gguf.stat().st_mtime))
        if path.exists() and not path.is_dir():
            keys = read_values(path)
            if not isinstance(keys, dict):
                raise ValueError(f"it is no mapping of keys, but {type(keys).__name__}")
            if not isinstance(keys.get("model_type"), str):
                raise ValueError("it names no `model_type`")
            return transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
        return transformers.AutoConfig.from_pretrained(name)
    except HfCkptError:
        raise
    except Exception as error:  # configs validate themselves, with errors of all kinds
        raise no_model(name, error) from error


@functools.lru_cache(maxsize=4)
def _gguf_config(path: Path, changed: float) -> Any:
    """The config in a GGUF file. Its list of tokens takes seconds to read; `changed`, its mtime, is a cache key."""
    return compat.gguf_config(path)


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names, or the first one in a folder without a `config.json`; else None."""
    if path.is_dir() and not (path / "config.json").exists():
        return min(path.glob("*.gguf"), default=None)
    return path if path.suffix == ".gguf" and path.is_file() else None


def skeleton_of_workload(workload: Workload, config: Any = None, *, on_cpu: bool = False) -> Skeleton:
    """The skeleton of the model that `workload` names, with its adapters.

    Args:
        workload: what is trained.
        config: of the model, instead of the one that the workload names.
        on_cpu: whether it is trained on a CPU.

    Raises `HfCkptError` if there is no such config or class, or if sequences exceed the model's positions.
    """
    config = load_config(workload.model) if config is None else config
    _refuse_too_long(config, workload)
    return skeleton_from_config(
        config, _maker(config, workload), functools.partial(_prepared, workload=workload, on_cpu=on_cpu)
    )


def real_model(workload: Workload) -> nn.Module:
    """The model that `workload` names, with random weights and its adapters.

    Raises `HfCkptError` like `skeleton_of_workload`, and for a quantised base.
    """
    config = load_config(workload.model)
    _refuse_too_long(config, workload)
    if workload.bits is not None:
        raise HfCkptError(f"weights without values cannot be timed, and a base in {workload.bits} bits has no others.")
    return _prepared(_maker(config, workload)(config), workload)


def _prepared(model: nn.Module, workload: Workload, *, on_cpu: bool = False) -> nn.Module:
    """Quantise the base of a model and add adapters, as the workload says."""
    if workload.lora is None:
        return model
    if workload.bits is not None:
        quantise(model, workload.bits, DTYPES[workload.dtype], double=workload.double_quant, on_cpu=on_cpu)
        if workload.prepared:
            prepare_for_kbit_training(model)
    dropout = 0.0 if workload.trainer == "dpo" else workload.lora_dropout
    model = add_lora(model, rank=workload.lora, targets=workload.lora_targets, lora_dropout=dropout)
    if workload.bits is not None:
        like_bitsandbytes(model, lambda layer: isinstance(layer, QuantisedLinear), copies=workload.bits == 4)
        if workload.trainer is not None:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16) if parameter.requires_grad else parameter.data
    return model


def _maker(config: Any, workload: Workload) -> Callable[[Any], nn.Module]:
    """A function that creates a model of the workload's class from a config."""
    names = [workload.architecture] if workload.architecture else getattr(config, "architectures", None)
    names = names if isinstance(names, (list, tuple)) else ()
    classes = [getattr(transformers, name, None) for name in names if isinstance(name, str)]
    model_class = next((found for found in classes if hasattr(found, "_from_config")), None)
    if workload.architecture and model_class is None:
        raise HfCkptError(f"transformers has no model class {workload.architecture!r}.")
    return functools.partial(_make, model_class or transformers.AutoModelForCausalLM, workload)


def _make(model_class: Any, workload: Workload, config: Any) -> nn.Module:
    # Under FSDP2, unsharded weights have their compute type.
    dtype = DTYPES[(workload.autocast_name if workload.sharded else None) or workload.dtype]
    attention = "sdpa" if workload.attention.startswith("flash_attention") else workload.attention  # as much is saved
    build = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    try:
        try:
            model: nn.Module = build(copy.deepcopy(config), dtype=dtype, attn_implementation=attention)
        except ValueError as error:
            if attention != "sdpa" or "attention" not in str(error):
                raise
            model = build(copy.deepcopy(config), dtype=dtype)  # T5 has only its own attention before transformers 5
    except Exception as error:  # models do not validate configs: any error may follow
        if compat.is_out_of_memory(error):
            raise
        made_as = f" as {workload.architecture}" if workload.architecture else ""
        raise HfCkptError(f"{workload.model} cannot be made{made_as} from its config: {reason_of(error)}.") from error
    return model


def _refuse_too_long(config: Any, workload: Workload) -> None:
    most = learned_positions(config)
    if most is not None and workload.tokens > most:
        raise HfCkptError(f"{workload.model} has positions for {most} tokens, but {workload.tokens} are asked for.")
