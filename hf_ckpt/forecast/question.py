"""What can be asked about a training run in advance. Does not import torch, so wrong values are refused at once.

The fields of `Question` are defined here once. They give the options of `hf-ckpt plan`, the fields of `hf-ckpt app`,
the keywords of `hf_ckpt.predict`, and the command that a page shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_ckpt.errors import HfCkptError, shown
from hf_ckpt.forecast.devices import DEVICES, Device, device_named
from hf_ckpt.forecast.optimizers import OPTIMIZERS
from hf_ckpt.forecast.ways import WAYS, Way, way_named
from hf_ckpt.spec.reading import READERS
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import DEFAULT_SHARE, UnitError, exact_size, parse_budget, parse_bytes, parse_count

# `force-include` in pyproject.toml copies the configs into the wheel, where there is no folder beside the package.
_FOLDERS = (Path(__file__).parents[1] / "presets", Path(__file__).parents[2] / "configs" / "models")
PRESETS = {path.stem: path for folder in _FOLDERS for path in sorted(folder.glob("*.json"))}
"""The models whose configs come with hf_ckpt: name -> path of the config."""
DTYPE_NAMES = ("float32", "bfloat16", "float16")
"""Types that weights and autocast may have, as torch names them."""


@dataclasses.dataclass(frozen=True)
class About:
    """What there is to say about a field of `Question`."""

    default: Any
    help: str
    """What it means, as the command line prints it."""
    read: Callable[[str], Any] = str
    """Parses the value. Raises `HfCkptError` or `ValueError` for invalid text."""
    choices: tuple[str, ...] = ()
    """All valid values, apart from the default; empty if there is no list of them."""
    option: str = ""
    """Name of the command line's option, if it differs from the field's."""
    metavar: str | None = None
    """The value's name in the command line's help."""
    label: str = ""
    """The field's label in `hf-ckpt app`; empty if the page does not ask for it."""
    scope: str = "model"
    """What it changes: the `model`, a `step` of it, the `costs` that follow from measured steps, or only the choice of
    the `plan`. What measures is given the fields of its scopes only, see `Question.only`. So a field that nobody has
    thought about is one of the model's."""
    name: str = ""
    """The field's name."""

    @property
    def opposite(self) -> str:
        """The option that sets a field of True or False to its default: `--no-packing`, `--double-quant`."""
        name = self.flag.removeprefix("--")
        return f"--{name.removeprefix('no-')}" if self.default else f"--no-{name}"

    @property
    def flag(self) -> str:
        """The command line's option: `--seq` for `tokens`. It begins with `--no-` if the default is True."""
        name = (self.option or self.name).replace("_", "-")
        return f"--no-{name}" if self.default is True else f"--{name}"

    def words(self, value: Any) -> list[str]:
        """The command line's option that sets the field to this value, and its argument."""
        if isinstance(value, bool):
            return [self.opposite if value == self.default else self.flag]
        if isinstance(value, tuple):
            value = ",".join(value)
        if isinstance(value, Spec):
            value = json.dumps(value.to_dict())
        # As exact bytes: a command that is copied must ask for the same budget, or the plan that was shown may not fit.
        sized = isinstance(value, int) and self.read in (parse_budget, parse_bytes)
        return [self.flag, exact_size(value) if sized else str(value)]

    def checked(self, value: Any) -> Any:
        """Return a value as the field's type. Texts are read, as on the command line.

        Raises `HfCkptError` for a value of another type, and for invalid text.
        """
        if isinstance(self.default, bool):
            if isinstance(value, bool):
                return value
            raise HfCkptError(f"{self.name} must be true or false, but is {shown(value)} instead.")
        if type(value) is type(self.default) and value == self.default:  # True is no 1
            return value
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(value, int) and is_number and self.read in (parse_budget, parse_bytes):
            return value  # bytes; `question` asks for the unit of small ones
        if isinstance(value, str) or (is_number and self.read in _NUMBERS):
            try:
                return self.read(shown(value, quoted=False) if self.read is parse_count else value)
            except (HfCkptError, ValueError, OverflowError) as error:
                raise HfCkptError(f"{self.name} {error}.") from None
        if self.read is _read_layers and isinstance(value, (list, tuple)):
            return tuple(value)
        if self.read is _read_spec and isinstance(value, (Mapping, Spec)):
            return Spec.parse(value)
        raise HfCkptError(f"{self.name} cannot be {shown(value)}: {self.help or 'a name'}.")


