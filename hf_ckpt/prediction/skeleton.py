"""Creates the skeleton of a model: one block of every kind, on fake tensors, without weights.

It is created from a live model (plain or wrapped) or from a config. A skeleton records the model's real depth and the
kind of each of its blocks; `Skeleton.assembled` builds a model with any sequence of blocks from it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import FoundBlocks, base_model, find_blocks, frozen_prefix, plain_modules
from hf_ckpt.models.families import depth_keys
from hf_ckpt.spec.plan import Block

# Attributes that wrappers and hf_ckpt set on modules of a live model. A copy must run the class's own forward.
_PUT_ON = (
    *("forward", "feed_forward_chunk", "_old_forward", "_hf_hook", "_hf_ckpt", "_compiled_call_impl"),
    *("enable_input_require_grads", "disable_input_require_grads", *compat.ENABLE_NAMES, *compat.DISABLE_NAMES),
    compat.CAPTURING_FLAG,
)
# Hooks that are not copied: they may refer to objects that cannot be copied. A model without weights is neither saved
# nor loaded, so hooks for state dicts are left out, too.
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


@dataclasses.dataclass(frozen=True)
class Weights:
    """The sizes of the parameters of one part of a model."""

    tensors: tuple[tuple[tuple[int, ...], int, bool], ...]
    """For each parameter: (shape, bytes per element, whether it is trainable)."""

    @property
    def nbytes(self) -> int:
        """Bytes of all these parameters."""
        return sum(math.prod(shape) * size for shape, size, _ in self.tensors)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of the trainable parameters."""
        return sum(math.prod(shape) * size for shape, size, trainable in self.tensors if trainable)


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """A kind of block: blocks of one stack are of one kind if they need the same memory and time."""

    module: nn.Module
    """A block of this kind, on fake tensors."""
    weights: Weights
    buffers: int
    """Bytes of the buffers of one block."""
    frozen: bool
    """Whether these blocks come before the first trainable parameter, so that they save nothing."""
    layer_type: str | None
    """These blocks' entry in `layer_types` of their stack's config; None if the config has no such list."""


@dataclasses.dataclass(frozen=True)
class StackShape:
    """One stack: its real blocks, and the kind of each of them."""

    name: str
    container: str
    """Qualified name of the list that holds its blocks."""
    owner: str
    """Qualified name of the module whose forward runs its blocks."""
    blocks: tuple[Block, ...]
    row: tuple[int, ...]
    """The kind of each block, as a position in `kinds`."""
    kinds: tuple[BlockKind, ...]


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """A model without weights and blocks, for tracing; see `skeleton_of` and `skeleton_from_config`."""

    fake: compat.FakeTensorMode
    """The mode that its tensors belong to."""
    base: compat.PreTrainedModel
    """The model on fake tensors; its stacks are empty except within `assembled`."""
    family: str
    """The family row by which its blocks were found, or `generic`."""
    model: str
    """Class name of the model."""
    stacks: tuple[StackShape, ...]
    outside: Weights
    """Parameters outside the blocks."""
    outside_buffers: int
    """Bytes of buffers outside the blocks."""
    switched: bool = False
    """Whether modules inside blocks run as under transformers' own checkpointing."""
    twins: dict[tuple[str, int], list[nn.Module]] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """(container of a stack, kind) -> copies of the block of this kind."""
    runs: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """Cache of `trace.trace_rows`: arguments -> `Run`."""

    @property
    def buffers(self) -> int:
        """Bytes of all buffers of the real model."""
        return self.outside_buffers + sum(stack.kinds[kind].buffers for stack in self.stacks for kind in stack.row)

    @property
    def weights(self) -> Weights:
        """The sizes of all parameters of the real model."""
        inside = (stack.kinds[kind].weights.tensors for stack in self.stacks for kind in stack.row)
        return Weights(tuple(itertools.chain(self.outside.tensors, *inside)))

    def switched_on(self) -> Skeleton:
        """The same model with transformers' own checkpointing switch on inside blocks, see `compat.switched_inside`.

        Returns this skeleton if its blocks have no such modules.
        """
        if not any(compat.switched_inside(kind.module) for stack in self.stacks for kind in stack.kinds):
            return self
        return dataclasses.replace(self, switched=True, twins={}, runs={})

    def _twins(self, stack: StackShape, row: Sequence[int]) -> Iterator[nn.Module]:
        """A block for each kind in `row`, with separate parameters; later rows reuse them."""
        used: collections.Counter[int] = collections.Counter()
        for kind in row:
            made = self.twins.setdefault((stack.container, kind), [])
            if used[kind] == len(made):
                with self.fake, torch.no_grad():
                    made.append(_twin(stack.kinds[kind].module, self.model))
            yield made[used[kind]]
            used[kind] += 1

    @contextlib.contextmanager
    def assembled(self, rows: Sequence[Sequence[int]]) -> Iterator[compat.PreTrainedModel]:
        """A context in which the model has the given blocks, in train mode.

        Args:
            rows: for each stack, the kinds of its blocks, as positions in `StackShape.kinds`.
        """
        modules = dict(plain_modules(self.base))
        configs: dict[int, Any] = {id(m.config): m.config for m in modules.values() if hasattr(m, "config")}
        before = {key: (type(config), copy.deepcopy(vars(config))) for key, config in configs.items()}
        try:
            for config in configs.values():
                if getattr(config, "use_cache", False):  # copies of one block would share a cache entry
                    config.use_cache = False
            for stack, row in zip(self.stacks, rows, strict=True):
                container: Any = modules[stack.container]
                container.extend(self._twins(stack, row))
                owner = modules[stack.owner]
                _set_depth(getattr(owner, "config", self.base.config), [stack.kinds[kind] for kind in row])
            yield self.base.train()
        finally:
            # transformers installs hooks on the current blocks once, and assumes that later blocks have them, too.
            _strip(self.base)
            for stack in self.stacks:
                _empty(modules[stack.container])
            for key, config in configs.items():
                config.__class__, attributes = before[key]
                vars(config).clear()
                vars(config).update(attributes)


