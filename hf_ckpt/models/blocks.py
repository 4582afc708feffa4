"""Find the blocks of a model, its head, its frozen blocks, and its small modules.

PEFT, DDP, FSDP, DeepSpeed and torch.compile wrap models and rename their modules. The functions here accept wrapped
models, and return names without the parts that wrappers add.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
import weakref
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import NoBlocksError, OwnerConflictError
from hf_ckpt.models.families import CHEAP_EVERYWHERE, FAMILIES, GENERIC, Family, family_of
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
    owners: tuple[nn.Module, ...]
    """The module whose forward runs the stack, for each stack in order."""

    @property
    def model(self) -> str:
        """Class name of the base model."""
        return compat.distributed.plain_class(self.base).__name__


def base_model(model: nn.Module) -> compat.transformers.PreTrainedModel:
    """Return the PreTrainedModel inside PEFT, DDP, FSDP, DeepSpeed and torch.compile wrappers.

    Raises `NoBlocksError` if there is none, or if there are several side by side.
    """
    if not isinstance(model, nn.Module):
        raise NoBlocksError(f"a model must be a torch.nn.Module, but is {type(model).__name__} instead.")
    found = list({id(inner): inner for inner in outermost_models(model)}.values())
    if len(found) == 1:
        return found[0]
    if found:
        kinds = ", ".join(type(inner).__name__ for inner in found)
        raise NoBlocksError(f"{type(model).__name__} holds {len(found)} models ({kinds}); install on each by itself.")
    raise NoBlocksError(f"{type(model).__name__} is no Hugging Face PreTrainedModel and holds none. {_known()}")


def find_blocks(model: nn.Module) -> FoundBlocks:
    """Return the blocks of a model: its repeated transformer layers.

        for block in hf_ckpt.find_blocks(model).blocks:
            print(block.stack, block.index, block.name)  # decoder 0 model.layers.0

    A block is an outermost `GradientCheckpointingLayer` of transformers. A list of blocks is a stack. The model's
    `Family` names the stacks; in a model of an unknown family, the path of the list is the name.

    Args:
        model: a `PreTrainedModel`, plain or wrapped by PEFT, DDP, FSDP, DeepSpeed or torch.compile.

    Raises:
        NoBlocksError: the model has no blocks, or it is not a `PreTrainedModel` and does not contain exactly one.
        OwnerConflictError: a block is wrapped by torch's `checkpoint_wrapper`.
    """
    base = base_model(model)
    row = family_of(base.config)
    refuse_other_owner(base)
    containers: dict[str, list[tuple[str, nn.Module]]] = {}
    outer: list[str] = []
    for name, module in base.named_modules():
        is_block = isinstance(module, compat.transformers.GradientCheckpointingLayer)
        if is_block and not any(name.startswith(f"{other}.") for other in outer):
            outer.append(name)
            plain = plain_name(name)
            containers.setdefault(plain.rpartition(".")[0], []).append((plain, module))
    if not containers:
        model_type = str(getattr(base.config, "model_type", ""))
        raise NoBlocksError(
            f"{type(base).__name__} (model_type {model_type!r}) has no blocks built on GradientCheckpointingLayer. "
            f"{_known()}"
        )
    stacks = {container: _stack_name(container, containers, row) for container in containers}
    in_order = [name for name, _ in row.stacks] if row else []  # stacks that the row does not name come last
    places = {name: in_order.index(name) if name in in_order else len(in_order) for name in stacks.values()}
    all_modules = dict(plain_modules(base))
    blocks: list[Block] = []
    modules: dict[str, nn.Module] = {}
    owners: list[nn.Module] = []
    for container in sorted(containers, key=lambda container: places[stacks[container]]):
        for index, (name, module) in enumerate(containers[container]):
            blocks.append(Block(name, stacks[container], index, _kind(module)))
            modules[name] = module
        owner = container
        while isinstance(all_modules[owner], (nn.ModuleList, nn.ModuleDict)):
            owner = owner.rpartition(".")[0]
        owners.append(all_modules[owner])
    return FoundBlocks(base, row.name if row else GENERIC, tuple(blocks), modules, tuple(owners))


def _stack_name(container: str, containers: Collection[str], row: Family | None) -> str:
    """Name a stack as the family does; else `encoder` or `decoder` if only its path has that word, else its path."""
    for stack, ending in row.stacks if row else ():
        if f".{container}".endswith(f".{ending}"):
            return stack
    for word in ("encoder", "decoder"):
        if word in container.split(".") and sum(word in other.split(".") for other in containers) == 1:
            return word
    return container or "blocks"


def plain_modules(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its qualified name, without the segments that wrappers add.

    A wrapper and the module in it then have the same name; only the innermost, which comes last, is yielded.
    """
    yield from {plain_name(name): module for name, module in base.named_modules()}.items()


