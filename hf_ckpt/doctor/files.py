"""Read the config files of a training, each by its owner's rules, and what they ask of `hf-ckpt plan`.

Trainer's and TRL's files are read by their dataclasses, accelerate's by its `ClusterConfig`, and those of others, which
are seldom installed beside hf_ckpt, by the table in `owners.yaml`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_ckpt.doctor.owners import OWNERS, Owner, owner_of, without_sections
from hf_ckpt.errors import HfCkptError, SpecError, reason_of, shown
from hf_ckpt.forecast.question import FIELDS
from hf_ckpt.forecast.ways import WAYS
from hf_ckpt.spec.files import read_values
from hf_ckpt.spec.spec import Spec

FLAGS = ("activation_checkpointing", "gradient_checkpointing")
"""The training argument that enables checkpointing: its new name, which takes precedence, and the old one."""
SPEC_KEYS = frozenset(field.name for field in dataclasses.fields(Spec))
"""The keys of a spec. They belong into the kwargs of the flag."""
_KEYS_OF_SPLITS: dict[str, str] = read_values(Path(__file__).with_name("splits.yaml"))
SPLITS = {key: part for part, keys in _KEYS_OF_SPLITS.items() for key in keys.split()}
"""Key that says between how many ranks something is split -> what is split."""
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fa2": "flash_attention_2", "disabled": "eager"}
_SHORT |= {"flash_attn": "flash_attention_2"}
"""Short names of types and, by LLaMA-Factory and ms-swift, of attention implementations."""


@dataclasses.dataclass(frozen=True)
class ConfigFiles:
    """Training arguments with defaults, keys among them that the owner does not have, and other configs."""

    path: str = ""
    owner: Owner = OWNERS[0]
    owners: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Path of each file -> whose it is."""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    launch: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The config of accelerate."""
    unknown_to_accelerate: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Keys of its file that it does not have -> the keys that it has."""
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The config of DeepSpeed, if it is a file of its own."""
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def kwargs_key(self) -> str:
        """The name of the flag's kwargs, in the form that is set."""
        default = f"{next((flag for flag in FLAGS if self.values.get(flag) is not None), FLAGS[1])}_kwargs"
        return next((f"{flag}_kwargs" for flag in FLAGS if self.values.get(f"{flag}_kwargs")), default)

    @property
    def flag(self) -> str:
        """The name of the training argument that enables checkpointing, in the form that is set."""
        default = self.kwargs_key.removesuffix("_kwargs")
        return next((flag for flag in FLAGS if self.values.get(flag) is not None), default)

    @property
    def kwargs(self) -> Any:
        """The kwargs of the flag, with JSON text parsed as `TrainingArguments` does; None if there are none."""
        value = self.values.get(self.kwargs_key) or None
        with contextlib.suppress(ValueError):  # `rules` reports a text that is no JSON
            return json.loads(value) if isinstance(value, str) else value
        return value

    @property
    def reads_spec(self) -> bool:
        """Whether hf_ckpt sees the kwargs of the flag, as far as files say."""
        if self.owner.needs is None:  # it passes the kwargs to transformers, where hf_ckpt's hook gets them
            return True
        key, word = self.owner.needs
        return word in str(self.values.get(key))

    @property
    def adapters(self) -> bool:
        """Whether adapters are trained: a rank is set, and no choice of the owner turns them off."""
        chosen = [self.owner.chosen(key, self.values.get(key)) for key in self.owner.choices]
        ranks = (self.values.get(key) for key in self.owner.fields.get("lora", "").split())
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

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's config or accelerate's part of it; its name or path if it cannot be read; empty without it."""
        launched = self.launch.get("deepspeed_config")
        file = launched.get("deepspeed_config_file") if isinstance(launched, dict) else None
        config = self.engine or self.values.get("deepspeed") or file or launched
        with contextlib.suppress(ValueError):  # a path that is another one where the training starts
            config = read_values(config) if isinstance(config, str) else config
        return config if isinstance(config, (dict, str)) else {}

    @property
    def splits(self) -> dict[str, int]:
        """Keys of `SPLITS`, as the file spells them, with sizes above 1."""
        sections = [self.values, self.values.get("parallelism_config"), self.launch.get("parallelism_config")]
        if isinstance(self.deepspeed, dict):
            sections += [self.deepspeed, self.deepspeed.get("tensor_parallel")]
        keys = {key: section[key] for section in sections if isinstance(section, Mapping) for key in section}
        sizes = {key: int(size) for key, size in keys.items() if split_by(key) and str(size).isdecimal()}
        return {key: size for key, size in sizes.items() if size > 1}


def split_by(key: str) -> str:
    """Return what a key splits between ranks; empty for other keys."""
    return SPLITS.get(key.removeprefix("distributed.").removeprefix("parallelism_config_"), "")


def read_files(paths: Sequence[str | Path], model: Mapping[str, Any] | None = None) -> ConfigFiles:
    """Read training arguments, accelerate's config and DeepSpeed's, which are told apart by their keys.

    Raises `HfCkptError` for each file that cannot be read or is the second of its kind.
    """
    parts: dict[str, Any] = {"model": model or {}}
    owners: dict[str, str] = {}
    problems = []
    for path in map(str, paths):
        try:
            owner, part = _read_file(path)
        except (ValueError, TypeError, ImportError) as error:
            problems.append(f"cannot read {path!r}: {reason_of(error)}.")
            continue
        if parts.keys() & part.keys():
            problems.append(f"{path!r} is the second config of its kind: give one.")
        parts |= part
        owners[path] = owner.name
    if problems:
        raise HfCkptError("\n".join(problems))
    return ConfigFiles(**parts, owners=owners)


def _read_file(path: str) -> tuple[Owner, dict[str, Any]]:
    """Return whose a file is, and its parts of `ConfigFiles`. Raises `ValueError` or `TypeError` if it is none."""
    written = read_values(path)
    if not isinstance(written, dict):
        raise ValueError(f"it must hold a mapping of keys, but holds {shown(written, 60)} instead")
    written = {str(key): value for key, value in written.items() if value is not None}
    owner = owner_of(written)
    if owner.refused:
        raise ValueError(f"it is a file of {owner.name}: {owner.refused}")
    if owner.part == "engine":
        return owner, {"engine": written}
    if owner.part == "launch":
        return owner, _read_launch(written)
    if owner.sections:  # its YAML has `none` and 0 for no value
        values = without_sections(written)
        written = {key: value for key, value in values.items() if str(value).lower() not in ("none", "0")}
    values = {**owner.options(written), **owner.defaults}
    readable = {*values, *owner.keys, *SPEC_KEYS, *filter(split_by, written)}
    if not readable & written.keys():
        names = ", ".join(owner.name for owner in OWNERS if not owner.refused)
        raise ValueError(f"it has no key of a file of {names}; a model's config goes with --model")
    unknown = tuple(key for key in written if key not in readable)
    return owner, {"path": path, "owner": owner, "values": {**values, **written}, "unknown": unknown}


def _read_launch(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return accelerate's config, with the defaults of the version that is installed, and the keys it does not have."""
    from accelerate.commands.config import config_args

    classes = (config_args.ClusterConfig, config_args.SageMakerConfig)
    # The first two are of older versions.
    launch_keys = ["fp16", "dynamo_backend", *(field.name for of in classes for field in dataclasses.fields(of))]
    readable = {key: value for key, value in written.items() if key in launch_keys}
    with tempfile.TemporaryDirectory() as folder:  # accelerate reads files only, and none with unknown keys
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(readable), encoding="utf-8")
        config = config_args.load_config_from_file(str(path)).to_dict()
    return {"launch": config, "unknown_to_accelerate": {key: launch_keys for key in written if key not in launch_keys}}


