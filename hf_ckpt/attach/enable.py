"""Enable and disable the plan of a record: functions and flags on blocks, hooks on modules, and a chunked head.

`put_on` does it at every enable call, `take_off` undoes it, and `exchange` switches between plans of one spec while a
model trains. The hooks and functions can be pickled, and a copy of the model gets copies of them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach import switches
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.attach.hooks import INPUT_GRADIENTS, WHOLE, HeadForward, Instead, Skipped, SwitchesOff, remove_methods
from hf_ckpt.attach.passes import PassHook, Reminder, Role
from hf_ckpt.attach.puts import Hooked, Put, Row, Weak, WithoutInputGradients, put, undo
from hf_ckpt.attach.record import RECORD, Installation
from hf_ckpt.attach.switches import Switched, function_of
from hf_ckpt.engines.region import Region, hooks_for
from hf_ckpt.logs import warn_once
from hf_ckpt.models.blocks import FoundBlocks, find_blocks
from hf_ckpt.spec.plan import Plan

log = logging.getLogger(__name__)


def put_on(blocks: FoundBlocks, record: Installation) -> None:
    """Enable the record's plan: set functions and flags on the blocks, and register the hooks that engines need.

    A model inside this one loses its own plan. If the plan cannot be put on, nothing is enabled.
    """
    record.undo_puts()
    made_for = list(map(weakref.ref, blocks.modules.values()))
    if record.made_for not in (None, made_for):  # functions of a replaced block refer to it
        record.begin_anew()
    record.made_for = made_for
    remove_others(blocks)
    record.modules = Weak(*blocks.base.modules())
    record.functions.hooked = len(record.functions.made)
    put(_rows(blocks, record), record.puts)
    record.enabled = True
    record.blocks = dict(blocks.modules)
    record.children = [vars(module)["_modules"] for module in blocks.around.values()]
    # Without copies, the next forward plans for blocks that the plan does not name.
    is_for_these = {block.name for block, _ in record.plan.actions} == blocks.modules.keys()
    record.children_before = [dict(children) for children in record.children] if is_for_these else []


def _rows(blocks: FoundBlocks, record: Installation) -> Iterator[Row]:
    """Yield what a plan puts on the modules of a model, in order. Each row is put there before the next one is made."""
    base = blocks.base
    for name, module in blocks.carriers.items():
        record.switched[name] = Switched(module, base, record.regions.get(name))
        yield record.switched[name]
    yield from _rows_of_forwards(blocks, record)
    yield from _rows_of_engines(blocks, record)
    head = blocks.head
    if record.plan.head == "whole" or head is None:
        return
    if "forward" in vars(head):
        warn_once(log, WHOLE, type(base).__name__, "something else has replaced its forward")
    else:
        yield Put(head, "forward", HeadForward(base, head))


def _rows_of_forwards(blocks: FoundBlocks, record: Installation) -> Iterator[Row]:
    """Yield a `PassHook` for the model, for models inside it that hold stacks, and for modules that run stacks.

    The enable methods of models inside it do nothing from now on, and their disable methods say what they do.
    """
    stack_of = {runner: stack for stack, runner in reversed(blocks.runners.items())}  # the first of several stacks
    drops_caches = bool(record.functions.made) or record.spec.is_planned  # a plan may come after a cache was made
    last = [*blocks.runners.values()][-1]
    for name, module in blocks.around.items():
        is_model = isinstance(module, compat.transformers.PreTrainedModel)
        if not (is_model or module in stack_of):  # a list
            continue
        if is_model and module is not blocks.base:
            for method in compat.transformers.ENABLE_NAMES:
                yield Put(module, method, Skipped(blocks.base, module, method))
            for method in compat.transformers.DISABLE_NAMES:
                yield Put(module, method, SwitchesOff(blocks.base, module, method))
        session_name = None if module is blocks.base else stack_of.get(module, name)
        names: tuple[str, ...] = ()
        if module in stack_of:
            names = tuple(block for block in blocks.modules if not name or block.startswith(f"{name}."))
        parameters = compat.transformers.forward_parameters(module)
        hook = PassHook(blocks.base, Role(session_name, parameters, names, module is last, drops_caches))
        yield Hooked(module, hook, "before", True)
        yield Hooked(module, hook.after, "after", False)


def _rows_of_engines(blocks: FoundBlocks, record: Installation) -> Iterator[Row]:
    """Yield the hooks that engines need inside blocks, and what replaces forwards there."""
    base = blocks.base
    regions = [region for region in record.functions.made.values() if region.block in blocks.modules]  # not removed
    if not regions:
        return
    yield WithoutInputGradients(base)
    for name in INPUT_GRADIENTS:
        if hasattr(base, name):
            yield Put(base, name, Skipped(base, base, name))
    for module, function, when, with_kwargs in hooks_for(regions, blocks):
        if when == "instead":
            yield Put(module, "forward", Instead(base, module, function, vars(module).get("forward")))
        else:
            yield Hooked(module, function, when, with_kwargs)


def take_off(base: nn.Module, record: Installation) -> None:
    """Disable the record's plan, and end the current measurement of its session.

    The record, and the hooks that replace the enable and disable methods, remain.
    """
    if record.session is not None:
        record.session.stop(record)
    # If one of these has a plan when the rows are undone, it is shared with another model, which has put it there.
    had_rows = {id(module) for module in record.modules.arguments()}
    was_enabled = record.enabled
    record.undo_puts()
    if was_enabled:
        _remove_copied(base, had_rows)


def remove(base: nn.Module) -> None:
    """As `detach`, for a base model."""
    record: Installation | None = vars(base).pop(RECORD, None)
    if record is not None:
        take_off(base, record)
        record.end_session()
        undo(record.installed)


def exchange(base: nn.Module, record: Installation, plan: Plan) -> None:
    """Switch to another plan of the same spec during training. Existing functions keep their counts.

    If only functions on blocks differ, exchange these and leave the hooks alone. All plans of a spec run the head
    alike.

    Args:
        base: the model.
        record: the record on it.
        plan: the plan. If it has the same actions, only the record changes.
    """
    plan = record.avoiding(plan)
    functions = record.functions
    had_these_actions = record.enabled and plan == record.plan
    record.plan = plan  # the predicted costs may be others
    if had_these_actions and len(functions.made) == functions.hooked:
        return
    before = record.regions
    record.regions = functions.of(plan)
    if not record.enabled or len(functions.made) > functions.hooked:
        put_on(find_blocks(base), record)
        return
    for name in record.blocks:
        region = record.regions.get(name)
        if region is not before.get(name):
            record.switched[name].exchange(region)


# --- other plans ------------------------------------------------------------------------------------------------------


def remove_others(blocks: FoundBlocks) -> None:
    """Remove from a model what other plans have put there. It must have no enabled plan of its own.

    They are plans of models inside it, because blocks have one owner, and what came with copies of planned blocks.
    """
    for module in blocks.around.values():
        if module is not blocks.base:
            remove(module)
    _remove_copied(blocks.base, set())


HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}
"""Names of a module's dicts of forward hooks -> names of the dicts with their options."""


def _remove_copied(base: nn.Module, leave: Collection[int]) -> None:
    """Remove what no row knows: what came with copies of planned blocks, and with blocks of other models.

    `deepcopy` of a block also copies its function, its flag and its hooks. They are all that hf_ckpt searches a model
    for. The rows of its record must be undone. Modules whose id is in `leave` lose only hooks that do nothing.
    """
    for module in base.modules():
        is_left = id(module) in leave
        for kind, options in HOOKS.items():
            hooks = vars(module)[kind]
            for key in [key for key, hook in hooks.items() if _is_copied(hook, is_left)]:
                for name in (kind, *options):
                    vars(module)[name].pop(key, None)
        if is_left:
            continue
        if isinstance(function_of(module), Region):
            switches.write(module, {})
        remove_methods(base, module)


def _is_copied(hook: Any, is_left: bool) -> bool:
    """Whether a forward hook that is left when all rows are undone came with a copy of a block."""
    function = getattr(hook, "func", hook)  # of a partial one
    owner = getattr(function, "__self__", function)
    if isinstance(owner, Boundaries):
        return not owner.is_on  # the session that measures a step has their handles
    return not is_left and not isinstance(owner, Reminder) and str(function.__module__).startswith("hf_ckpt.")
