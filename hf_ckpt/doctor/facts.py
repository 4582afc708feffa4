"""`Facts`: the values that the rules of `hf-ckpt doctor` check, from training configs, versions and a model's config.

`gather` reads the files. Each property of `Facts` is a value with the place where it is written. This file does not
import torch.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_ckpt import errors
from hf_ckpt.errors import HfCkptError, SpecError
from hf_ckpt.forecast.devices import Device, device_named
from hf_ckpt.spec.files import read_values
from hf_ckpt.spec.spec import Spec

SEVERITIES = ("error", "warning", "note")
"""Severities of findings, the worst first."""
PACKAGES = ("torch", "transformers", "accelerate", "peft", "deepspeed", "trl", "bitsandbytes")
"""Packages whose versions are reported."""
REQUIRED: dict[str, tuple[str, str | None]] = {
    "torch": ("2.8", None),
    "transformers": ("4.57.1", "6"),
    "accelerate": ("1.0", None),
}
"""Package -> (first version that works, first that does not), as in pyproject.toml."""

# Kinds of config files; FSDP options are only read from a file that training arguments name.
TRAINING = "training arguments"
ACCELERATE = "accelerate's config"
DEEPSPEED = "DeepSpeed's config"
ADAPTER = "PEFT's adapter config"
MODEL = "a model's config"
FSDP = "FSDP options"

# Kind of a config file -> keys by which it is recognised.
_TELLTALES = {
    TRAINING: (
        *("output_dir", "per_device_train_batch_size", "num_train_epochs", "learning_rate", "max_steps", "optim"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "warmup_steps", "logging_steps", "weight_decay"),
        *("activation_checkpointing", "activation_checkpointing_kwargs", "lr_scheduler_type", "model_name_or_path"),
        *("bf16", "fp16", "fsdp", "deepspeed", "torch_compile", "torch_compile_mode", "report_to", "save_strategy"),
        *("eval_strategy", "max_length", "lora_r", "load_in_4bit", "load_in_8bit", "use_cpu"),
    ),
    ACCELERATE: (
        *("compute_environment", "distributed_type", "num_processes", "num_machines", "machine_rank", "gpu_ids"),
        *("mixed_precision", "deepspeed_config", "fsdp_config", "dynamo_config", "main_training_function"),
    ),
    DEEPSPEED: (
        *("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "activation_checkpointing"),
        *("bf16", "fp16", "gradient_clipping", "optimizer", "scheduler", "steps_per_print", "wall_clock_breakdown"),
        *("zero_allow_untested_optimizer", "communication_data_type"),
    ),
    ADAPTER: ("peft_type", "base_model_name_or_path", "target_modules", "r", "lora_alpha", "num_virtual_tokens"),
    MODEL: ("model_type", "architectures", "vocab_size", "hidden_size", "num_hidden_layers"),
}
_SECTIONS_OF_DEEPSPEED = ("activation_checkpointing", "bf16", "fp16")  # mappings there, plain values elsewhere
_DEEPEST = 40  # levels of nesting that are read

FLAGS = ("activation_checkpointing", "gradient_checkpointing")
"""The training argument that enables checkpointing: the new name, which takes precedence, and the old one."""
KWARGS = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
"""The training argument with the keys of a spec: the new name, which takes precedence, and the old one."""
_THEIR_KEYS = {"use_reentrant", "preserve_rng_state", "determinism_check", "every_n_layers", "offload"}
"""Keys of a spec that transformers or torch understand, too."""
OUR_KEYS = {field.name for field in dataclasses.fields(Spec)} - _THEIR_KEYS
"""Keys of a spec that only hf_ckpt understands."""
OFFLOADING = ("unsloth", "offload", "offload_disk")
"""Values of axolotl's flag that enable checkpointing with the blocks' inputs in host memory or on disk."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A value and the place where it is written."""

    value: Any
    """The value as the file has it."""
    where: str
    """`file: key`, with dots between nested keys."""


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """A config file, or a section of a file that is a config of its own."""

    path: str
    """Path of the file, with the keys of the section."""
    kind: str
    """The kind of config: `TRAINING`, `ACCELERATE`, `DEEPSPEED`, `ADAPTER` or `FSDP`."""
    values: Mapping[str, Any]
    """The mapping in the file or section."""

    def setting(self, *keys: str) -> Setting | None:
        """Return the value of these nested keys; None if it is not set."""
        value: Any = self.values
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return None if value is None else Setting(value, f"{self.path}: {'.'.join(keys)}")