MODEL = "model"
STEP = "step"
COSTS = "costs"
PLAN = "plan"


def _field(default: Any, help: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"about": About(default, help, **more)})


def _number(default: int | None, help: str, **more: Any) -> Any:
    return _field(default, help, read=parse_count, **more)


def _read_device(text: str) -> str:
    """The name of a device in the table."""
    return device_named(text).name


def _read_layers(text: str) -> str | tuple[str, ...]:
    """`all-linear`, or comma-separated names of layers."""
    names = tuple(name.strip() for name in text.split(","))
    return "all-linear" if names == ("all-linear",) else names


def _read_dropout(text: str | float) -> float:
    """A probability."""
    rate = float(text)
    if not 0 <= rate <= 1:  # nor is it nan, which PEFT accepts
        raise UnitError(f"must be from 0 to 1, but is {text} instead")
    return rate


def _read_tokens(text: str | int) -> int | str:
    """`auto`, `whole`, or a number of tokens."""
    return _count_or("head", text)


def _read_segments(text: str | int) -> int | str:
    """`sqrt`, or a number of segments."""
    return _count_or("segments", text)


def _count_or(key: str, text: str | int) -> int | str:
    """A number, such as `4k`, or one of the words that a key of the spec accepts in its place."""
    with contextlib.suppress(UnitError):
        return parse_count(shown(text, quoted=False))
    word: str = READERS[key](text)
    return word


def _read_spec(text: str) -> Spec:
    """A spec, as `Spec.parse` reads texts."""
    return Spec.parse(text)


_NUMBERS = (parse_count, parse_budget, parse_bytes, _read_dropout, _read_tokens, _read_segments)
"""What reads numbers, too."""


_USUAL = "default: bfloat16 with --trainer or a quantised base, else none"
_OF_T5 = "sequence (T5; default: as --seq)"
_OF_IMAGES = "whose tokens --seq includes; vision models have at least one"
_CHUNK = "run the LM head in chunks: auto, or tokens per chunk"
_TILE = "run feed-forwards in tiles: auto, or tokens per tile"
_SEGMENTS = "also compare plans that save only the first input of each segment: sqrt, or the number of segments"
_HOST = "host memory that offloading may use"
_GLOBAL_BATCH = "sequences per step over all ranks; hf-ckpt chooses the fastest --batch and --accum"
_DEVICES = f"device to plan for (default: this machine): {', '.join(DEVICES)}"
_MAX_TOKENS = "plan for the longest sequences that fit, in multiples of 128 tokens"
_GENERATION = "tokens of prompt and completion that GRPO generates; adds a note on their KV cache"
_SPEC = "also compare this spec: JSON, KEY=VALUE or a file (default: the spec in --config)"
_WAYS = "sharding over ranks (zero1 to zero3: DeepSpeed)"
_BUDGETS = f"20GiB, or 80% or 0.8 of the device (default: {DEFAULT_SHARE:.0%} of the device)"


