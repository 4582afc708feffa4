"""Find the blocks of a model.

PEFT, DDP, FSDP, DeepSpeed and torch.compile wrap models and rename their modules. The functions here accept wrapped
models, and return names without the parts that wrappers add.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator

from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import NoBlocksError, OwnerConflictError
from hf_ckpt.models.families import FAMILIES, family_of
from hf_ckpt.spec.plan import Block


@dataclasses.dataclass(frozen=True)
class FoundBlocks:
    """The blocks of a model, and the modules that they belong to."""

    base: compat.transformers.PreTrainedModel
    """The base model: the outermost PreTrainedModel inside any wrappers."""
    family: str
    """Name of the model's family, or `generic`."""
    blocks: tuple[Block, ...]
    """Every block, stack after stack, in the order in which they run."""
    modules: dict[str, nn.Module]
    """Block name -> module."""
    runners: dict[str, nn.Module]
    """Stack -> the module whose forward runs it, in the order in which stacks run."""
    named: dict[str, nn.Module]
    """Every module of the base model, by its name without the segments that wrappers add."""
    outer: nn.Module
    """The model as it was given, in its wrappers."""

    @functools.cached_property
    def head(self) -> nn.Module | None:
        """The projection onto the vocabulary; None for models without one, such as classifiers."""
        return vocabulary_head(self.base)

    @functools.cached_property
    def frozen(self) -> tuple[str, ...]:
        """The names of the blocks below the first trainable parameter; autograd saves nothing in them.

        Parameters count in the order of their registration, which for these models is the order of their use.
        """
        # By id, because `==` of tensors compares values.
        inside = {id(parameter) for parameter in self.base.parameters()}
        if any(parameter.requires_grad and id(parameter) not in inside for parameter in self.outer.parameters()):
            return ()  # something outside passes trained inputs to the base model, such as prompt tuning
        parameters = {plain_name(name): parameter for name, parameter in self.base.named_parameters()}
        below: set[str] = set()
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                break
            below.add(name)
        frozen: list[str] = []
        for block in self.blocks:
            names = {name for name in parameters if name.startswith(f"{block.name}.")}
            if names and names <= below:  # a block without parameters may come anywhere
                frozen.append(block.name)
        return tuple(frozen)

    @functools.cached_property
    def carriers(self) -> dict[str, nn.Module]:
        """The modules with a checkpointing flag, by name: blocks, and also stacks and T5's attentions."""
        flag, _ = compat.transformers.SWITCHES
        return {name: module for name, module in self.named.items() if hasattr(module, flag)}

    @property
    def class_name(self) -> str:
        """Class name of the base model."""
        return compat.distributed.plain_class(self.base).__name__

    @property
    def around(self) -> dict[str, nn.Module]:
        """The modules that hold blocks, by name: the base model, models and modules that run stacks, and lists."""
        lists = {name.rpartition(".")[0] for name in self.modules}
        return {
            name: module
            for name, module in self.named.items()
            if not name or any(f"{path}.".startswith(f"{name}.") for path in lists)
        }


def base_model(model: nn.Module) -> compat.transformers.PreTrainedModel:
    """Return the PreTrainedModel inside PEFT, DDP, FSDP, DeepSpeed and torch.compile wrappers.

    Raises `NoBlocksError` if there is none, or if there are several side by side.
    """
    if not isinstance(model, nn.Module):
        raise NoBlocksError(f"a model must be a torch.nn.Module, but is {type(model).__name__} instead.")
    models = list({id(inner): inner for inner in outermost_models(model)}.values())  # wrappers may hold it twice
    if len(models) == 1:
        return models[0]
    if models:
        kinds = ", ".join(type(inner).__name__ for inner in models)
        raise NoBlocksError(
            f"{type(model).__name__} holds {len(models)} models ({kinds}); install hf_ckpt on each of them."
        )
    raise NoBlocksError(
        f"{type(model).__name__} is not a Hugging Face PreTrainedModel and contains none. {_supported_models()}"
    )


def vocabulary_head(base: nn.Module) -> nn.Module | None:
    """Return a model's projection onto the vocabulary; None for models without one, such as classifiers."""
    head = getattr(base, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Module) else None


