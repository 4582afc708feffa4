"""A shallow model on fake tensors, from a config, that a forecast measures in place of the real one.

It has the first block of every stack, two further blocks of each kind, and the last block. Fake tensors have shapes and
types but no values, so neither weights nor a device are needed. `ShallowModel.likes` says which of these blocks stands
for a block of the real model.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import difflib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_ckpt import compat
from hf_ckpt.attach.attach import detach
from hf_ckpt.compat.peft import add_adapters, like_bitsandbytes
from hf_ckpt.errors import HfCkptError, reason_of, shown
from hf_ckpt.forecast.batches import DTYPES, NO_PLAN
from hf_ckpt.forecast.quantised import EightBitLinear, QuantisedLinear, quantise
from hf_ckpt.forecast.question import PRESETS, Question
from hf_ckpt.models.blocks import FoundBlocks, base_model, find_blocks
from hf_ckpt.models.families import depth_keys
from hf_ckpt.spec.plan import Block


class TensorSize(NamedTuple):
    """The size of a parameter."""

    shape: tuple[int, ...]
    element_bytes: int
    trainable: bool


Tensors = tuple[TensorSize, ...]


@dataclasses.dataclass(frozen=True)
class ShallowModel:
    """A model with few blocks on fake tensors, and the sizes of the real one."""

    fake: compat.torch.FakeTensorMode
    """The mode that its tensors belong to."""
    base: compat.transformers.PreTrainedModel
    """The model."""
    likes: Mapping[Block, str]
    """Block of the real model -> name of the block of this model that stands for it; stack after stack."""
    outside: Tensors
    """The parameters outside the blocks."""
    inside: tuple[Tensors, ...]
    """The parameters of each block of the real model, in the order of `likes`."""
    measured: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """The steps that `run` has measured on it."""

    @property
    def tensors(self) -> Tensors:
        """All parameters of the real model."""
        return tuple(tensor for part in (self.outside, *self.inside) for tensor in part)


def nbytes(tensors: Iterable[TensorSize]) -> int:
    """Bytes of parameters."""
    return sum(math.prod(tensor.shape) * tensor.element_bytes for tensor in tensors)


def kv_bytes(config: Any, training: Question) -> int:
    """Most bytes of one layer's keys and values while completions of all micro-steps are generated.

    As many as 2 x heads x head size x tokens x rows x bytes of an element; less with a sliding window.
    """
    text = config.get_text_config(decoder=True)
    heads: int = text.num_attention_heads
    head_size: int = getattr(text, "head_dim", None) or text.hidden_size // heads
    rows = training.batch * training.accumulation  # `steps_per_generation` of GRPOConfig is the accumulation
    size = DTYPES[training.autocast_name or training.dtype].itemsize
    return (
        2 * (getattr(text, "num_key_value_heads", None) or heads) * head_size * (training.generation or 0) * rows * size
    )


# --- from a config ----------------------------------------------------------------------------------------------------


def shallow_model(training: Question, config: Any = None) -> ShallowModel:
    """The shallow model of a training, with its adapters.

    Args:
        training: what is trained.
        config: of the model, instead of the one that the training names; or the model itself.

    Raises `HfCkptError` if there is no such config or class, or if sequences exceed the model's positions.
    """
    if isinstance(config, nn.Module):
        _refuse(base_model(config).config, training)
        model = _copy_on_meta(config)
        if training.way.deepspeed or (training.sharded and training.autocast_name):
            model.to(DTYPES[training.autocast_name or training.dtype])  # unsharded weights have their compute type
        return _on_fakes(model, _leave_stand_ins(model))
    config = load_config(training.model) if config is None else config
    _refuse(config, training)
    # On `meta`, 70 billion parameters take no memory. Those that are left become fake tensors, which costs time for
    # each.
    with torch.device("meta"), compat.transformers.no_init_weights():
        model = _make(config, training)
        likes = _leave_stand_ins(model)  # before adapters, which are slow to add
        model = _prepared(model, training)
    if training.way.deepspeed:  # adapters, too; its engine calls `module.bfloat16()`
        model.to(DTYPES[training.dtype])
    return _on_fakes(model, likes)


def _leave_stand_ins(model: nn.Module) -> dict[Block, str]:
    """Leave only the blocks of a model that stand for others. Returns the `likes` of the shallow model."""
    all_blocks = find_blocks(model)
    frozen = set(all_blocks.frozen)
    likes: dict[Block, str] = {}
    for stack in _stacks(all_blocks):
        # Blocks below all that is trained have no backward, so they need other memory than their like.
        modules = [all_blocks.modules[block.name] for block in stack.blocks]
        # Each convolution of a recording shortens it, so none stands for another.
        places_of_strides = [place if _shortens(module) else None for place, module in enumerate(modules)]
        frozen_blocks = [block.name in frozen for block in stack.blocks]
        looks = [*zip(map(_look_of, modules), frozen_blocks, places_of_strides, strict=True)]
        places = _stand_ins(list(itertools.zip_longest(looks, stack.types)))
        kept = sorted(set(places))
        likes |= {block: stack.name_at(kept.index(place)) for block, place in zip(stack.blocks, places, strict=True)}
        stack.leave(kept)
    return likes


class _Stack:
    """The blocks of one stack in their list, from which some can be taken."""

    def __init__(self, all_blocks: FoundBlocks, name: str, lists: Mapping[str, Any]) -> None:
        self.blocks = [block for block in all_blocks.blocks if block.stack == name]
        self._name = name
        self._container, _, index = self.blocks[0].name.rpartition(".")
        if not index.isdigit():
            block = f"block {self.blocks[0].name!r} of {all_blocks.class_name}"
            raise HfCkptError(f"the {block} is in no ModuleList: {NO_PLAN}")
        self._list = lists[self._container]
        self._modules = list(self._list)
        self._config: Any = getattr(all_blocks.runners[name], "config", all_blocks.base.config)
        types = list(getattr(self._config, "layer_types", None) or [])
        self.types = types if len(types) == len(self.blocks) else []
        """The type of each block's layer; empty if the config has none."""

    def name_at(self, place: int) -> str:
        """The name of the block at a place of the list."""
        return f"{self._container}.{place}"

    def leave(self, places: Sequence[int]) -> None:
        """Leave only the blocks at these places, of those that there were at first."""
        self._list._modules.clear()
        self._list.extend([self._modules[place] for place in places])
        # The config follows, because models read it while they run: `self.layers[: self.config.num_hidden_layers]`
        # (modeling_llama.py), and the mask that each of `layer_types` needs.
        if self.types:
            compat.transformers.set_layer_types(self._config, [self.types[place] for place in places])
        for key in depth_keys(self._config, self._name):
            self._config.update({key: len(places)})