@dataclasses.dataclass(frozen=True)
class Fsdp:
    """FSDP, as the configs enable it."""

    where: str
    """`file: key` of the option that enables it."""
    version: str | None
    """`1` or `2`; None if the configs do not say."""
    switch: Setting | None
    """The setting that enables FSDP's own activation checkpointing; None if it is off."""


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """Facts from a model's config."""

    name: str
    """The name that the user gave: a preset, folder, hub id or file."""
    model_type: str
    """`model_type` of the config; empty if it has none."""
    config: Mapping[str, Any]
    """The config as a dict."""
    stacks: tuple[tuple[str, int], ...] = ()
    """(stack name, number of blocks) for each stack; empty if the config does not say."""
    named: bool = True
    """Whether hf_ckpt uses these names for the stacks."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts that the rules check. A property is None if the configs do not say."""

    files: tuple[ConfigFile, ...] = ()
    """The config files in the order of the command line."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Package name -> version of the installed packages."""
    model: ModelFacts | None = None
    """The model; None if none is named."""
    device: Device | None = None
    """The device of the training; None if none is named."""
    batch: int | None = None
    """Sequences per micro-step from the command line; None if left to the files."""
    tokens: int | None = None
    """Tokens per sequence from the command line; None if left to the files."""

    def of(self, *kinds: str) -> list[ConfigFile]:
        """Return the files of these kinds. The last one comes first, because it takes precedence."""
        return [file for file in reversed(self.files) if file.kind in kinds]

    def option(self, *names: str) -> Setting | None:
        """Return a training option: the first of these names that has a value."""
        found = (file.setting(name) for file in self.of(TRAINING, ADAPTER) for name in names)
        return next((setting for setting in found if setting is not None), None)

    def option_on(self, *names: str) -> Setting | None:
        """Return a training option if it is on: the first of these names that has a value."""
        found = self.option(*names)
        return found if found is not None and is_on(found.value) else None

    @property
    def checkpointing(self) -> Setting | None:
        """The training argument that enables checkpointing. For axolotl, `offload` and `unsloth` do."""
        found = self.option(*FLAGS)
        return found if found is not None and (is_on(found.value) or found.value in OFFLOADING) else None

    @property
    def own_offloading(self) -> Setting | None:
        """The setting that makes TRL, axolotl or LLaMA-Factory move activations to host memory."""
        moved = self.option("activation_offloading", "use_unsloth_gc")
        flag = self.option(*FLAGS)
        if moved is not None and is_set(moved.value):
            return moved
        return flag if flag is not None and flag.value in OFFLOADING else None

    @property
    def given_kwargs(self) -> Setting | None:
        """The checkpointing kwargs as written. JSON text is parsed, as TrainingArguments does."""
        found = self.option(*KWARGS)
        return None if found is None else Setting(from_json_text(found.value), found.where)

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The checkpointing kwargs; empty if there are none, or they are not a mapping."""
        found = self.given_kwargs
        return found.value if found is not None and isinstance(found.value, Mapping) else {}

    @property
    def ours(self) -> bool:
        """Whether the checkpointing kwargs have keys that only hf_ckpt understands."""
        return bool(OUR_KEYS & self.kwargs.keys())

    @property
    def spec(self) -> Spec | None:
        """The spec for hf_ckpt; None if checkpointing is off or the spec is invalid."""
        if self.checkpointing is None:
            return None
        try:
            return Spec.parse(without_true_reentrant(self.kwargs))
        except SpecError:
            return None

    @property
    def policies(self) -> set[str]:
        """All policies in the spec and its rules."""
        spec = self.spec
        return set() if spec is None or spec.plan else {spec.policy, *(rule.policy for rule in spec.rules)}

    @property
    def fsdp(self) -> Fsdp | None:
        """FSDP, if accelerate's config or the training arguments enable it."""
        for file in self.of(ACCELERATE):
            if str(file.values.get("distributed_type")).upper() == "FSDP":
                return _fsdp(file, "distributed_type", version="1")  # the launcher's default
        for file in self.of(TRAINING):
            if file.values.get("fsdp") not in (None, False, "", [], "false"):
                return _fsdp(file, "fsdp", version=None, beside=self.of(FSDP))
        return None

    @property
    def zero3(self) -> Setting | None:
        """The setting that enables ZeRO-3."""
        stages = [file.setting("zero_optimization", "stage") for file in self.of(DEEPSPEED)]
        for file in self.of(ACCELERATE):
            if str(file.values.get("distributed_type")).upper() == "DEEPSPEED":
                stages.append(file.setting("deepspeed_config", "zero_stage"))
        return next((stage for stage in stages if stage is not None and str(stage.value) == "3"), None)

    @property
    def sharded(self) -> Setting | None:
        """The setting that shards parameters over ranks."""
        found = self.fsdp
        return self.zero3 or (None if found is None else Setting("FSDP", found.where))

    @property
    def adapters(self) -> Setting | None:
        """The setting that enables LoRA or other adapters, which freeze most weights."""
        use = self.option("use_peft")
        if use is not None and not is_on(use.value):
            return None
        for file in self.of(TRAINING, ADAPTER):
            decided = [key for key in ("adapter", "finetuning_type") if key in file.values]
            if decided and all(file.values[key] not in ("lora", "qlora") for key in decided):
                continue
            for key, value in file.values.items():
                named = key in ("use_peft", "use_lora", "peft_type", "peft_config") or key.startswith("lora_")
                chosen = key in ("adapter", "finetuning_type") and value in ("lora", "qlora")
                if chosen or (named and value not in (None, False, 0, "")):
                    return Setting(value, f"{file.path}: {key}")
        return None

    @property
    def dropout(self) -> Setting | None:
        """The setting of a dropout above 0 inside the blocks, of adapters or of the model."""
        rate = self.option("lora_dropout")
        if rate is not None and self.adapters is not None and is_positive(rate.value):
            return rate
        for path, value in walk(self.model.config if self.model else {}):
            key = path[-1]
            outside = key.startswith(("classif", "summary", "embd", "cls_", "pooler"))
            if ("dropout" in key or "pdrop" in key or "drop_path" in key) and not outside and is_positive(value):
                assert self.model is not None
                return Setting(value, f"{self.model.name}: {'.'.join(path)}")
        return None

    @property
    def compiled(self) -> Setting | None:
        """The setting that enables torch.compile."""
        found = self.option("torch_compile_mode", "torch_compile_backend") or self.option_on("torch_compile")
        for file in self.of(ACCELERATE):
            backend = file.setting("dynamo_config", "dynamo_backend")
            if backend is not None and str(backend.value).lower() not in ("no", "false"):
                found = found or backend
        return found


