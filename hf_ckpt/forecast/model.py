"""A shallow model on fake tensors, from a config or a live model's config, that a forecast measures in its place.

It has the first block of every stack, two further blocks of each kind, and the last block. Fake tensors have shapes and
types but no values, so neither weights nor a device are needed. `Stack.like` says which of these blocks stands for a
block of the real model.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from hf_ckpt import compat
from hf_ckpt.compat.peft import adapters_of, add_adapters, like_bitsandbytes
from hf_ckpt.errors import HfCkptError, reason_of, shown
from hf_ckpt.forecast.batches import DTYPES, NO_PLAN
from hf_ckpt.forecast.presets import presets
from hf_ckpt.forecast.quantised import QuantisedLinear, quantise
from hf_ckpt.forecast.question import Question
from hf_ckpt.models.blocks import base_model, find_blocks, frozen_prefix, plain_modules, plain_name
from hf_ckpt.models.families import depth_keys, learned_positions
from hf_ckpt.spec.plan import Block

Tensors = tuple[tuple[tuple[int, ...], int, bool], ...]
"""For each parameter: (shape, bytes per element, whether it is trainable)."""
_CHANCES = ("apply_spec_augment", "layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Keys of configs that make a step do less at random, unless they are False or 0.0."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """One stack of the real model, and the blocks of the shallow model that stand for its blocks."""

    container: str
    """Qualified name of the list that holds its blocks."""
    blocks: tuple[Block, ...]
    """The blocks of the real model."""
    like: tuple[int, ...]
    """For each of them, the position in the shallow model's list of the block that stands for it."""


@dataclasses.dataclass(frozen=True)
class ShallowModel:
    """A model with few blocks on fake tensors, and the sizes of the real one."""

    fake: compat.torch.FakeTensorMode
    """The mode that its tensors belong to."""
    base: compat.transformers.PreTrainedModel
    """The model."""
    stacks: tuple[Stack, ...]
    outside: Tensors
    """The parameters outside the blocks."""
    inside: tuple[Tensors, ...]
    """The parameters of each block of the real model, stack after stack."""
    buffer_bytes: int
    """Bytes of all buffers of the real model."""
    measured: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """The steps that `run` has measured on it."""

    @property
    def tensors(self) -> Tensors:
        """All parameters of the real model."""
        return tuple(tensor for part in (self.outside, *self.inside) for tensor in part)


def nbytes(tensors: Iterable[tuple[tuple[int, ...], int, bool]]) -> int:
    """Bytes of parameters."""
    return sum(math.prod(shape) * size for shape, size, _ in tensors)


# --- from a config or a live model ------------------------------------------------------------------------------------


def model_of_workload(workload: Question, config: Any = None, live: nn.Module | None = None) -> ShallowModel:
    """The shallow model of a workload, with its adapters.

    Args:
        workload: what is trained.
        config: of the model, instead of the one that the workload names.
        live: a model, plain or wrapped, whose class, config, adapters and types count, and what is frozen in it.

    Raises `HfCkptError` if there is no such config or class, if sequences exceed the model's positions, if the
    parameters of `live` are not those of its config and adapters, or if its weights are in host memory or on a disk.
    """
    base: Any = None if live is None else base_model(live)
    if base is not None:
        config = base.config
    config = load_config(workload.model) if config is None else config
    _refuse(config, workload, "" if live is not None else quantisation_of(config))
    with torch.device("meta"), compat.transformers.uninitialised():
        model = _make(config, workload, None if base is None else compat.distributed.plain_class(base))
        if live is not None:
            model = _like_live(model, live, base)
        stacks = _cut(model)  # before adapters, which are slow to add
        if live is None:
            model = _prepared(model, workload)
    return _on_fakes(model, stacks)