def plain_name(name: str) -> str:
    """Return a qualified name without the segments that wrappers add."""
    return ".".join(segment for segment in name.split(".") if segment not in compat.distributed.WRAPPER_SEGMENTS)


def refuse_other_owner(model: nn.Module) -> None:
    """Raise `OwnerConflictError` if torch's checkpoint wrapper is around a block of `model`."""
    for name, module in model.named_modules():
        is_block = isinstance(module, compat.transformers.GradientCheckpointingLayer)
        if is_block and compat.distributed.FOREIGN_OWNER_SEGMENT in name.split("."):
            raise OwnerConflictError(
                f"block {name!r} is already wrapped by torch's checkpoint wrapper, most likely by "
                "`activation_checkpointing: true` in the FSDP settings. Set it to false: checkpointing needs one owner."
            )


def frozen_prefix(model: nn.Module, found: FoundBlocks) -> tuple[str, ...]:
    """Return the names of the blocks below the first trainable parameter of `model`; autograd saves nothing in them.

    Parameters count in the order of their registration, which for these models is the order of their use.
    """
    inside = {id(parameter) for parameter in found.base.parameters()}
    if any(parameter.requires_grad and id(parameter) not in inside for parameter in model.parameters()):
        return ()  # something outside passes trained inputs to the base model, such as prompt tuning
    frozen: list[str] = []
    parameters = [(plain_name(name), parameter) for name, parameter in found.base.named_parameters()]
    first = next((place for place, (_, parameter) in enumerate(parameters) if parameter.requires_grad), len(parameters))
    for block in found.blocks:
        places = [place for place, (name, _) in enumerate(parameters) if name.startswith(f"{block.name}.")]
        if places and max(places) < first:
            frozen.append(block.name)
    return tuple(frozen)


def cheap_modules(found: FoundBlocks, blocks: Collection[str]) -> tuple[nn.Module, ...]:
    """Return the small modules inside the named blocks that `selective` may run again as a whole, each once."""
    inside = (module for name in blocks for module in found.modules[name].modules() if _is_cheap(module, found))
    return tuple({id(module): module for module in inside}.values())


def routers(block: nn.Module) -> tuple[nn.Module, ...]:
    """Return the outermost modules inside a block whose code calls `topk` or `argmax`: they choose experts.

    Adapters call it to choose among their own weights.
    """
    found: list[str] = []
    for name, module in block.named_modules():
        kind: Any = type(module)
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and not compat.peft.is_adapter(kind) and _chooses(kind):
            found.append(name)
    return tuple(block.get_submodule(name) for name in found)


def feed_forwards(block: nn.Module) -> tuple[str, ...]:
    """Return the names of the outermost modules inside a block that may be feed-forwards.

    They take one tensor and nothing else, and have several matrices. Attention takes more, and norms have no matrix.
    Experts are left out, with everything in the same child of the block, because a router sends tokens to them.
    """
    with_experts = [child for child in block.children() if not set(routers(block)).isdisjoint(child.modules())]
    left_out = {inner for child in with_experts for inner in child.modules()}
    found: list[str] = []
    for name, module in block.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        has_forward = type(module).forward is not nn.Module.forward  # a list of modules has none
        if not name or is_inside or module in left_out or not has_forward:
            continue
        matrices = sum(parameter.dim() > 1 for parameter in module.parameters())
        if matrices > 1 and len(compat.transformers.forward_parameters(module)) == 1:
            found.append(name)
    return tuple(found)