def skeleton_of(model: nn.Module) -> Skeleton:
    """The skeleton of a live model, plain or wrapped. Does not read weights. A plan on the model must be paused.

    Raises `NoBlocksError` if no blocks are found, and `HfCkptError` if the model cannot be copied without its weights.
    """
    found = find_blocks(model)
    fake = compat.FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    live = dict(plain_modules(found.base))
    with fake, torch.no_grad():
        for module in (found.base, *found.modules.values()):
            _fake_tensors(module, memo)
        for name in {block.name.rpartition(".")[0] for block in found.blocks}:
            memo[id(live[name])] = nn.ModuleList()
        base = _strip(_copied(found.base, memo, found.model))
        stacks = _stacks(model, found, lambda module: _strip(_copied(module, memo, found.model)))
    inside = {id(parameter) for module in found.modules.values() for parameter in module.parameters()}
    outside = _weights(parameter for parameter in model.parameters() if id(parameter) not in inside)
    held = {id(buffer) for module in found.modules.values() for buffer in module.buffers()}
    buffers = _nbytes(buffer for buffer in model.buffers() if id(buffer) not in held)
    return Skeleton(fake, base, found.family, found.model, tuple(stacks), outside, buffers)


def skeleton_from_config(
    config: Any, make: Callable[[Any], nn.Module], prepare: Callable[[nn.Module], nn.Module] | None = None
) -> Skeleton:
    """The skeleton of a model that does not exist yet, from its config. Creates only as many blocks as are needed to
    have one of every kind.

    Args:
        config: of the whole model.
        make: creates a model from a config; called with a shallower one, on the meta device.
        prepare: changes this model on the meta device, for example adds adapters or freezes weights, and returns it.

    Raises what `skeleton_of` raises.
    """
    types = compat.layer_types(config)
    period = 2 if types is None else max(2, *(types.index(kind) + 1 for kind in types))
    shallow = at_depth(config, period)
    with torch.device("meta"), compat.uninitialised():
        model = make(shallow)
        base_model(model).tie_weights()  # transformers skips this together with weight initialisation
        if prepare is not None:
            model = prepare(model)
    made = skeleton_of(model)
    stacks = []
    for stack in made.stacks:
        depth, first = _depth(config, stack), stack.blocks[0]
        row = tuple(stack.row[_like(index, len(stack.row), types)] for index in range(depth))
        blocks = tuple(Block(f"{stack.container}.{index}", stack.name, index, first.kind) for index in range(depth))
        stacks.append(dataclasses.replace(stack, blocks=blocks, row=row))
    return dataclasses.replace(made, stacks=tuple(stacks))


