"""A model without weights and without depth: one block of every kind, on fake tensors, to be traced.

From a live model (plain or wrapped) or from its config. A blueprint knows how deep the model really is and which kind
each of its blocks has; `assemble` makes a model with any sequence of blocks out of it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.families import FoundBlocks, base_model, find_blocks, frozen_prefix, plain_modules
from hf_ckpt.plan import Block

# What wrappers and hf_ckpt put on modules of a live model. A copy must run the class's own forward.
_PUT_ON = (
    *("forward", "_old_forward", "_hf_hook", "_hf_ckpt", "_compiled_call_impl"),
    *("enable_input_require_grads", "disable_input_require_grads", *compat.ENABLE_NAMES, *compat.DISABLE_NAMES),
    compat.CAPTURING_FLAG,
)
# FSDP's refer to its states, and those to process groups. A model without weights is neither saved nor loaded.
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters of one part of a model: (elements, bytes an element, trainable) of each."""

    tensors: tuple[tuple[int, int, bool], ...]

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(elements * size for elements, size, _ in self.tensors)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of the trainable ones."""
        return sum(elements * size for elements, size, trainable in self.tensors if trainable)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Blocks of one stack that differ in nothing that memory or time depend on."""

    module: nn.Module
    """One of them, on fake tensors."""
    weights: Weights
    buffers: int
    """Bytes of its buffers."""
    frozen: bool
    """Below the first trainable parameter, where nothing is saved."""
    layer_type: str | None
    """What `config.layer_types` says of it."""


@dataclasses.dataclass(frozen=True)
class StackShape:
    """One stack: its real blocks, and which kind each of them is of."""

    name: str
    container: str
    """Qualified name of the list that holds its blocks."""
    owner: str
    """Qualified name of the module that runs them."""
    blocks: tuple[Block, ...]
    row: tuple[int, ...]
    """Of each block: its kind."""
    kinds: tuple[Kind, ...]


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """See the module."""

    fake: FakeTensorMode
    base: compat.PreTrainedModel
    """On fake tensors; its stacks are empty unless it is `assembled`."""
    family: str
    model: str
    stacks: tuple[StackShape, ...]
    outside: Weights
    """Parameters outside the blocks."""
    outside_buffers: int
    """Bytes of buffers outside the blocks."""

    @property
    def buffers(self) -> int:
        """Bytes of all buffers of the real model."""
        return self.outside_buffers + sum(stack.kinds[kind].buffers for stack in self.stacks for kind in stack.row)

    @property
    def weights(self) -> Weights:
        """Every parameter of the real model."""
        inside = (stack.kinds[kind].weights.tensors for stack in self.stacks for kind in stack.row)
        return Weights(tuple(itertools.chain(self.outside.tensors, *inside)))

    @contextlib.contextmanager
    def assembled(self, rows: Sequence[Sequence[int]]) -> Iterator[compat.PreTrainedModel]:
        """The model with blocks of these kinds, one row a stack, in train mode, for a while."""
        modules = dict(plain_modules(self.base))
        configs = {id(module.config): module.config for module in modules.values() if hasattr(module, "config")}
        before = {key: copy.deepcopy(vars(config)) for key, config in configs.items()}
        try:
            for stack, row in zip(self.stacks, rows, strict=True):
                container: Any = modules[stack.container]
                with self.fake, torch.no_grad():
                    container.extend(_twin(stack.kinds[kind].module, self.model) for kind in row)
                owner = modules[stack.owner]
                _set_depth(getattr(owner, "config", self.base.config), [stack.kinds[kind] for kind in row])
            yield self.base.train()
        finally:
            for stack in self.stacks:
                _empty(modules[stack.container])
            _strip(self.base)  # transformers put its own hooks on these blocks, and believes that it has for all
            for key, config in configs.items():
                vars(config).clear()
                vars(config).update(before[key])