@functools.cache
def _chooses(kind: Any) -> bool:
    """Whether a class has a method that calls `topk` or `argmax`."""
    methods = [value for base in kind.__mro__ for value in vars(base).values() if inspect.isfunction(value)]
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]
    return any({"topk", "argmax"} & {*code.co_names} for code in codes if code is not None)


def _is_cheap(module: nn.Module, found: FoundBlocks) -> bool:
    """Whether a module may be run again, in a model of this family.

    Beside named modules, these are transformers' own norms that hold nothing but parameters.
    """
    row = FAMILIES.get(found.family)
    kind = compat.distributed.plain_class(module)
    if kind.__name__ in {*CHEAP_EVERYWHERE, *(row.cheap if row else ())}:
        return True
    bare = not any(True for _ in module.children()) and not any(True for _ in module.buffers(recurse=False))
    is_norm = kind.__name__.lower().endswith("norm")
    return bare and is_norm and kind.__module__.startswith("transformers.models.")


def vocabulary_head(base: nn.Module) -> nn.Module | None:
    """Return a model's projection onto the vocabulary; None for models without one, such as classifiers."""
    found = getattr(base, "get_output_embeddings", lambda: None)()
    return found if isinstance(found, nn.Module) else None


def outermost_models(model: nn.Module) -> Iterator[compat.transformers.PreTrainedModel]:
    """Yield every PreTrainedModel in a module that is not inside another one, each time it is reached."""
    if isinstance(model, compat.transformers.PreTrainedModel):
        yield model
        return
    for child in model.children():
        yield from outermost_models(child)


def _kind(module: nn.Module) -> str:
    """Return a module's class name, without the class that FSDP2 puts in front of it."""
    return compat.distributed.plain_class(module).__name__


def _known() -> str:
    """Return which models hf_ckpt works with, for error messages."""
    rows = "; ".join(f"{family.name}: {', '.join(family.model_types)}" for family in FAMILIES.values())
    return (
        f"Known families: {rows}. Any other PreTrainedModel works if its layers derive from "
        "transformers.modeling_layers.GradientCheckpointingLayer; see hf_ckpt.register_family."
    )


class Look:
    """What a step depends on beside its batch: autocast's type, which parameters are trained, and their bytes.

    It is asked for every batch, so it walks over the model only when modules or parameters were added, removed or
    replaced.
    """

    def __init__(self, base: nn.Module) -> None:
        self._base = weakref.ref(base)
        self._modules: list[nn.Module] = []
        self._boxes: list[dict[str, Any]] = []
        """The dicts of children and of parameters of each module."""
        self._seen: list[int] = []
        """The addresses of what is in them."""
        self._parameters: list[nn.Parameter] = []

    def now(self, device_type: str, sharded: bool) -> tuple[Any, ...]:
        """Return what compares equal while nothing has changed. Bytes are left out if parameters are `sharded`."""
        if self._addresses() != self._seen or not self._boxes:
            self._walk()
        read = operator.attrgetter("requires_grad") if sharded else operator.attrgetter("requires_grad", "nbytes")
        return compat.devices.autocast_dtype(device_type), tuple(map(read, self._parameters))

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        gradients = map(operator.attrgetter("grad"), self._parameters)
        return any(map(functools.partial(operator.is_not, None), gradients))

    def _addresses(self) -> list[int]:
        return list(map(id, itertools.chain.from_iterable(map(dict.values, self._boxes))))

    def _walk(self) -> None:
        base = self._base()
        assert base is not None
        modules = list(base.modules())
        self._modules = modules[1:]  # held, so that no new module gets the address of one that was removed
        self._boxes = [vars(module)[box] for module in modules for box in ("_modules", "_parameters")]
        self._seen = self._addresses()
        self._parameters = list(base.parameters())