@dataclasses.dataclass(frozen=True)
class Question:
    """A training, and the device and the budget that it is planned for.

    Raises `HfCkptError` for a number below 1, for a value that is not one of a field's choices, for incompatible
    values, and for an invalid device, budget, size or number of tokens.
    """

    model: str = _field("", "preset (such as llama-3.1-8b or t5-3b), folder, hub id or config.json", label="Model")
    batch: int = _number(1, "sequences per micro-step", label="Batch", scope=STEP)
    tokens: int = _number(512, "tokens per sequence", option="seq", label="Tokens per sequence", scope=STEP)
    target_tokens: int | None = _number(None, f"tokens per target {_OF_T5}", option="target_seq", scope=STEP)
    images: int = _number(0, f"images per sequence, {_OF_IMAGES}", scope=STEP)
    choices: int = _number(4, "choices per question, for multiple-choice models", scope=STEP)
    image_size: int | None = _number(None, "height and width of images in pixels (default: the config's)", scope=STEP)
    seconds: int | None = _number(
        None, "seconds of audio per recording (default: 30 for Whisper, none for others)", scope=STEP
    )
    lora: int | None = _number(None, "rank of LoRA adapters (default: none)", metavar="R", label="LoRA rank")
    lora_targets: str | tuple[str, ...] = _field(
        "all-linear", "layers with adapters, such as q_proj,v_proj", read=_read_layers
    )
    lora_dropout: float = _field(0.0, "dropout of adapters", read=_read_dropout, metavar="P", label="LoRA dropout")
    load_in_4bit: bool = _field(False, "load the base in 4 bits (bitsandbytes nf4), as in QLoRA", label="4-bit base")
    load_in_8bit: bool = _field(False, "load the base in 8 bits (bitsandbytes LLM.int8())", label="8-bit base")
    double_quant: bool = _field(False, "also quantise the 4-bit scales (bnb_4bit_use_double_quant)")
    kbit_preparation: bool = _field(
        True, "do not cast unquantised weights to float32, as PEFT does", label="Cast to float32"
    )
    dtype: str = _field("bfloat16", "dtype of the weights", choices=DTYPE_NAMES, label="Dtype of the weights")
    autocast: str | None = _field(None, f"dtype of autocast ({_USUAL})", choices=(*DTYPE_NAMES, "none"))
    optimizer: str = _field("adamw", "optimizer", choices=tuple(OPTIMIZERS), label="Optimizer", scope=COSTS)
    accumulation: int = _number(
        1,
        "gradient accumulation: micro-steps per optimizer step",
        option="accum",
        label="Gradient accumulation steps",
        scope=STEP,
    )
    global_batch: int | None = _number(None, _GLOBAL_BATCH, label="Global batch", scope=PLAN)
    max_batch: bool = _field(False, "plan for the largest batch that fits", scope=PLAN)
    max_tokens: bool = _field(False, _MAX_TOKENS, option="max_seq", scope=PLAN)
    attention: str = _field("sdpa", "attention implementation, by its name in transformers")
    padded: bool = _field(False, "sequences are padded, so attention gets a mask", scope=STEP)
    trainer: str | None = _field(
        None, "TRL trainer (default: none)", choices=("sft", "dpo", "grpo"), label="TRL trainer"
    )
    generation: int | None = _number(None, _GENERATION, scope=PLAN)
    packing: bool = _field(False, "pack the sequences of a micro-step into one row", label="Packing", scope=STEP)
    ranks: int = _number(1, "number of processes, each with its own device", label="Ranks", scope=COSTS)
    parallel: str = _field("ddp", _WAYS, read=way_named, choices=tuple(WAYS), label="Parallelism")
    architecture: str | None = _field(None, "model class to use instead of the config's")
    head: int | str = _field("whole", _CHUNK, read=_read_tokens, label="LM head chunk", scope=STEP)
    mlp: int | str = _field("whole", _TILE, read=_read_tokens, label="MLP tile", scope=COSTS)
    segments: int | str | None = _field(None, _SEGMENTS, read=_read_segments, label="Segments", scope=PLAN)
    device: str | None = _field(None, _DEVICES, read=_read_device, metavar="NAME", label="Device", scope=PLAN)
    budget: float | None = _field(None, f"peak allowed: {_BUDGETS}", read=parse_budget, label="Budget", scope=PLAN)
    host_budget: int | None = _field(None, _HOST, read=parse_bytes, label="Host memory", scope=PLAN)
    spec: Spec | None = _field(None, _SPEC, read=_read_spec, scope=PLAN)  # noqa: RUF009  # a field

    def __post_init__(self) -> None:
        for name, field in FIELDS.items():
            value = field.checked(getattr(self, name))
            if value != field.default and field.choices and value not in field.choices:
                raise HfCkptError(f"{name} must be one of {', '.join(field.choices)}, but is {shown(value)} instead.")
            object.__setattr__(self, name, value)
        if self.load_in_4bit and self.load_in_8bit:
            raise HfCkptError("load_in_4bit and load_in_8bit exclude each other: give one of them.")
        if self.bits and self.lora is None:
            raise HfCkptError(f"a base in {self.bits} bits stays frozen: give the rank of adapters to train (lora).")
        # bitsandbytes packs a weight into bytes of another shape, whose shards `forecast/ranks.py` does not know.
        if self.bits and self.sharded:
            raise HfCkptError(
                f"a base in {self.bits} bits cannot be planned for under {self.parallel}. Use ddp, or 16 bits."
            )
        if self.parallel != "ddp" and self.ranks == 1:
            raise HfCkptError(f"parallel {self.parallel} shares work between ranks: give their number (ranks).")
        if self.sharded and self.head != "whole":
            raise HfCkptError(f"the head in chunks needs whole weights, which {self.parallel} shards: leave head out.")
        if self.mlp != "whole" and not self.way.rebuilds:
            raise HfCkptError(f"feed-forwards in tiles cannot be planned for under {self.parallel}: leave mlp out.")
        if self.sharded and self.segments is not None:
            gather = f"segments cannot be planned for under {self.parallel}, where their runs gather weights: use ddp."
            raise HfCkptError(gather)
        if self.global_batch and (self.batch, self.accumulation) != (1, 1):
            raise HfCkptError("global_batch chooses batch and accumulation: leave these out.")
        if self.global_batch and self.global_batch % self.ranks:
            raise HfCkptError(f"global_batch must be a multiple of ranks ({self.ranks}), but is {self.global_batch}.")

        if self.max_batch + self.max_tokens + (self.global_batch is not None) > 1:
            raise HfCkptError("of max_batch, max_tokens and global_batch, only one can be chosen.")

    def only(self, *scopes: str) -> Question:
        """The question with defaults in place of all fields but those of these scopes."""
        others = {name: field.default for name, field in FIELDS.items() if field.scope not in scopes}
        if "ranks" in others:  # under DDP, the model of each rank and its step are those of one
            others["ranks"] = 1 if self.parallel == FIELDS["parallel"].default else 2
        return dataclasses.replace(self, **others)

    @property
    def prepared(self) -> bool:
        """Whether PEFT's `prepare_model_for_kbit_training` casts unquantised parameters to float32.

        Custom scripts usually call it. The trainers of TRL, axolotl and LLaMA-Factory do not.
        """
        return self.bits is not None and self.trainer is None and self.kbit_preparation

    @property
    def bits(self) -> int | None:
        """Bits of an element of the quantised base; None if it is not quantised."""
        if self.load_in_8bit:
            return 8
        return 4 if self.load_in_4bit else None

    def without_effect(self) -> Iterator[str]:
        """Yield a sentence for each option that changes nothing, because another one is missing."""
        for name, needed in NEEDS.items():
            field = FIELDS[name]
            if getattr(self, name) != field.default and not any(getattr(self, other) for other in needed):
                yield f"{field.flag} has no effect without {' or '.join(FIELDS[other].flag for other in needed)}"

    @property
    def autocast_name(self) -> str | None:
        """The type that autocast computes in, by default the usual one; None without autocast."""
        if self.autocast is None:
            # TRL's configs turn `bf16` on (trl/trainer/base_config.py); QLoRA computes in 16 bits by its definition.
            return "bfloat16" if self.trainer is not None or self.bits else None
        return None if self.autocast == "none" else self.autocast

    @property
    def way(self) -> Way:
        """How ranks share the work; one rank shares nothing."""
        return WAYS[self.parallel]

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only a part of the parameters."""
        return self.ranks > 1 and self.way.weights

    @property
    def rows(self) -> int:
        """Sequences per micro-step. DPO runs pairs, which are twice as many."""
        return 2 * self.batch if self.trainer == "dpo" else self.batch

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences of a micro-step and their tokens; packed ones are one row."""
        return (1, self.rows * self.tokens) if self.packing else (self.rows, self.tokens)


