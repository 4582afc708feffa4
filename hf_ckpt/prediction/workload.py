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
from hf_ckpt.compat.peft import add_lora, like_bitsandbytes
from hf_ckpt.errors import HfCkptError, reason_of
from hf_ckpt.models.families import learned_positions
from hf_ckpt.prediction.choices import DTYPE_NAMES, GENERATORS, MOST_TOKENS, PARALLEL, REFERENCES, TRAINERS
from hf_ckpt.prediction.presets import no_model, presets
from hf_ckpt.prediction.quantised import QuantisedLinear, prepare_for_kbit_training, quantise
from hf_ckpt.prediction.skeleton import Skeleton, at_depth, skeleton_from_config
from hf_ckpt.spec.files import read_values

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
"""Names of the types that weights and autocast may have."""


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
    """Rank of LoRA adapters, which alone are trained; None trains every weight."""
    lora_targets: str | tuple[str, ...] = "all-linear"
    """Layers that get adapters, as `target_modules` of PEFT's `LoraConfig`: endings of names, a regular expression, or
    `all-linear`."""
    lora_dropout: float = 0.0
    """Dropout of what goes into the adapters."""
    load_in_4bit: bool = False
    """Whether linear layers have 4 bits, by bitsandbytes. They stay frozen, so that `lora` is needed."""
    load_in_8bit: bool = False
    """Whether linear layers have 8 bits, by bitsandbytes. They stay frozen, so that `lora` is needed."""
    double_quant: bool = True
    """Whether the scales of 4 bits are quantised, too: `bnb_4bit_use_double_quant`."""
    dtype: str = "bfloat16"
    """Type of the weights: a name in `DTYPES`."""
    autocast: str | None = None
    """Type that autocast computes in: a name in `DTYPES`, or `none`. None stands for what is usual: bfloat16 for a
    trainer of TRL and for a base in 4 or 8 bits, and no autocast for others."""
    optimizer: str = "adamw"
    """Its name, one of `optimizer_names.NAMES`."""
    accumulation: int = 1
    """Micro-steps of one optimizer step."""
    attention: str = "sdpa"
    """As transformers' `attn_implementation`."""
    padded: bool = False
    """Whether sequences are padded, so that attention runs with a mask."""
    trainer: str | None = None
    """The trainer of TRL that runs the step, a name in `TRAINERS`: `dpo` runs pairs, so that `batch` sequences become
    twice as many; None for transformers' own, with the model's own loss. On a base in 4 or 8 bits, TRL's trainers keep
    adapters in bfloat16; for others, the base is as PEFT's `prepare_model_for_kbit_training` leaves it."""
    reference: str | None = None
    """Where `dpo` takes its reference from, a name in `REFERENCES`; by default the policy without its adapters, or a
    second model where there are none."""
    generation: str | None = None
    """What writes the completions of `grpo`, a name in `GENERATORS`; transformers by default. It writes those of all
    micro-steps of a step at once."""
    packing: bool = False
    """Whether the micro-step is one row of `batch * tokens` tokens, in which sequences follow each other."""
    ranks: int = 1
    """Processes that train together, with a device each."""
    parallel: str = "ddp"
    """How these share the work, a name in `PARALLEL`."""
    architecture: str | None = None
    """Class of the model, as `BertForSequenceClassification`, in place of the one that its config names."""

    def __post_init__(self) -> None:
        chosen = (
            ("dtype", self.dtype, tuple(DTYPES)),
            ("autocast", self.autocast, (None, *DTYPES, "none")),
            ("trainer", self.trainer, (None, *TRAINERS)),
            ("reference", self.reference, (None, *REFERENCES)),
            ("generation", self.generation, (None, *GENERATORS)),
            ("parallel", self.parallel, PARALLEL),
        )
        for name, value, names in chosen:
            if value not in names:
                listed = ", ".join(known for known in names if known is not None)
                raise HfCkptError(f"{name} must be one of {listed}, but is {value!r} instead.")
        for name in ("batch", "tokens", "accumulation", "target_tokens", "lora", "ranks"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise HfCkptError(f"{name} must be at least 1, but is {number} instead.")
        if self.load_in_4bit and self.load_in_8bit:
            raise HfCkptError("load_in_4bit and load_in_8bit cannot both be set.")
        if self.bits is not None and self.lora is None:
            raise HfCkptError(f"a base in {self.bits} bits stays frozen: give the rank of adapters to train (lora).")
        if self.bits is not None and self.parallel == "fsdp2" and self.ranks > 1:
            raise HfCkptError("a base in 4 or 8 bits cannot be planned for under fsdp2. Use ddp, or 16 bits.")
        if self.reference is not None and self.trainer != "dpo":
            raise HfCkptError("a reference goes with the trainer dpo.")
        if self.generation is not None and self.trainer != "grpo":
            raise HfCkptError("generation goes with the trainer grpo.")
        if self.reference == "adapters-off" and self.lora is None:
            raise HfCkptError("the reference `adapters-off` needs adapters (lora).")
        tokens = self.rows * max(self.tokens, self.target_tokens or 0)
        if tokens > MOST_TOKENS:
            raise HfCkptError(f"a micro-step may have {MOST_TOKENS} tokens at most, but has {tokens}.")

    @property
    def bits(self) -> int | None:
        """4 or 8 for a base that bitsandbytes quantises; None for a base in its own type."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else None

    @property
    def autocast_name(self) -> str | None:
        """The type that autocast computes in, with the usual one where none is given; None without autocast."""
        if self.autocast is None:
            return "bfloat16" if self.trainer is not None or self.bits is not None else None
        return None if self.autocast == "none" else self.autocast

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the parameters only."""
        return self.ranks > 1 and self.parallel == "fsdp2"

    @property
    def rows(self) -> int:
        """Sequences that go into the model in a micro-step: twice as many for pairs."""
        return 2 * self.batch if self.trainer == "dpo" else self.batch

    @property
    def written(self) -> int:
        """Sequences that the model itself writes at once, before a step."""
        return self.batch * self.accumulation if self.trainer == "grpo" and self.generation != "vllm" else 0

    @property
    def reference_name(self) -> str | None:
        """Where the reference comes from; None where there is none."""
        if self.trainer != "dpo":
            return None
        return self.reference or ("model" if self.lora is None else "adapters-off")


def load_config(name: str) -> Any:
    """The config of a preset, a folder, a hub id, a `config.json`, a GGUF file, or a folder with such files only.

    Raises `HfCkptError` where none can be read, and `MissingDependencyError` for GGUF files without the package gguf.
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
    except Exception as error:  # configs check themselves, and raise errors of all kinds for values that do not fit
        raise no_model(name, error) from error


@functools.lru_cache(maxsize=4)
def _gguf_config(path: Path, changed: float) -> Any:
    """The config in a GGUF file that was `changed` then. Its list of tokens takes seconds to read."""
    return compat.gguf_config(path)


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names, or the first one in a folder that has no config beside; else None."""
    if path.is_dir() and not (path / "config.json").exists():
        return min(path.glob("*.gguf"), default=None)
    return path if path.suffix == ".gguf" and path.is_file() else None


def skeleton_of_workload(workload: Workload, config: Any = None, *, on_cpu: bool = False) -> Skeleton:
    """The skeleton of the model that `workload` names, with its adapters.

    Args:
        workload: what is trained.
        config: of the model, in place of the one that the workload names.
        on_cpu: whether it is trained on a CPU.

    Raises `HfCkptError` where there is no such config or class, or the sequences are longer than the model's positions.
    """
    config = load_config(workload.model) if config is None else config
    _refuse_too_long(config, workload)
    return skeleton_from_config(
        config, _maker(config, workload), functools.partial(_prepared, workload=workload, on_cpu=on_cpu)
    )


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
    if workload.bits is not None:
        raise HfCkptError(f"weights without values cannot be timed, and a base in {workload.bits} bits has no others.")
    return _prepared(_maker(config, workload)(config), workload)


def _prepared(model: nn.Module, workload: Workload, *, on_cpu: bool = False) -> nn.Module:
    """A model as it is trained: with its base in 4 or 8 bits and with its adapters, as the workload says."""
    if workload.lora is None:
        return model
    if workload.bits is not None:
        quantise(model, workload.bits, DTYPES[workload.dtype], double=workload.double_quant, on_cpu=on_cpu)
        if workload.trainer is None:
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
    """What makes a model of the workload's class from a config."""
    names = [workload.architecture] if workload.architecture else getattr(config, "architectures", None)
    names = names if isinstance(names, (list, tuple)) else ()
    classes = [getattr(transformers, name, None) for name in names if isinstance(name, str)]
    model_class = next((found for found in classes if hasattr(found, "_from_config")), None)
    if workload.architecture and model_class is None:
        raise HfCkptError(f"transformers has no model class {workload.architecture!r}.")
    return functools.partial(_make, model_class or transformers.AutoModelForCausalLM, workload)


def _make(model_class: Any, workload: Workload, config: Any) -> nn.Module:
    # Under FSDP2, whole weights have the type that they compute in.
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
