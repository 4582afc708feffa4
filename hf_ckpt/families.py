"""A family is a row of data. `find_blocks` reads a model by it, through PEFT, DDP and torch.compile wrappers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator

from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import NoBlocksError, OwnerConflictError
from hf_ckpt.plan import Block

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Family:
    """What hf_ckpt knows of a group of models whose blocks share a shape."""

    name: str
    model_types: tuple[str, ...]
    """`config.model_type` values that belong here."""
    stacks: tuple[tuple[str, str], ...]
    """(stack name, ending of the qualified name of the list that holds its blocks), in the order they run."""
    head: str = ""
    """Ending of the qualified name of the head's projection; empty if there is none to name."""
    cheap: tuple[str, ...] = ()
    """Class names of small modules that `selective` may run again as a whole, beside those of every family. They take
    one tensor, return one, draw nothing and change nothing."""
    notes: str = ""


GENERIC = "generic"
# Norms, and activations that consist of several operations; single operations have recipes of their own.
CHEAP_EVERYWHERE = (
    "LayerNorm",
    "RMSNorm",
    "NewGELUActivation",
    "FastGELUActivation",
    "QuickGELUActivation",
    "AccurateGELUActivation",
    "ReLUSquaredActivation",
)

_FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Add a row, or replace the one of the same name.

    Raises `ValueError` when a model type already belongs to another row.
    """
    for other in _FAMILIES.values():
        taken = set(other.model_types) & set(family.model_types)
        if other.name != family.name and taken:
            raise ValueError(f"model types {sorted(taken)} already belong to the family {other.name!r}.")
    _FAMILIES[family.name] = family


def families() -> tuple[Family, ...]:
    """Every row known now."""
    return tuple(_FAMILIES.values())


for _row in (
    Family(
        name="llama",
        model_types=("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"),
        stacks=(("decoder", "layers"),),
        head="lm_head",
        cheap=(
            "LlamaRMSNorm",
            "MistralRMSNorm",
            "Qwen2RMSNorm",
            "Qwen3RMSNorm",
            "Gemma2RMSNorm",
            "Gemma3RMSNorm",
        ),
    ),
    Family(
        name="gpt2",
        model_types=("gpt2", "gpt_neo", "gptj"),
        stacks=(("decoder", "h"),),
        head="lm_head",
    ),
    Family(
        name="bert",
        model_types=("bert", "roberta", "electra", "camembert", "xlm-roberta"),
        stacks=(("encoder", "encoder.layer"),),
        head="decoder",
        notes="One stack, called `encoder`; a BERT used as a decoder is counted the same way.",
    ),
    Family(
        name="t5",
        model_types=("t5", "mt5", "umt5", "longt5"),
        stacks=(("encoder", "encoder.block"), ("decoder", "decoder.block")),
        head="lm_head",
        cheap=("T5LayerNorm", "MT5LayerNorm", "UMT5LayerNorm", "LongT5LayerNorm"),
        notes="Block 0 returns the position bias that all blocks share; attention modules carry a flag of their own.",
    ),
):
    register_family(_row)


@dataclasses.dataclass(frozen=True)
class FoundBlocks:
    """A model as hf_ckpt sees it."""

    base: compat.PreTrainedModel
    """The outermost PreTrainedModel inside whatever wraps it."""
    family: str
    blocks: tuple[Block, ...]
    """Stack after stack, in order."""
    modules: dict[str, nn.Module]
    """Block name -> module."""
    owners: tuple[nn.Module, ...]
    """The modules whose forward runs a stack."""

    @property
    def model(self) -> str:
        """Class name of the base model."""
        return compat.plain_class(self.base).__name__


def base_model(model: nn.Module) -> compat.PreTrainedModel:
    """The PreTrainedModel inside PEFT, DDP, FSDP, DeepSpeed and torch.compile wrappers.

    Raises `NoBlocksError` when there is none, or more than one to choose from.
    """
    if not isinstance(model, nn.Module):
        raise NoBlocksError(f"a model must be a torch.nn.Module, but is {type(model).__name__} instead.")
    found = list({id(inner): inner for inner in _outermost(model)}.values())
    if len(found) == 1:
        return found[0]
    if found:
        kinds = ", ".join(type(inner).__name__ for inner in found)
        raise NoBlocksError(f"{type(model).__name__} holds {len(found)} models ({kinds}); install on each by itself.")
    raise NoBlocksError(f"{type(model).__name__} is no Hugging Face PreTrainedModel and holds none. {_known()}")


def find_blocks(model: nn.Module) -> FoundBlocks:
    """Find the blocks of a model, stack by stack.

    Models of a family without a row are read generically: every `GradientCheckpointingLayer` is a block, every list of
    them a stack. Raises `NoBlocksError` where there are none, `OwnerConflictError` where torch's checkpoint wrapper
    already sits around a block.
    """
    base = base_model(model)
    model_type = str(getattr(base.config, "model_type", ""))
    row = next((family for family in _FAMILIES.values() if model_type in family.model_types), None)
    refuse_other_owner(base)
    containers: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in _plain_blocks(base):
        containers.setdefault(name.rpartition(".")[0], []).append((name, module))
    if not containers:
        raise NoBlocksError(
            f"{type(base).__name__} (model_type {model_type!r}) has no blocks built on GradientCheckpointingLayer. "
            f"{_known()}"
        )
    stack_of = _name_stacks(list(containers), row)
    ordered = sorted(containers, key=lambda container: _stack_order(stack_of[container], row))
    blocks: list[Block] = []
    modules: dict[str, nn.Module] = {}
    for container in ordered:
        for index, (name, module) in enumerate(containers[container]):
            blocks.append(Block(name, stack_of[container], index, _kind(module)))
            modules[name] = module
    plain = dict(plain_modules(base))
    owners = tuple(plain[_owner_name(container, plain)] for container in ordered)
    return FoundBlocks(base, row.name if row else GENERIC, tuple(blocks), modules, owners)


def plain_modules(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(qualified name without wrapper segments, module), the innermost module where wrappers share a name."""
    found: dict[str, nn.Module] = {}
    for name, module in base.named_modules():
        found[plain_name(name)] = module  # wrappers come before what they wrap
    yield from found.items()