NEEDS = {
    "lora_targets": ("lora",),
    "lora_dropout": ("lora",),
    "double_quant": ("load_in_4bit",),
    "kbit_preparation": ("load_in_4bit", "load_in_8bit"),
}
"""Fields that change nothing, with those of which one must be set, too."""


FIELDS: dict[str, About] = {
    field.name: dataclasses.replace(field.metadata["about"], name=field.name) for field in dataclasses.fields(Question)
}
"""Every field of a question by its name."""
OF_THE_PLAN: dict[str, Any] = {
    name: FIELDS[name].default for name in ("device", "budget", "host_budget", "head", "mlp", "segments", "spec")
}
"""Fields that say nothing of the training, with their defaults."""


def question(fields: Mapping[str, Any]) -> Question:
    """Create a question from these fields. Raises `HfCkptError` without a model, and for an unknown field."""
    for name in fields:
        if name not in FIELDS:
            raise HfCkptError(f"{name!r} is not an option: use {', '.join(FIELDS)}.")
    if not fields.get("model"):
        raise HfCkptError("a model is needed: a preset, a folder, a hub id, or a --config with `model_name_or_path`.")
    for name in ("budget", "host_budget"):
        if isinstance(fields.get(name), int):
            FIELDS[name].read(fields[name])
    return Question(**fields)


