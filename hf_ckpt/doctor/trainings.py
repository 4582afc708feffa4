"""Read the config files of a training, each by its owner's parser, and what they ask of `hf-ckpt plan`.

Trainer's and TRL's files are read by their dataclasses, accelerate's by its `ClusterConfig`, and those of axolotl and
LLaMA-Factory, which are seldom installed beside hf_ckpt, by the table in `programs`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_ckpt.doctor.programs import PROGRAMS, Program
from hf_ckpt.errors import HfCkptError, reason_of, shown
from hf_ckpt.forecast.question import FIELDS, about
from hf_ckpt.spec.files import read_values
from hf_ckpt.spec.spec import Spec

OF_ACCELERATE = {"distributed_type", "compute_environment", "num_machines", "main_training_function"}
"""Keys that only accelerate's configs have."""
FLAGS = ("activation_checkpointing", "gradient_checkpointing")
"""The training argument that enables checkpointing: its new name, which takes precedence, and the old one."""
SPEC_KEYS = frozenset(field.name for field in dataclasses.fields(Spec))
"""The keys of a spec. They belong into the kwargs of the flag."""
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fa2": "flash_attention_2", "disabled": "eager"}
"""Short names of types and, by LLaMA-Factory, of attention implementations."""


@dataclasses.dataclass(frozen=True)
class Training:
    """Training arguments with defaults, keys among them that the program does not have, and other configs."""

    path: str = ""
    program: Program = PROGRAMS[0]
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    launch: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def flag(self) -> str:
        """The name of the training argument that enables checkpointing, in the form that is set."""
        return next((flag for flag in FLAGS if self.values.get(flag) is not None), FLAGS[1])

    @property
    def kwargs(self) -> Any:
        """The kwargs of the flag, with JSON text parsed as `TrainingArguments` does; None if there are none."""
        value = next((self.values[f"{flag}_kwargs"] for flag in FLAGS if self.values.get(f"{flag}_kwargs")), None)
        with contextlib.suppress(ValueError):
            return json.loads(value) if isinstance(value, str) else value
        return value

    @property
    def adapters(self) -> bool:
        """Whether adapters are trained: a rank is set, and no choice of the program turns them off."""
        chosen = [fields.get(str(self.values.get(key)).lower()) for key, fields in self.program.choices.items()]
        ranks = (self.values.get(key) for key, name in self.program.keys.items() if name == "lora")
        return any(ranks) and {"lora": None} not in chosen

    @property
    def fsdp(self) -> tuple[str, Mapping[str, Any]] | None:
        """FSDP's version (by default 1 for accelerate, 2 for transformers) and its options without their prefix."""
        launched = self.launch.get("distributed_type") == "FSDP"
        if not launched and not self.values.get("fsdp"):
            return None
        config = self.launch if launched else self.values
        written = config.get("fsdp_config")
        options = {key.removeprefix("fsdp_"): written[key] for key in written} if isinstance(written, dict) else {}
        return str(options.get("version") or config.get("fsdp_version") or (1 if launched else 2)), options


def read_training(paths: Sequence[str | Path], model: Mapping[str, Any] | None = None) -> Training:
    """Read training arguments and accelerate's config, which are told apart by their keys.

    Raises `HfCkptError` for a file that cannot be read or is the second of its kind.
    """
    parts: dict[str, Any] = {"model": model or {}}
    for path in map(str, paths):
        try:
            part = _read_file(path)
        except (ValueError, TypeError, ImportError) as error:
            raise HfCkptError(f"cannot read {path!r}: {reason_of(error)}.") from error
        if parts.keys() & part.keys():
            raise HfCkptError(f"{path!r} is the second config of its kind: give one.")
        parts |= part
    return Training(**parts)


def _read_file(path: str) -> dict[str, Any]:
    """Return the parts of a `Training` that are in a file. Raises `ValueError` or `TypeError` if it is none."""
    written = read_values(path, unique=False)  # each program takes the last of two
    if not isinstance(written, dict):
        raise ValueError(f"it must hold a mapping of keys, but holds {shown(written, 60)} instead")
    if OF_ACCELERATE & written.keys():
        from accelerate.commands.config.config_args import load_config_from_file

        return {"launch": load_config_from_file(path).to_dict()}
    written = {str(key): value for key, value in written.items() if value is not None}
    program = max(PROGRAMS, key=lambda program: len(program.telltales & written.keys()))
    values = {**program.options(written), **program.defaults}
    known = {*values, *program.keys, *program.others.split(), *SPEC_KEYS}
    if not known & written.keys():
        raise ValueError("it has no training arguments, and is no config of accelerate; a model's goes with --model")
    unknown = tuple(key for key in written if key not in known)
    return {"path": path, "program": program, "values": {**values, **written}, "unknown": unknown}