def blueprint_of(model: nn.Module) -> Blueprint:
    """The blueprint of a live model, plain or wrapped; its weights are not read. A plan that is on it must be paused.

    Raises `NoBlocksError` as `find_blocks`, and `HfCkptError` for a model that cannot be copied without its weights.
    """
    found = find_blocks(model)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    live = dict(plain_modules(found.base))
    shards = [shard for unit in compat.shard_units(model) for shard in unit.shards]
    dtypes = {id(shard.parameter): shard.compute for shard in shards}
    with fake, torch.no_grad():
        for module in (found.base, *found.modules.values()):
            _fake_tensors(module, memo, dtypes)
        for name in {block.name.rpartition(".")[0] for block in found.blocks}:
            memo[id(live[name])] = nn.ModuleList()
        base = _strip(_copied(found.base, memo, found.model))
        stacks = _stacks(model, found, lambda module: _strip(_copied(module, memo, found.model)))
        for kind in (kind for stack in stacks for kind in stack.kinds) if shards else ():
            vars(kind.module)[compat.GATHERED] = True
    inside = {id(parameter) for module in found.modules.values() for parameter in module.parameters()}
    outside = _weights(parameter for parameter in model.parameters() if id(parameter) not in inside)
    held = {id(buffer) for module in found.modules.values() for buffer in module.buffers()}
    buffers = _nbytes(buffer for buffer in model.buffers() if id(buffer) not in held)
    return Blueprint(fake, base, found.family, found.model, tuple(stacks), outside, buffers)


def blueprint_from_config(
    config: Any, make: Callable[[Any], nn.Module], prepare: Callable[[nn.Module], nn.Module] | None = None
) -> Blueprint:
    """The blueprint of a model that does not exist: of its blocks, as few are made as have every kind among them.

    Args:
        config: of the whole model.
        make: config -> model; called with a shallower config, on the meta device.
        prepare: model -> model, on the meta device: adapters, freezing.
    """
    depths = {name: getattr(config, name) for name in _DEPTHS if isinstance(getattr(config, name, None), int)}
    types = getattr(config, "layer_types", None)
    period = 2 if types is None else max(2, *(types.index(kind) + 1 for kind in types))
    shallow = at_depth(config, period)
    with torch.device("meta"), compat.uninitialised():
        model = make(shallow)
        base_model(model).tie_weights()  # left out with the weights
        if prepare is not None:
            model = prepare(model)
    made = blueprint_of(model)
    stacks = []
    for stack in made.stacks:
        depth, first = _depth(stack, depths), stack.blocks[0]
        row = tuple(stack.row[_like(index, len(stack.row), types)] for index in range(depth))
        blocks = tuple(Block(f"{stack.container}.{index}", stack.name, index, first.kind) for index in range(depth))
        stacks.append(dataclasses.replace(stack, blocks=blocks, row=row))
    return dataclasses.replace(made, stacks=tuple(stacks))


def at_depth(config: Any, depth: int) -> Any:
    """A copy of a config with `depth` blocks in every stack at most."""
    shallow = copy.deepcopy(config)
    names = [name for name in _DEPTHS if isinstance(getattr(config, name, None), int)]
    shallow.update({name: min(getattr(config, name), depth) for name in names})
    types = getattr(config, "layer_types", None)
    if types is not None:
        shallow.update({"layer_types": list(types[:depth])})
    return shallow


_DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "encoder_layers", "decoder_layers")
"""Keys of configs that say how many blocks a stack has."""


def _depth(stack: StackShape, depths: Mapping[str, int]) -> int:
    own = {"encoder": ("encoder_layers",), "decoder": ("num_decoder_layers", "decoder_layers")}.get(stack.name, ())
    of_all = ("num_hidden_layers", "num_layers", "n_layer")
    return next((depths[name] for name in (*own, *of_all) if name in depths), len(stack.row))


def _like(index: int, made: int, types: Sequence[str] | None) -> int:
    """Which of the blocks that were made stands for block `index`."""
    if index < made:
        return index
    return made - 1 if types is None else list(types[:made]).index(types[index])


def _set_depth(config: Any, row: Sequence[Kind]) -> None:
    """Let a config describe a stack of these blocks; models slice their lists by it."""
    names = [name for name in _DEPTHS if isinstance(getattr(config, name, None), int)]
    config.update({name: len(row) for name in names})
    if getattr(config, "layer_types", None) is not None:
        config.update({"layer_types": [kind.layer_type for kind in row]})