def _like_live(made: nn.Module, live: nn.Module, base: Any) -> nn.Module:
    """Give a new model the quantised layers, adapters and types of a live one, and freeze what is frozen in it."""
    places = getattr(base, "hf_device_map", None) or {}
    away = [name for name, place in places.items() if str(place) in ("cpu", "disk")]
    if away and len(away) < len(places):
        raise HfCkptError(f"`device_map` keeps weights of {away[0]} in host memory or on a disk: {NO_PLAN}")
    if getattr(base, "is_loaded_in_4bit", False):
        stored = base.config.quantization_config
        quantise(made, base.dtype, double=bool(getattr(stored, "bnb_4bit_use_double_quant", False)))
    made = add_adapters(made, adapters_of(live))
    like_bitsandbytes(made, QuantisedLinear)
    inner = base_model(made)
    ours = dict((*inner.named_parameters(), *inner.named_buffers()))
    for name, value in (*base.named_parameters(), *base.named_buffers()):
        mine = ours.get(plain_name(name))
        if mine is None or mine.shape != value.shape:
            shape = list(value.shape)
            raise HfCkptError(f"its config and adapters do not say that it has {name} of shape {shape}: {NO_PLAN}")
        mine.data = mine.data.to(value.dtype)
        mine.requires_grad_(value.requires_grad)
    return made


def _cut(model: nn.Module) -> tuple[Stack, ...]:
    """Leave only the first and the last block of each stack in a model, and two of each kind between them.

    Blocks of one kind need the same memory and time. There are two, because what runs beside the first of two alike may
    differ; the second stands for all others.
    """
    found = find_blocks(model)
    frozen = frozen_prefix(model, found)
    lists: Any = dict(plain_modules(found.base))
    stacks = []
    for stack, owner in zip(dict.fromkeys(block.stack for block in found.blocks), found.owners, strict=True):
        blocks = tuple(block for block in found.blocks if block.stack == stack)
        container, _, index = blocks[0].name.rpartition(".")
        if not index.isdigit():
            raise HfCkptError(f"the block {blocks[0].name!r} of {found.model} stands in no list: {NO_PLAN}")
        config: Any = getattr(owner, "config", found.base.config)
        types = list(getattr(config, "layer_types", None) or [])
        types = types if len(types) == len(blocks) else []
        kinds = [
            (_look_of(found.modules[block.name], place), types[place:][:1], block.name in frozen)
            for place, block in enumerate(blocks)
        ]
        places, like = [0], [0]
        for place, kind in list(enumerate(kinds))[1:]:
            alike = [other for other in places[1:] if kinds[other] == kind]
            is_new = place == len(kinds) - 1 or len(alike) < 2
            places += [place] if is_new else []
            like.append(len(places) - 1 if is_new else places.index(alike[1]))
        kept = [lists[container][place] for place in places]
        lists[container]._modules.clear()
        lists[container].extend(kept)
        if types and len(places) < len(types):
            compat.transformers.set_layer_types(config, [types[place] for place in places])
        for key in depth_keys(config, stack):
            config.update({key: len(places)})
        stacks.append(Stack(container, blocks, tuple(like)))
    return tuple(stacks)


def _look_of(block: nn.Module, place: int) -> str:
    """What blocks of one kind have in common. What follows a block with strides is smaller than its input, so each of
    these is of its own kind."""
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()]
    strides = [max(part.stride) > 1 for part in block.modules() if isinstance(part, (nn.Conv1d, nn.Conv2d))]
    return repr((parameters, [type(part).__name__ for part in block.modules()], place if any(strides) else None))


def _on_fakes(model: nn.Module, stacks: tuple[Stack, ...]) -> ShallowModel:
    """A model whose other blocks are gone, with fake tensors in place of its own."""
    found = find_blocks(model)
    fake = compat.torch.FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model.to_empty(device="cpu")
    found.base.tie_weights()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # caches know layers by their numbers in the real model
    modules = dict(plain_modules(found.base))
    rest = {id(tensor) for block in found.modules.values() for tensor in (*block.parameters(), *block.buffers())}
    inside, buffers = [], sum(buffer.nbytes for buffer in model.buffers() if id(buffer) not in rest)
    for stack in stacks:
        container: Any = modules[stack.container]
        inside += [_sizes(container[place].parameters()) for place in stack.like]
        buffers += sum(buffer.nbytes for place in stack.like for buffer in container[place].buffers())
    outside = _sizes(parameter for parameter in model.parameters() if id(parameter) not in rest)
    return ShallowModel(fake, found.base, stacks, outside, tuple(inside), buffers)


def _sizes(parameters: Iterable[nn.Parameter]) -> Tensors:
    return tuple((tuple(p.shape), p.element_size(), p.requires_grad) for p in parameters)