def plain_name(name: str) -> str:
    """A qualified name without the segments that wrappers add."""
    return ".".join(segment for segment in name.split(".") if segment not in compat.WRAPPER_SEGMENTS)


def refuse_other_owner(model: nn.Module) -> None:
    """Raise `OwnerConflictError` when torch's checkpoint wrapper sits around a block of `model`."""
    for name, module in model.named_modules():
        if isinstance(module, compat.GradientCheckpointingLayer) and compat.FOREIGN_OWNER_SEGMENT in name.split("."):
            raise OwnerConflictError(
                f"block {name!r} is already wrapped by torch's checkpoint wrapper, most likely by "
                "`activation_checkpointing: true` in the FSDP settings. Set it to false: checkpointing needs one owner."
            )


def frozen_prefix(model: nn.Module, found: FoundBlocks) -> tuple[str, ...]:
    """Names of the blocks below the first trainable parameter: autograd saves nothing in them.

    Parameters count in the order they are registered, which for these models is the order they are used.
    """
    inside = {id(parameter) for parameter in found.base.parameters()}
    if any(parameter.requires_grad and id(parameter) not in inside for parameter in model.parameters()):
        return ()  # something outside feeds the base, as in prompt tuning
    frozen: list[str] = []
    parameters = [(plain_name(name), parameter) for name, parameter in found.base.named_parameters()]
    first = next((place for place, (_, parameter) in enumerate(parameters) if parameter.requires_grad), len(parameters))
    for block in found.blocks:
        places = [place for place, (name, _) in enumerate(parameters) if name.startswith(f"{block.name}.")]
        if places and max(places) < first:
            frozen.append(block.name)
    return tuple(frozen)