def _stacks(all_blocks: FoundBlocks) -> list[_Stack]:
    return [_Stack(all_blocks, name, all_blocks.named) for name in all_blocks.runners]


@contextlib.contextmanager
def only(model: ShallowModel, names: Collection[str]) -> Iterator[dict[str, str]]:
    """Leave only some blocks of a shallow model, for a while. Yields (name of each meanwhile -> its name)."""
    stacks = _stacks(find_blocks(model.base))
    meanwhile: dict[str, str] = {}
    try:
        for stack in stacks:
            places = [place for place, block in enumerate(stack.blocks) if block.name in names]
            meanwhile |= {stack.name_at(number): stack.blocks[place].name for number, place in enumerate(places)}
            stack.leave(places)
        yield meanwhile
    finally:
        for stack in stacks:
            stack.leave(range(len(stack.blocks)))


def kinds_of(model: ShallowModel) -> dict[str, Any]:
    """Name of each block -> what blocks have in common that cost the same under every action."""
    all_blocks = find_blocks(model.base)
    kinds: dict[str, Any] = {}
    for stack in _stacks(all_blocks):
        for block, kind in itertools.zip_longest(stack.blocks, stack.types):
            module = all_blocks.modules[block.name]
            trained = tuple(parameter.requires_grad for parameter in module.parameters())
            kinds[block.name] = block.stack, kind, _look_of(module), trained
    return kinds


def _stand_ins(kinds: Sequence[Any]) -> list[int]:
    """For each block of a stack, of these kinds, the place of the block that stands for it: `0 1 2 2 2 5`.

    Blocks of one kind need the same memory and time. Two of them stay, because what runs beside the first of two alike
    may differ; the second stands for all others. Both ends of the stack stand for themselves: beside them runs
    something that is no block, such as the embedding or the head.
    """
    kept: list[int] = []
    stand_ins = []
    for place, kind in enumerate(kinds):
        alike = [other for other in kept[1:] if kinds[other] == kind]
        if place in (0, len(kinds) - 1) or len(alike) < 2:
            kept.append(place)
            stand_ins.append(place)
        else:
            stand_ins.append(alike[1])
    return stand_ins


def _shortens(block: nn.Module) -> bool:
    """Whether a block has a convolution over time that leaves out steps."""
    return any(isinstance(part, nn.Conv1d) and part.stride != (1,) for part in block.modules())