def _stacks(model: nn.Module, found: FoundBlocks, fake_block: Callable[[nn.Module], nn.Module]) -> list[StackShape]:
    """Every stack as it stands, with one fake block of every kind."""
    frozen = set(frozen_prefix(model, found))
    types = getattr(found.base.config, "layer_types", None)
    names = {id(module): name for name, module in plain_modules(found.base)}
    owners = dict(zip(dict.fromkeys(block.stack for block in found.blocks), found.owners, strict=True))
    stacks = []
    for stack, owner in owners.items():
        blocks = tuple(block for block in found.blocks if block.stack == stack)
        numbers: dict[Any, int] = {}
        kinds: list[Kind] = []
        row = []
        for block in blocks:
            module = found.modules[block.name]
            layer_type = types[block.index] if types is not None and block.index < len(types) else None
            look = (
                [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()],
                [type(part) for part in module.modules()],
            )
            key = repr(look), layer_type, block.name in frozen
            if key not in numbers:
                numbers[key] = len(kinds)
                weights, buffers = _weights(module.parameters()), _nbytes(module.buffers())
                kinds.append(Kind(fake_block(module), weights, buffers, block.name in frozen, layer_type))
            row.append(numbers[key])
        container = blocks[0].name.rpartition(".")[0]
        stacks.append(StackShape(stack, container, names[id(owner)], blocks, tuple(row), tuple(kinds)))
    return stacks


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _weights(parameters: Iterable[nn.Parameter]) -> Weights:
    return Weights(tuple((p.numel(), p.element_size(), p.requires_grad) for p in parameters))


def _fake_tensors(module: nn.Module, memo: dict[int, Any], dtypes: Mapping[int, torch.dtype] | None = None) -> None:
    """Fake ones in the place of all parameters and buffers, of the whole shape where they are sharded.

    `dtypes` are those of parameters that are cast when they are gathered.
    """
    for parameter in module.parameters():
        if id(parameter) not in memo:
            fake = torch.empty(parameter.shape, dtype=(dtypes or {}).get(id(parameter), parameter.dtype))
            memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    plain = (value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor))
    for tensor in (*module.buffers(), *plain):
        memo.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype))


def _twin(module: nn.Module, model: str) -> nn.Module:
    """Another block like a fake one, with parameters of its own."""
    memo: dict[int, Any] = {}
    _fake_tensors(module, memo)
    return _copied(module, memo, model)


def _copied(module: nn.Module, memo: dict[int, Any], model: str) -> nn.Module:
    """A copy with what `memo` has in the place of tensors, and of the classes before FSDP2 swapped them.

    Raises `HfCkptError` for one that does not let itself be copied: that is code of others, which may raise anything.
    """
    try:
        swapped = []
        for inner in list(_reached(module, memo)):
            for name, value in vars(inner).items():
                if name in _HOOKS or name.startswith(compat.COMPOSABLE_STATE):
                    memo[id(value)] = type(value)()
            plain = compat.plain_class(inner)
            if type(inner) is not plain:
                memo[id(inner)] = plain.__new__(plain)
                swapped.append(inner)
        for inner in swapped:
            vars(memo[id(inner)]).update(copy.deepcopy(vars(inner), memo))
        copied: nn.Module = copy.deepcopy(module, memo)
        return copied
    except Exception as error:
        raise HfCkptError(
            f"{model} cannot be planned for, because a copy of its {type(module).__name__} without weights cannot be "
            f"made: {type(error).__name__}: {error}"
        ) from error


def _reached(module: nn.Module, memo: Mapping[int, Any]) -> Iterator[nn.Module]:
    """The modules that a copy would be made of."""
    if id(module) not in memo:
        yield module
        for child in module.children():
            yield from _reached(child, memo)


def _strip(copied: nn.Module) -> nn.Module:
    """Leave the classes' own behaviour: no hooks, no forward put on by somebody, no record of hf_ckpt."""
    for module in copied.modules():
        for name in _PUT_ON:
            vars(module).pop(name, None)
        for name in _HOOKS:
            vars(module)[name] = type(vars(module)[name])()
    return copied


def _empty(container: Any) -> None:
    del container[:]