def command_of(training: Question, shown: Collection[str] = ("batch", "tokens")) -> str:
    """The `hf-ckpt plan` command for a question, with the fields that differ from their defaults, and those `shown`."""
    words = ["hf-ckpt", "plan", training.model]
    for name, field in FIELDS.items():
        value = getattr(training, name)
        if name != "model" and (value != field.default or name in shown):
            words += field.words(value)
    return shlex.join(words)


def on_device(training: Question, device: Device) -> Question:
    """The question as the training runs on a device: without bfloat16 support, float16 replaces it.

    Autocast then computes in float16, for which Trainer scales the loss. Trainable weights are in float32, because
    float16 gradients cannot be unscaled. Under FSDP, accelerate computes in bfloat16 unless `autocast` says
    otherwise, and casts what is trained to float32 if autocast is on. DeepSpeed casts all weights to the type that it
    computes in, and accelerate has no autocast then.
    """
    if training.way.deepspeed:
        dtype = training.autocast_name or training.dtype
        if dtype == "bfloat16" and not device.bfloat16:
            dtype = "float16"
        return dataclasses.replace(training, dtype=dtype, autocast="none")
    # accelerate/utils/fsdp_utils.py, `fsdp2_prepare_model`: "FSDP upcast of low precision parameters to fp32". For
    # FSDP1, `prepare_model` in accelerate/accelerator.py does so.
    if training.sharded and training.lora is None:
        by_default = "bfloat16" if (training.dtype, training.autocast) == ("bfloat16", None) else None
        computing = training.autocast_name or by_default
        if computing is not None:
            training = dataclasses.replace(training, dtype="float32", autocast=computing)
    if device.bfloat16 or "bfloat16" not in (training.dtype, training.autocast_name):
        return training
    dtype = training.dtype
    # GradScaler.unscale_ raises "Attempting to unscale FP16 gradients" for trained weights in float16.
    if dtype == "bfloat16":
        dtype = "float32" if training.lora is None else "float16"
    autocast = "none" if training.autocast == "none" else "float16"
    return dataclasses.replace(training, dtype=dtype, autocast=autocast)