def _look_of(block: nn.Module) -> str:
    """What blocks of one kind have in common."""
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()]
    return repr((parameters, [type(part).__name__ for part in block.modules()]))


def _on_fakes(model: nn.Module, likes: Mapping[Block, str]) -> ShallowModel:
    """A model whose other blocks are gone, with fake tensors in place of its own."""
    all_blocks = find_blocks(model)
    fake = compat.torch.FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model.to_empty(device="cpu")  # also to plan for a GPU, which this machine may not have
    all_blocks.base.tie_weights()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # caches know layers by their numbers in the real model
    of_blocks = {id(parameter) for block in all_blocks.modules.values() for parameter in block.parameters()}
    outside = _sizes(parameter for parameter in model.parameters() if id(parameter) not in of_blocks)
    inside = tuple(_sizes(all_blocks.named[name].parameters()) for name in likes.values())
    return ShallowModel(fake, all_blocks.base, likes, outside, inside)


def _sizes(parameters: Iterable[nn.Parameter]) -> Tensors:
    return tuple(TensorSize(tuple(p.shape), p.element_size(), p.requires_grad) for p in parameters)


# --- from a live model ------------------------------------------------------------------------------------------------

_OF_ADAPTERS = ("lora", "lora_targets", "lora_dropout")
OF_LIVE = {"architecture", "attention", "dtype", "load_in_4bit", "load_in_8bit", "double_quant", *_OF_ADAPTERS}
"""Fields that a live model answers by itself."""


def fields_of_live(model: nn.Module) -> dict[str, Any]:
    """The fields of a question that a live model answers."""
    base = base_model(model)
    sizes: collections.Counter[torch.dtype] = collections.Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel() if parameter.is_floating_point() else 0
    names = {dtype: name for name, dtype in DTYPES.items()}
    fields = {"model": base.config.model_type, "attention": base.config._attn_implementation}
    fields |= {"architecture": type(base).__name__, "dtype": names.get(max(sizes, key=sizes.__getitem__), "float32")}
    ranks = [config.r for config in getattr(model, "peft_config", {}).values() if hasattr(config, "r")]
    four: list[Any] = [module for module in model.modules() if _bits_of(module) == 4]
    nested = any(module.weight.quant_state.nested for module in four)
    eight = any(_bits_of(module) == 8 for module in model.modules())
    fields |= {"load_in_4bit": bool(four), "double_quant": nested, "load_in_8bit": eight}
    return {**fields, "lora": next(iter(ranks), None)}


def _bits_of(module: nn.Module) -> int | None:
    """The bits of an element of a layer of bitsandbytes; None for other modules."""
    # By name, because a model that is not quantised must not wait for the import of bitsandbytes.
    bits = {"Linear4bit": 4, "Linear8bitLt": 8}.get(type(module).__name__)
    return bits if isinstance(module, nn.Linear) else None


def _leave_nothing_to_chance(owner: Any) -> None:
    """Turn off, in a config or a module, what depends on random values: which blocks run, and what is masked."""
    for chance in compat.transformers.LAYER_DROP:
        if getattr(owner, chance, None):
            setattr(owner, chance, 0.0)
    if getattr(owner, "apply_spec_augment", False):  # masks a few steps of a recording
        owner.apply_spec_augment = False