def blocks_of_known_code(found: FoundBlocks) -> frozenset[str]:
    """Names of the blocks that are transformers' own, of a family with a row: what they do in place is known."""
    if found.family == GENERIC:
        return frozenset()
    return frozenset(name for name, module in found.modules.items() if _known_class(module))


def cheap_modules(found: FoundBlocks, blocks: Collection[str]) -> tuple[nn.Module, ...]:
    """Small modules inside the named blocks that may be run again as a whole, each once."""
    names = _cheap_names(found)
    inside = (module for name in blocks for module in found.modules[name].modules() if _kind(module) in names)
    return tuple({id(module): module for module in inside}.values())


def embedding_norms(found: FoundBlocks) -> tuple[nn.Module, ...]:
    """Small modules of the embeddings, whose output can be a block's input."""
    names = _cheap_names(found)
    modules = (module for name, module in plain_modules(found.base) if "embeddings" in name.split("."))
    return tuple(module for module in modules if _kind(module) in names)


def _cheap_names(found: FoundBlocks) -> set[str]:
    row = _FAMILIES.get(found.family)
    return {*CHEAP_EVERYWHERE, *(row.cheap if row else ())}


def vocabulary_head(base: nn.Module) -> nn.Module | None:
    """The projection onto the vocabulary; None for models of other tasks."""
    found = getattr(base, "get_output_embeddings", lambda: None)()
    return found if isinstance(found, nn.Module) else None


def head_module(base: nn.Module, family: str) -> nn.Module | None:
    """The projection onto the vocabulary or the labels, whose output can be the peak of a step."""
    embeddings = vocabulary_head(base)
    if embeddings is not None:
        return embeddings
    row = _FAMILIES.get(family)
    ending = row.head if row else ""
    return next((module for name, module in plain_modules(base) if ending and name.endswith(ending)), None)


def _outermost(model: nn.Module) -> Iterator[compat.PreTrainedModel]:
    if isinstance(model, compat.PreTrainedModel):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)


def _plain_blocks(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Outermost GradientCheckpointingLayers, by plain name."""
    seen: list[str] = []
    for name, module in base.named_modules():
        if not isinstance(module, compat.GradientCheckpointingLayer):
            continue
        if not any(name.startswith(f"{outer}.") for outer in seen):
            seen.append(name)
            yield plain_name(name), module


def _name_stacks(containers: list[str], row: Family | None) -> dict[str, str]:
    names: dict[str, str] = {}
    for container in containers:
        rows = row.stacks if row else ()
        named = [stack for stack, ending in rows if f".{container}".endswith(f".{ending}")]
        names[container] = named[0] if named else _generic_stack(container, containers)
    return names


def _generic_stack(container: str, containers: list[str]) -> str:
    """`encoder` or `decoder` where the path says so and means one list only; else the path itself."""
    for word in ("encoder", "decoder"):
        if word in container.split(".") and sum(word in other.split(".") for other in containers) == 1:
            return word
    return container or "blocks"


def _stack_order(stack: str, row: Family | None) -> int:
    names = [name for name, _ in row.stacks] if row else []
    return names.index(stack) if stack in names else len(names)


def _owner_name(container: str, modules: dict[str, nn.Module]) -> str:
    """The module that runs the list: the nearest ancestor that is no list itself."""
    name = container
    while isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
        name = name.rpartition(".")[0]
    return name


def _kind(module: nn.Module) -> str:
    return compat.plain_class(module).__name__  # the plan names the layer itself


def _known_class(module: nn.Module) -> bool:
    return compat.plain_class(module).__module__.startswith("transformers.models.")


def _known() -> str:
    rows = "; ".join(f"{family.name}: {', '.join(family.model_types)}" for family in _FAMILIES.values())
    return (
        f"Known families: {rows}. Any other PreTrainedModel works if its layers derive from "
        "transformers.modeling_layers.GradientCheckpointingLayer; see hf_ckpt.register_family."
    )