# --- reading files, versions, and a model's config ------------------------------------------------------------------


def gather(
    paths: Sequence[str | Path],
    *,
    model: str | None = None,
    device: str | None = None,
    batch: int | None = None,
    tokens: int | None = None,
) -> Facts:
    """Read config files, the installed versions, and the config of a model if one is named.

    Args:
        paths: config files. Their kind is recognised by their keys.
        model: preset, folder, hub id or `config.json` of a model.
        device: name of a row in the device table.
        batch: sequences per micro-step.
        tokens: tokens per sequence.

    Raises `HfCkptError` that lists all files that cannot be read or have no known keys, or for an unknown device or
    model.
    """
    return Facts(
        files=read_files(paths),
        versions=installed(),
        model=None if model is None else read_model(model),
        device=None if device is None else device_named(device),
        batch=batch,
        tokens=tokens,
    )


def installed() -> dict[str, str]:
    """Return package name -> version of the installed packages, without importing them."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = str(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def read_files(paths: Sequence[str | Path]) -> tuple[ConfigFile, ...]:
    """Read config files, each with the DeepSpeed and FSDP configs that it names or contains.

    Raises `HfCkptError` that lists all files that cannot be read or have no known keys.
    """
    found: dict[str, ConfigFile] = {}
    problems: list[str] = []
    for path in paths:
        file = _read(str(path), None, problems)
        for one in () if file is None else (file, *_named_by(file, problems)):
            found[one.path] = one
    if problems:
        raise HfCkptError("\n".join(problems))
    return tuple(found.values())


def _read(path: str, kind: str | None, problems: list[str]) -> ConfigFile | None:
    """Read a file. If `kind` is None, its keys decide. On failure, add to `problems` and return None."""
    try:
        values = _load(Path(path))
    except ValueError as error:
        problems.append(f"cannot read {path!r}: {error}.")
        return None
    kind = kind or _kind(values)
    if kind == MODEL:
        problems.append(f"{path!r} is a model's config; give it as `--model {path}`.")
    elif kind is None:
        keys = ", ".join(errors.shown(key, 60, quoted=False) for key in list(values)[:6])
        problems.append(
            f"{path!r} is no config that doctor knows by its keys: {', '.join((TRAINING, ACCELERATE, DEEPSPEED))} or "
            f"{ADAPTER}. Its keys are {keys or '(none)'}."
        )
    else:
        return ConfigFile(path, kind, values)
    return None


def _load(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file. Raises `ValueError` if there is none."""
    loaded = read_values(path)
    if not isinstance(loaded, Mapping):
        found = "empty" if loaded is None else f"{type(loaded).__name__} instead"
        raise ValueError(f"it must hold a mapping of keys, but is {found}")
    plain: dict[str, Any] = _plain(loaded)
    return plain


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value with all its keys as text. Raises `ValueError` if it is nested too deep."""
    if depth > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, depth + 1) for key, inner in value.items()}
    return [_plain(inner, depth + 1) for inner in value] if isinstance(value, list) else value


def _kind(values: Mapping[str, Any]) -> str | None:
    """Return the kind of config that has most keys among these; None if none has any."""
    scores = {kind: sum(_tells(kind, key, values) for key in keys) for kind, keys in _TELLTALES.items()}
    best = max(scores, key=lambda kind: scores[kind])
    return best if scores[best] else None


def _tells(kind: str, key: str, values: Mapping[str, Any]) -> bool:
    """Whether these values contain a key of this kind of config."""
    if key in _SECTIONS_OF_DEEPSPEED:
        return key in values and isinstance(values[key], Mapping) == (kind == DEEPSPEED)
    return key in values


def _named_by(file: ConfigFile, problems: list[str]) -> Iterator[ConfigFile]:
    """Yield the configs that a file names or contains."""
    places = {
        ACCELERATE: ((("deepspeed_config", "deepspeed_config_file"), DEEPSPEED),),
        TRAINING: ((("deepspeed",), DEEPSPEED), (("fsdp_config",), FSDP)),
    }
    for keys, kind in places.get(file.kind, ()):
        setting = file.setting(*keys)
        value = None if setting is None else from_json_text(setting.value)
        if isinstance(value, Mapping) and kind == DEEPSPEED:
            yield ConfigFile(f"{file.path}: {'.'.join(keys)}", kind, value)
        elif isinstance(value, str) and value not in ("", "none"):
            beside = Path(file.path).parent / value  # training may start in another folder
            found = _read(str(beside) if is_file(beside) and not is_file(Path(value)) else value, kind, problems)
            if found is None:
                problems[-1] += f" {file.path} names it as `{'.'.join(keys)}`."
            else:
                yield found


def is_file(path: Path) -> bool:
    """Whether there is a file at a path. False for a text that cannot be a path."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_model(name: str) -> ModelFacts:
    """Read a model's config from a preset, folder, hub id or file. This imports transformers.

    Raises `HfCkptError` if there is no such config, or it cannot be read.
    """
    from hf_ckpt.models.families import depth_keys, family_of
    from hf_ckpt.prediction.workload import load_config

    config = load_config(name)
    model_type = str(getattr(config, "model_type", ""))
    row = family_of(config)
    names = ["encoder", "decoder"]
    if not getattr(config, "is_encoder_decoder", False):
        names = [row.stacks[0][0] if row else "decoder"]
    counts = [next((getattr(config, key) for key in depth_keys(config, stack)), 0) for stack in names]
    known = all(counts) and not getattr(config, "vision_config", None)
    stacks = tuple(zip(names, counts, strict=True)) if known else ()
    try:
        values = _plain(config.to_dict())
    except ValueError as error:
        raise HfCkptError(f"cannot read a model's config from {name!r}: {error}.") from error
    return ModelFacts(name, model_type, values, stacks, named=row is not None or len(names) > 1)