@contextlib.contextmanager
def own_forward(copied: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of a copied model inside this context, as it was replaced on the live model."""
    vars(copied)["forward"] = forward
    try:
        yield
    finally:
        del vars(copied)["forward"]


def at_depth(config: Any, depth: int) -> Any:
    """A copy of a config that describes a model with at most `depth` blocks in every stack."""
    shallow = copy.deepcopy(config)
    shallow.update({name: min(getattr(config, name), depth) for name in depth_keys(config)})
    types = compat.layer_types(config)
    if types is not None:
        compat.set_layer_types(shallow, types[:depth])
    return shallow


def _depth(config: Any, stack: StackShape) -> int:
    """How many blocks a stack has according to the config; if it does not say, as many as were created."""
    keys = depth_keys(config, stack.name)
    return int(getattr(config, keys[0])) if keys else len(stack.row)


def _like(index: int, made: int, types: Sequence[str] | None) -> int:
    """Which of the first `made` blocks of a stack has the same kind as block `index`."""
    if index < made:
        return index
    return made - 1 if types is None else list(types[:made]).index(types[index])


def _set_depth(config: Any, row: Sequence[BlockKind]) -> None:
    """Make a config describe a stack of these blocks. Models truncate their lists of blocks to the config's depth."""
    for key in depth_keys(config):
        with contextlib.suppress(NotImplementedError):  # derived from others, such as ProphetNet's `num_hidden_layers`
            config.update({key: len(row)})
    compat.set_layer_types(config, [kind.layer_type for kind in row])


def _stacks(model: nn.Module, found: FoundBlocks, fake_block: Callable[[nn.Module], nn.Module]) -> list[StackShape]:
    """The stacks of a live model, with one block of every kind, copied by `fake_block`."""
    frozen = set(frozen_prefix(model, found))
    names = {id(module): name for name, module in plain_modules(found.base)}
    owners = dict(zip(dict.fromkeys(block.stack for block in found.blocks), found.owners, strict=True))
    stacks = []
    for stack, owner in owners.items():
        blocks = tuple(block for block in found.blocks if block.stack == stack)
        types = compat.layer_types(getattr(owner, "config", found.base.config))
        numbers: dict[Any, int] = {}
        kinds: list[BlockKind] = []
        row = []
        for block in blocks:
            module = found.modules[block.name]
            layer_type = types[block.index] if types is not None and len(types) == len(blocks) else None
            look = (
                [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()],
                [type(part) for part in module.modules()],
            )
            key = repr(look), layer_type, block.name in frozen
            if key not in numbers:
                numbers[key] = len(kinds)
                weights, buffers = _weights(module.parameters()), _nbytes(module.buffers())
                kinds.append(BlockKind(fake_block(module), weights, buffers, block.name in frozen, layer_type))
            row.append(numbers[key])
        container, _, place = blocks[0].name.rpartition(".")
        if not place.isdigit():
            raise HfCkptError(
                f"{found.model} cannot be planned for, because its block {blocks[0].name!r} stands in no list of "
                "blocks. `selective`, `full` and other policies need no plan."
            )
        stacks.append(StackShape(stack, container, names[id(owner)], blocks, tuple(row), tuple(kinds)))
    return stacks


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _weights(parameters: Iterable[nn.Parameter]) -> Weights:
    return Weights(tuple((tuple(p.shape), p.element_size(), p.requires_grad) for p in parameters))


def _fake_tensors(module: nn.Module, memo: dict[int, Any]) -> None:
    """Fill `copy.deepcopy`'s `memo` with a fake tensor for every parameter and buffer of a module."""
    for parameter in module.parameters():
        if id(parameter) not in memo:
            fake = torch.empty(parameter.shape, dtype=parameter.dtype)
            memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    plain = (value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor))
    for tensor in (*module.buffers(), *plain):
        memo.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype))


def _twin(module: nn.Module, model: str) -> nn.Module:
    """A copy of a fake block, with separate fake parameters."""
    memo: dict[int, Any] = {}
    _fake_tensors(module, memo)
    return _copied(module, memo, model)


def _copied(module: nn.Module, memo: dict[int, Any], model: str) -> nn.Module:
    """A copy with the objects in `memo` instead of the originals.

    Raises `HfCkptError` if copying fails: it runs the model's own code, which may raise anything.
    """
    try:
        for inner in module.modules():
            memo.update((id(vars(inner)[name]), type(vars(inner)[name])()) for name in _HOOKS)
        copied: nn.Module = copy.deepcopy(module, memo)
        return copied
    except Exception as error:
        raise HfCkptError(
            f"{model} cannot be planned for, because a copy of its {type(module).__name__} without weights cannot be "
            f"made: {type(error).__name__}: {error}"
        ) from error


def _strip(copied: nn.Module) -> nn.Module:
    """Remove hooks, replaced forwards and hf_ckpt's record, so that only the classes' own behaviour is left."""
    for module in copied.modules():
        for name in _PUT_ON:
            vars(module).pop(name, None)
        for name in _HOOKS:
            vars(module)[name] = type(vars(module)[name])()
    return copied


def _empty(container: Any) -> None:
    del container[:]


def refuse_moved_weights(model: nn.Module) -> None:
    """Raise `HfCkptError` for a model with weights that `device_map` has put into host memory or on disk."""
    found = getattr(find_blocks(model).base, "hf_device_map", None) or {}
    away = [name for name, place in found.items() if str(place) in ("cpu", "disk")]
    if away and any(str(place) not in ("cpu", "disk") for place in found.values()):
        raise HfCkptError(
            f"`device_map` keeps weights of {', '.join(away[:3])}{' ...' if away[3:] else ''} in host memory or on a "
            "disk, from where they come again for every forward: such a training cannot be planned for. Take fewer "
            'bits (load_in_4bit), more devices, or a smaller model, and `device_map={"": 0}`.'
        )