# --- a model as a workload describes it -------------------------------------------------------------------------------


def load_config(name: str) -> Any:
    """The config of a preset, a folder, a hub id, a `config.json`, or a GGUF file.

    Raises `HfCkptError` if none can be read. GGUF files need the package gguf.
    """
    path = presets().get(name, Path(name))
    try:
        if path.suffix == ".gguf" and path.is_file():
            return transformers.AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        return transformers.AutoConfig.from_pretrained(path if path.exists() else name)
    except Exception as error:  # configs validate themselves, with errors of all kinds
        near = difflib.get_close_matches(name.lower().rpartition("/")[2], presets(), n=2)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Presets are {', '.join(presets())}."
        reason = f"cannot read a model's config from {shown(name)}: {reason_of(error)}."
        raise HfCkptError(f"{reason}\n{hint} A folder, a config.json or a hub id is a model, too.") from error


def _make(config: Any, workload: Question, kind: Any = None) -> nn.Module:
    """A model of a class, by default the workload's, whose blocks are not changed yet."""
    names = [workload.architecture] if workload.architecture else config.architectures or []
    classes = [getattr(transformers, name, None) for name in names]
    model_class: Any = kind or next((known for known in classes if hasattr(known, "_from_config")), None)
    if workload.architecture and model_class is None:
        raise HfCkptError(f"transformers has no model class {workload.architecture!r}.")
    model_class = model_class or transformers.AutoModelForCausalLM
    # Under FSDP2, unsharded weights have their compute type.
    dtype = DTYPES[(workload.autocast_name if workload.sharded else None) or workload.dtype]
    attention = "sdpa" if workload.attention.startswith("flash_attention") else workload.attention  # as much is saved
    if attention == "sdpa" and not getattr(model_class, "_supports_sdpa", True):
        attention = "eager"  # such as T5 before transformers 5
    build = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    config = copy.deepcopy(config)
    for name in _CHANCES:
        if hasattr(config, name):
            setattr(config, name, type(getattr(config, name))(0))
    try:
        model: nn.Module = build(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # models do not validate configs: any error may follow
        raise HfCkptError(f"{workload.model} cannot be made from its config: {reason_of(error)}.") from error
    base_model(model).tie_weights()  # transformers skips this together with weight initialisation
    return model


def _prepared(model: nn.Module, workload: Question) -> nn.Module:
    """Quantise the base of a model and add adapters, as the workload says."""
    if workload.lora is None:
        return model
    from peft import LoraConfig, prepare_model_for_kbit_training

    if workload.load_in_4bit:
        quantise(model, DTYPES[workload.dtype], double=workload.double_quant)
    if workload.prepared:
        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    dropout = 0.0 if workload.trainer == "dpo" else workload.lora_dropout
    targets = workload.lora_targets if isinstance(workload.lora_targets, str) else list(workload.lora_targets)
    lora = LoraConfig(r=workload.lora, target_modules=targets, lora_dropout=dropout)
    model = add_adapters(model, {"default": lora})
    like_bitsandbytes(model, QuantisedLinear)
    for parameter in model.parameters():
        if workload.load_in_4bit and workload.trainer is not None and parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def quantisation_of(config: Any) -> str:
    """How a checkpoint's weights are quantised: `4 bits` by bitsandbytes, the name of another method, or empty."""
    stored = getattr(config, "quantization_config", None) or {}
    keys = stored if isinstance(stored, Mapping) else stored.to_dict()
    method = keys.get("quant_method", "")
    return "4 bits" if keys.get("load_in_4bit") else str(getattr(method, "value", method))


def _refuse(config: Any, workload: Question, method: str) -> None:
    """Raise `HfCkptError` for too long sequences, and for weights that are quantised by another method than is said."""
    most = learned_positions(config)
    if most is not None and workload.tokens > most:
        raise HfCkptError(f"{workload.model} has positions for {most} tokens, but {workload.tokens} are asked for.")
    if method == "4 bits" and not workload.load_in_4bit:
        raise HfCkptError(f"the weights of {workload.model} are in 4 bits: give load_in_4bit, and the rank (lora).")
    if method not in ("", "4 bits", "mxfp4"):
        raise HfCkptError(f"the weights of {workload.model} are quantised by {method}: {NO_PLAN}")