def find_blocks(model: nn.Module) -> FoundBlocks:
    """Return the blocks of a model: its repeated transformer layers.

        for block in hf_ckpt.find_blocks(model).blocks:
            print(block.stack, block.index, block.name)  # decoder 0 model.layers.0

    A block is an outermost `GradientCheckpointingLayer` of transformers. A list of blocks is a stack. The model's
    `Family` names the stacks; in a model of an unknown family, and of two stacks of one name, the path of the list is
    the name.

    Args:
        model: a `PreTrainedModel`, plain or wrapped by PEFT, DDP, FSDP, DeepSpeed or torch.compile.

    Raises:
        NoBlocksError: the model has no blocks, or it is not a `PreTrainedModel` and does not contain exactly one.
        OwnerConflictError: a block is wrapped by torch's `checkpoint_wrapper`.
    """
    base = base_model(model)
    family = family_of(base.config)
    named: dict[str, nn.Module] = {}
    containers: dict[str, dict[str, nn.Module]] = {}
    """Path of a list of blocks -> path of a block -> block."""
    last = ""
    for wrapped_name, module in base.named_modules():  # parts of a module follow it directly
        name = plain_name(wrapped_name)
        named[name] = module  # a wrapper and the module in it have the same name; the innermost comes last
        if _is_block(module):
            _refuse_wrapped(wrapped_name)
            if wrapped_name and not wrapped_name.startswith(f"{last}."):  # not inside another block
                last = wrapped_name
                containers.setdefault(name.rpartition(".")[0], {})[name] = module
    if not containers:
        model_type = str(getattr(base.config, "model_type", ""))
        raise NoBlocksError(
            f"{type(base).__name__} (model_type {model_type!r}) has no blocks built on GradientCheckpointingLayer. "
            f"{_supported_models()}"
        )
    # Modules are registered in any order. The family has the order in which stacks run.
    names = {container: family.name_stack(container, containers) for container in containers}
    in_order = [name for name, _ in family.stacks]
    in_order += [name for name in names.values() if name not in in_order]  # those that the family does not name
    # A model may hold two of a family, such as a draft model beside it. Then both stacks are called by their paths.
    is_shared = {name: count > 1 for name, count in Counter(names.values()).items()}
    stacks = {container: container if is_shared[name] else name for container, name in names.items()}
    blocks: list[Block] = []
    modules: dict[str, nn.Module] = {}
    runners: dict[str, nn.Module] = {}
    for container in sorted(containers, key=lambda container: in_order.index(names[container])):
        for index, (name, module) in enumerate(containers[container].items()):
            kind = compat.distributed.plain_class(module).__name__
            blocks.append(Block(name, stacks[container], index, kind))
        modules.update(containers[container])
        runner = container
        while isinstance(named[runner], (nn.ModuleList, nn.ModuleDict)):  # a list has no forward
            runner = runner.rpartition(".")[0]
        runners[stacks[container]] = named[runner]
    return FoundBlocks(base, family.name, tuple(blocks), modules, runners, named, model)


def outermost(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (qualified name, module) of each wanted module inside a model, without those inside another of them."""
    last = ""
    for name, module in model.named_modules():  # parts of a module follow it directly
        if name and not name.startswith(f"{last}.") and is_wanted(module):
            last = name
            yield name, module


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, compat.transformers.GradientCheckpointingLayer)


def plain_name(name: str) -> str:
    """Return a qualified name without the segments that wrappers add."""
    return ".".join(segment for segment in name.split(".") if segment not in compat.distributed.WRAPPER_SEGMENTS)


def refuse_other_owner(model: nn.Module) -> None:
    """Raise `OwnerConflictError` if torch's checkpoint wrapper is around a block of `model`."""
    for name, module in model.named_modules():
        if _is_block(module):
            _refuse_wrapped(name)


def _refuse_wrapped(name: str) -> None:
    """Raise `OwnerConflictError` if torch's checkpoint wrapper is around the block of this name."""
    if compat.distributed.FOREIGN_OWNER_SEGMENT in name.split("."):
        raise OwnerConflictError(
            f"block {name!r} is already wrapped by torch's checkpoint wrapper, most likely by "
            "`activation_checkpointing: true` in the FSDP settings. Set it to false: checkpointing needs one owner."
        )


def outermost_models(model: nn.Module) -> Iterator[compat.transformers.PreTrainedModel]:
    """Yield every PreTrainedModel in a module that is not inside another one, each time it is reached."""
    if isinstance(model, compat.transformers.PreTrainedModel):  # those inside it, such as its stack, are its parts
        yield model
        return
    for child in model.children():
        yield from outermost_models(child)


def _supported_models() -> str:
    """Return which models hf_ckpt works with, for error messages."""
    rows = "; ".join(f"{family.name}: {', '.join(family.model_types)}" for family in FAMILIES.values())
    return (
        f"Known families: {rows}. Any other PreTrainedModel works if its layers derive from "
        "transformers.modeling_layers.GradientCheckpointingLayer; see hf_ckpt.register_family."
    )