def _copy_on_meta(model: nn.Module) -> nn.Module:
    """A copy of a live model without its values, its hooks, and its plan. Raises `HfCkptError` if it has none."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter.data, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        copied: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:  # wrappers that hold processes, files or graphs refuse it in ways of their own
        raise HfCkptError(f"{type(model).__name__} cannot be copied: {reason_of(error)}. Give its config.") from error
    detach(copied)
    for name, module in model.named_modules():
        part: Any = copied.get_submodule(name)
        _leave_nothing_to_chance(part)
        _leave_nothing_to_chance(vars(part).get("config"))
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()  # they are of code that must not run here
        bits = _bits_of(module)
        if bits is not None:
            quantised: Any = module
            source = nn.Linear(quantised.in_features, quantised.out_features, bias=False, device="meta")
            source.bias = part.bias
            layer: nn.Module = EightBitLinear(source)
            if bits == 4:
                compute = quantised.compute_dtype or torch.bfloat16
                layer = QuantisedLinear(source, compute, double=quantised.weight.quant_state.nested)
            copied.set_submodule(name, layer)
    return copied


# --- a model as a question describes it -------------------------------------------------------------------------------


def load_config(name: str) -> Any:
    """The config of a preset, a folder, a hub id or a `config.json`. Raises `HfCkptError` if none can be read."""
    path = PRESETS.get(name.lower(), Path(name))
    source = path if path.exists() else name
    try:
        return transformers.AutoConfig.from_pretrained(source)
    except Exception as error:  # configs validate themselves, with errors of all kinds
        reason = f"cannot read a model's config from {shown(name)}: {reason_of(error)}."
        presets = difflib.get_close_matches(name.lower(), PRESETS) or PRESETS
        raise HfCkptError(f"{reason}\nUse a folder, a config.json, a hub id or {', '.join(presets)}.") from error


_ANY_CLASS = "AutoModelForCausalLM"
"""The class for a config that names none, of a family without a causal LM in transformers; remote code may have one."""


def _class_of(config: Any) -> str:
    """The name of the model class of a config: the class that it names, or else the causal LM of its family."""
    of_family: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, _ANY_CLASS)
    return next(iter(config.architectures or []), of_family)


def refuse_other_config(model_class: Any, config: Any, training: Question) -> None:
    """Raise `HfCkptError` if a class that failed takes the config of another family. Some classes take several."""
    takes = getattr(model_class, "config_class", None)
    if takes is not None and not isinstance(config, takes):
        raise HfCkptError(
            f"architecture {model_class.__name__} takes the config of a {takes.model_type} model, but that of "
            f"{training.model} is for a {config.model_type} model: use one of its classes, such as {_class_of(config)}."
        )


def _make(config: Any, training: Question) -> nn.Module:
    """A model of the training's class, whose blocks are not changed yet."""
    name = training.architecture or _class_of(config)
    model_class: Any = getattr(transformers, name, None)
    build = getattr(model_class, "_from_config", None) or getattr(model_class, "from_config", None)
    if build is None:
        raise HfCkptError(f"transformers has no model class {name!r}: {NO_PLAN}")
    # Under FSDP, unsharded weights have their compute type.
    dtype = DTYPES[(training.autocast_name if training.sharded else None) or training.dtype]
    attention = "sdpa" if training.attention.startswith("flash_attention") else training.attention  # as much is saved
    if attention == "sdpa" and not getattr(model_class, "_supports_sdpa", True):
        attention = "eager"  # such as T5 before transformers 5
    config = copy.deepcopy(config)
    _leave_nothing_to_chance(config)
    try:
        model: nn.Module = build(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # models do not validate configs: any error may follow
        refuse_other_config(model_class, config, training)
        unnamed = ", which names no class: give its `architecture`" if name == _ANY_CLASS else ""
        raise HfCkptError(f"{training.model} cannot be made from its config{unnamed}: {reason_of(error)}.") from error
    base_model(model).tie_weights()  # transformers skips this together with weight initialisation
    return model


def _prepared(model: nn.Module, training: Question) -> nn.Module:
    """Quantise the base of a model and add adapters, as the training has them."""
    if training.lora is None:
        return model
    from peft import LoraConfig, prepare_model_for_kbit_training

    if training.bits:
        quantise(model, DTYPES[training.dtype], bits=training.bits, double=training.double_quant)
    if training.prepared:
        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    dropout = 0.0 if training.trainer == "dpo" else training.lora_dropout  # `disable_dropout` of DPOConfig is on
    targets = training.lora_targets if isinstance(training.lora_targets, str) else list(training.lora_targets)
    lora = LoraConfig(r=training.lora, target_modules=targets, lora_dropout=dropout)
    model = add_adapters(model, lora)
    like_bitsandbytes(model, QuantisedLinear, bits=4)
    like_bitsandbytes(model, EightBitLinear, bits=8)
    # "When using QLoRA, the PEFT adapter weights are converted to bf16" (trl/trainer/sft_trainer.py).
    for parameter in model.parameters():
        if training.bits and training.trainer is not None and parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _refuse(config: Any, training: Question) -> None:
    """Raise `HfCkptError` for weights that are quantised by another method than is said."""
    stored = getattr(config, "quantization_config", None) or {}
    keys = stored if isinstance(stored, Mapping) else stored.to_dict()
    bits = next((bits for bits in (4, 8) if keys.get(f"load_in_{bits}bit")), None)
    if bits is not None:
        if training.bits != bits:
            option = f"load_in_{bits}bit, and the rank (lora)"
            raise HfCkptError(f"the weights of {training.model} are in {bits} bits: give {option}.")
    elif keys.get("quant_method", "mxfp4") != "mxfp4":  # MXFP4 is dequantised for training
        raise HfCkptError(f"the weights of {training.model} are quantised by {keys['quant_method']}: {NO_PLAN}")