def fields_of(files: ConfigFiles, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Question` that files set, with those that the command line sets (`options`) over them.

    Raises `HfCkptError` for what cannot be planned for.
    """
    values = files.values
    owner = files.owner
    fields: dict[str, Any] = {}
    for name, keys in owner.fields.items():
        key = next((key for key in keys.split() if values.get(key) not in (None, "auto")), None)
        if key is not None:
            fields[name] = _read_value(name, values[key], f"{files.path}: {key}")
    if not files.adapters:  # TRL's options have defaults for these, also without adapters
        fields |= {"lora_targets": None, "lora_dropout": None}
    fields |= {**_types(files, fields.get("dtype")), **_shared(files)}
    for key, choices in owner.choices.items():
        chosen = owner.chosen(key, values.get(key))
        if chosen is None:
            named = ", ".join(str(choice).lower() for choice in choices)
            raise HfCkptError(f"{files.path}: `{key}: {values[key]}` cannot be planned for, only {named}.")
        fields |= chosen
    if "global_batch" in options:  # chooses these two anew
        fields = {name: value for name, value in fields.items() if name not in ("batch", "accumulation")}
    fields |= _of_splits(files, fields.get("tokens")) | _of_spec(files, fields.get("parallel")) | dict(options)
    fields = {name: value for name, value in fields.items() if name in FIELDS and value is not None}
    return {**fields, **_of_model(fields)} if "model" in fields else fields


def _of_spec(files: ConfigFiles, parallel: str | None) -> dict[str, Any]:
    """Return what a file's spec asks: how the head and feed-forwards run, a budget, or else the `spec` to compare."""
    try:
        spec = Spec.parse(files.kwargs) if files.reads_spec and isinstance(files.kwargs, dict) else None
    except SpecError:  # `rules` reports it
        return {}
    if spec is None:
        return {}
    names = ("budget", "host_budget", "mlp", *(() if parallel and WAYS[parallel].weights else ("head",)))
    fields = {name: getattr(spec, name) for name in names if getattr(spec, name) != FIELDS[name].default}
    return fields if spec.is_planned and not spec.rules else {**fields, "spec": spec}


def _of_splits(files: ConfigFiles, tokens: int | None) -> dict[str, Any]:
    """Return the `tokens` of one rank. Raises `HfCkptError` if something other than sequences is split."""
    for key, size in files.splits.items():
        if split_by(key) != "sequences":
            raise HfCkptError(f"`{key}: {size}` splits {split_by(key)} between ranks, which cannot be planned for.")
        tokens = None if tokens is None else -(-tokens // size)  # sequences are padded to a multiple
    return {"tokens": tokens}


def _read_value(name: str, value: Any, where: str) -> Any:
    """Return the value of a field from a file. Raises `HfCkptError` that names the place if it is not one."""
    if isinstance(FIELDS[name].default, bool):
        return bool(value)
    if name == "lora_targets":
        names = value if isinstance(value, list) else str(value).split(",")
        names = [str(target).strip() for target in names if str(target).strip()]
        names = [target.lstrip("*.") for target in names]  # NeMo Automodel's patterns
        if {"all", "all-linear", "_proj", ""} & set(names):  # all linear layers of a block end in `_proj`
            return "all-linear"
        if any(set(target) & set("*\\(|[") for target in names):
            raise HfCkptError(f"{where} has a pattern, {value}, which cannot be planned for: name the layers.")
        return tuple(names) or None
    try:
        return FIELDS[name].read(_SHORT.get(str(value), str(value).removeprefix("torch.")))
    except (HfCkptError, ValueError) as error:
        raise HfCkptError(f"{where} {error}.") from None


def _types(files: ConfigFiles, dtype: str | None) -> dict[str, Any]:
    """Return `dtype` and `autocast`: `bf16` is autocast for Trainer and TRL, for others the type of weights, too."""
    values = files.values
    weights = files.owner.weights
    pure = values.get("pure_bf16")
    launched = _SHORT.get(str(files.launch.get("mixed_precision")), "none")
    autocast = "bfloat16" if values.get("bf16") in (True, "auto", "full") and not pure else launched
    autocast = "float16" if values.get("fp16") is True else autocast
    # LLaMA-Factory loads a frozen base in the type that it computes in, and weights that are trained in float32.
    plain = next((name for name in ("bfloat16", "float16") if values.get(name) or weights == "frozen"), "float32")
    if weights == "fsdp2":  # NeMo Automodel's default `mp_policy` computes in bfloat16
        autocast = "bfloat16" if dtype == "float32" else "none"
    elif weights == "frozen" and not (files.adapters or pure):
        dtype = "float32"
    elif weights != "dtype":
        dtype = plain if autocast == "none" else autocast
    return {"dtype": dtype, "autocast": autocast}


def _shared(files: ConfigFiles) -> dict[str, Any]:
    """Return `ranks` and `parallel`. Raises `HfCkptError` for a way of sharding that cannot be planned for."""
    config = files.deepspeed
    if isinstance(config, str):
        if not config.startswith("zero"):  # such as `zero2`, a preset of ms-swift
            raise HfCkptError(f"DeepSpeed's config {shown(config)} cannot be read: give its path from this folder.")
        stage = config.removeprefix("zero")
        config = {}
    else:
        config = without_sections(config)
        stage = config.get("zero_stage", config.get("zero_optimization.stage", 0))
    for key, value in _sharing_less(files.fsdp[1] if files.fsdp else {}, config):
        raise HfCkptError(f"`{key}: {value}` cannot be planned for: leave it out.")
    way = f"fsdp{files.fsdp[0]}" if files.fsdp else f"zero{stage}".replace("zero0", "ddp")
    if way not in WAYS:
        raise HfCkptError(f"{way} cannot be planned for, only {', '.join(WAYS)}.")
    ranks = files.launch.get("num_processes")
    # -1 is accelerate's default.
    ranks = None if ranks in (-1, 0, None) else _read_value("ranks", ranks, "num_processes")
    return {"ranks": ranks, "parallel": way} if ranks or way != "ddp" else {}


def _sharing_less(fsdp: Mapping[str, Any], deepspeed: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys, and their values, that move what is shared to host memory, or share less than they could."""
    for key in ("offload_params", "cpu_offload"):
        if str(fsdp.get(key)).lower() == "true":
            yield key, fsdp[key]
    for key in ("reshard_after_forward", "sharding_strategy"):
        if str(fsdp.get(key)).upper() not in ("NONE", "TRUE", "FULL_SHARD", "1"):
            yield key, fsdp[key]
    for key in ("offload_optimizer", "offload_param"):
        inner = deepspeed.get(f"zero_optimization.{key}")
        place = inner.get("device") if isinstance(inner, dict) else deepspeed.get(f"{key}_device")
        if str(place).lower() != "none":
            yield key, place


def _of_model(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from the model's config: the type of the checkpoint, and the layers that PEFT takes."""
    from hf_ckpt.forecast.model import load_config

    derived: dict[str, Any] = {}
    is_quantised = fields.get("load_in_4bit") or fields.get("load_in_8bit")
    if fields.get("parallel") in ("fsdp1", "fsdp2") and fields["autocast"] != "none" and "lora" not in fields:
        derived["dtype"] = "float32"  # accelerate casts what is trained
    elif "dtype" not in fields and is_quantised:
        derived["dtype"] = "bfloat16"  # of what is not quantised, such as norms
    elif "dtype" not in fields:  # since transformers 5
        dtype = getattr(load_config(fields["model"]), "dtype", None) or "float32"
        derived["dtype"] = str(dtype).removeprefix("torch.")
    if "lora" in fields and "lora_targets" not in fields:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_TARGETS

        family = load_config(fields["model"]).model_type
        if family not in PEFT_TARGETS:
            raise HfCkptError(f"PEFT knows no layers of {family} for adapters: name them (--lora-targets).")
        derived["lora_targets"] = tuple(PEFT_TARGETS[family])
    return derived