def fields_of(training: Training, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Question` that files set, with those that the command line sets (`given`) over them.

    Raises `HfCkptError` for what cannot be planned for.
    """
    path, values, program = training.path, training.values, training.program
    fields: dict[str, Any] = {}
    for key, name in program.keys.items():
        if name in FIELDS.keys() - fields.keys() and values.get(key) not in (None, "auto"):
            fields[name] = _read_value(name, values[key], f"{path}: {key}")
    for key, choices in program.choices.items():
        chosen = choices.get(str(values.get(key)).lower())
        if chosen is None:
            raise HfCkptError(f"{path}: `{key}: {values[key]}` cannot be planned for, only {', '.join(choices)}.")
        fields |= chosen
    fields |= {} if training.adapters else {"lora_targets": None, "lora_dropout": None}
    fields |= {**_types(training, fields.get("dtype")), **_shared(training), **given}
    fields = {name: value for name, value in fields.items() if name in FIELDS and value is not None}
    return {**fields, **_of_model(fields)} if "model" in fields else fields


def _read_value(name: str, value: Any, where: str) -> Any:
    """Return the value of a field from a file. Raises `HfCkptError` that names the place if it is not one."""
    if isinstance(FIELDS[name].default, bool):
        return bool(value)
    if name == "lora_targets":
        names = value if isinstance(value, list) else str(value).split(",")
        return "all-linear" if names[0] in ("all", "all-linear") else tuple(name.strip() for name in names)
    try:
        return about(FIELDS[name]).read(_SHORT.get(str(value), str(value).removeprefix("torch.")))
    except (HfCkptError, ValueError) as error:
        raise HfCkptError(f"{where} {error}.") from None


def _types(training: Training, dtype: str | None) -> dict[str, Any]:
    """Return `dtype` and `autocast`: `bf16` is autocast for Trainer and TRL, for others the type of weights, too."""
    values, weights, pure = training.values, training.program.weights, training.values.get("pure_bf16")
    launched = _SHORT.get(str(training.launch.get("mixed_precision")), "none")
    autocast = "bfloat16" if values.get("bf16") in (True, "auto", "full") and not pure else launched
    autocast = "float16" if values.get("fp16") is True else autocast
    plain = next((name for name in ("bfloat16", "float16") if values.get(name) or weights == "frozen"), "float32")
    if weights == "frozen" and not (training.adapters or pure):
        dtype = "float32"
    elif weights != "dtype":
        dtype = plain if autocast == "none" else autocast
    return {"dtype": dtype, "autocast": autocast}


def _shared(training: Training) -> dict[str, Any]:
    """Return `ranks` and `parallel`. Raises `HfCkptError` for a way of sharding that cannot be planned for."""
    deepspeed = training.launch.get("deepspeed_config") or {}
    stage = deepspeed.get("zero_stage", "") if deepspeed or training.values.get("deepspeed") else 0
    way = f"fsdp{training.fsdp[0]}" if training.fsdp else "ddp" if stage == 0 else f"zero{stage}"
    if way not in about(FIELDS["parallel"]).choices:
        raise HfCkptError(f"{way} cannot be planned for, only {', '.join(about(FIELDS['parallel']).choices)}.")
    ranks = training.launch.get("num_processes")
    return {"ranks": ranks, "parallel": way} if ranks or way != "ddp" else {}


def _of_model(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from the model's config: the type of the checkpoint, and the layers that PEFT takes."""
    from hf_ckpt.forecast.model import load_config

    found: dict[str, Any] = {}
    if fields.get("parallel") == "fsdp2" and fields["autocast"] != "none" and "lora" not in fields:
        found["dtype"] = "float32"  # accelerate casts what is trained
    elif "dtype" not in fields and fields.get("load_in_4bit"):
        found["dtype"] = "bfloat16"
    elif "dtype" not in fields:  # since transformers 5
        dtype = getattr(load_config(fields["model"]), "dtype", None) or "float32"
        found["dtype"] = str(dtype).removeprefix("torch.")
    if "lora" in fields and "lora_targets" not in fields:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_TARGETS

        family = load_config(fields["model"]).model_type
        if family not in PEFT_TARGETS:
            raise HfCkptError(f"PEFT knows no layers of {family} for adapters: name them (--lora-targets).")
        found["lora_targets"] = tuple(PEFT_TARGETS[family])
    return found
