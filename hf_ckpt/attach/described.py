"""What is installed on a model, and what it has done so far. Nothing here changes a model."""

from __future__ import annotations

import dataclasses
from collections import Counter

from torch import nn

from hf_ckpt.attach.record import Installation, installation
from hf_ckpt.attach.switches import function_of, is_on
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import FoundBlocks, find_blocks
from hf_ckpt.spec.description import Description, Saved


def describe(model: nn.Module) -> Description:
    """Return the installed plan, with counts of what it has done so far.

        print(hf_ckpt.describe(model))
        hf_ckpt.describe(model).plan.save("plan.json")  # for the spec {"plan": "plan.json"}

    Args:
        model: plain or wrapped.

    Raises `HfCkptError` if no plan is installed on the model.
    """
    record = installation(model)
    if record is None:
        raise HfCkptError("nothing is installed on this model; call hf_ckpt.install(model) first.")
    return description_of(find_blocks(model), record)


def description_of(blocks: FoundBlocks, record: Installation) -> Description:
    """As `describe`, for a model whose blocks and record are known."""
    present = tuple((block, action) for block, action in record.plan.actions if block.name in blocks.modules)
    plan = dataclasses.replace(record.plan, actions=present)  # without blocks that were deleted since
    active = plan.active()
    regions = record.regions
    description = Description(
        plan=plan,
        spec=record.spec.to_dict(),
        enabled=record.enabled,
        frozen=tuple(name for name in blocks.frozen if name in active),
        saved=_saved(record),
        forwards=record.functions.counts("forwards", regions),
        recomputed=record.functions.counts("recomputed", regions),
        avoided={name: str(action) for name, action in record.avoided.items()},
        dropped_tensors=sum(region.dropped_tensors for region in regions.values()),
        chunked_heads=record.heads.calls,
        head_ran=record.heads.last,
        in_graphs=tuple(name for name, region in regions.items() if region.in_graph),
        compiled_by_others=record.compiled_by_others(),
        holding=tuple(name for name, region in regions.items() if region.holds_input),
        not_in_tiles=tuple(name for name, region in regions.items() if region.runs_whole),
        measuring=record.measuring,
        moved={name: region.moved_bytes for name, region in regions.items() if region.moved_bytes},
    )
    if record.session is not None:
        description = record.session.described(description)
    if record.watch is not None:
        description = dataclasses.replace(description, watched=record.watch.report())
    return description


def _saved(record: Installation) -> tuple[Saved, ...]:
    """What `selective` kept and dropped in the first forwards of its blocks, the largest first."""
    sizes: Counter[tuple[str, bool]] = Counter()
    for region in record.regions.values():
        sizes.update(region.saved or {})
    return tuple(Saved(name, size, is_dropped) for (name, is_dropped), size in sizes.most_common())


def lost_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the names of planned blocks that no longer have their function, because other code set their flags.

    Without an enabled plan there are none. Raises `OwnerConflictError` if torch's checkpoint wrapper has been put
    around a block since.
    """
    record = installation(model)
    if record is None or not record.enabled:
        return ()
    modules = find_blocks(model).modules
    if record.children != record.children_before:  # layers have changed: the next forward puts the plan on them
        return ()
    return tuple(
        name
        for name, region in record.regions.items()
        if name not in modules or function_of(modules[name]) is not region or not is_on(modules[name])
    )