# --- values and versions --------------------------------------------------------------------------------------------


def is_on(value: Any) -> bool:
    """Whether a value means on, in any spelling of YAML files."""
    return value is True or str(value).strip().lower() in ("true", "yes", "on", "1")


def is_set(value: Any) -> bool:
    """Whether a value is set: not empty, and not a spelling of off."""
    return value not in (None, False, 0, "", [], {}) and str(value).strip().lower() not in (
        "none",
        "false",
        "no",
        "off",
    )


def is_positive(value: Any) -> bool:
    """Whether a value is a number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def positive_int(setting: Setting | None) -> int | None:
    """Return a setting's value if it is a whole number above 0; None otherwise."""
    return setting.value if setting is not None and type(setting.value) is int and setting.value > 0 else None


def from_json_text(value: Any) -> Any:
    """Return the value of the text of a JSON object, and every other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return _plain(json.loads(value))
    except (ValueError, RecursionError):
        return value


def without_true_reentrant(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return checkpointing kwargs without `use_reentrant: true`, which has its own rule."""
    return {key: value for key, value in kwargs.items() if key != "use_reentrant" or value is not True}


def _fsdp(file: ConfigFile, key: str, *, version: str | None, beside: Sequence[ConfigFile] = ()) -> Fsdp:
    """Read the options of FSDP from a file, or from the first FSDP config that it names (`beside`).

    The options may be written with or without `fsdp_` in front of their names.
    """
    given, path = from_json_text(file.values.get("fsdp_config")), f"{file.path}: fsdp_config."
    if isinstance(given, str) and beside:
        given, path = beside[0].values, f"{beside[0].path}: "
    options = given if isinstance(given, Mapping) else {}
    switch = None
    for name, value in options.items():
        if name.removeprefix("fsdp_") == "version" and value is not None:
            version = str(value)
        if name.removeprefix("fsdp_") == "activation_checkpointing" and is_on(value):
            switch = Setting(value, f"{path}{name}")
    return Fsdp(f"{file.path}: {key}", version, switch)


def walk(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path of keys, value) for every value in nested mappings that is not a mapping."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from walk(value, (*path, key))
        else:
            yield (*path, key), value


def key_of(setting: Setting) -> str:
    """Return the key of a setting, without its file."""
    return setting.where.rpartition(": ")[2]


def shown(value: Any) -> str:
    """Return a value as text of at most 60 characters."""
    return errors.shown(value, 60)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: `_numbers("2.13.0+cpu") == (2, 13, 0)`. Empty if the text is not a version."""
    match = re.match(r"\d{1,9}(\.\d{1,9})*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def is_before(version: str | None, other: str) -> bool:
    """Whether a version is known and lower than another."""
    return bool(version) and () < _numbers(str(version)) < _numbers(other)


def is_at_most(version: str, other: str) -> bool:
    """Whether a version can be parsed, and is at most another."""
    return () < _numbers(version) <= _numbers(other)
