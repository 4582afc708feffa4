"""Enable and disable the plan of a record: functions and flags on blocks, hooks on modules, and a chunked head.

`put_on` does it at every enable call, `take_off` undoes it, and `exchange` switches between plans of one spec while a
model trains. The hooks and functions can be pickled, and a copy of the model gets copies of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach import switches
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.attach.hooks import INPUT_GRADIENTS, HeadForward, Instead, Skipped, warn_whole
from hf_ckpt.attach.passes import PassHook, Place, Reminder
from hf_ckpt.attach.puts import Hooked, Put, Weak, WithoutInputGradients, undo
from hf_ckpt.attach.record import RECORD, Installation, record_on
from hf_ckpt.attach.switches import Switched, function_of
from hf_ckpt.engines.region import Region, hooks_for
from hf_ckpt.models.blocks import FoundBlocks, find_blocks
from hf_ckpt.spec.plan import Plan


def put_on(blocks: FoundBlocks, record: Installation) -> None:
    """Enable the record's plan: set functions and flags on the blocks, and register the hooks that engines need.

    A model inside this one loses its own plan. If the plan cannot be put on, nothing is enabled.
    """
    for module in blocks.around.values():
        inner = record_on(module)
        if module is not blocks.base and inner is not None:  # blocks have one owner
            remove(module, inner)
    record.undo_puts()
    _remove_copied(blocks.base, set())
    record.modules = Weak(*blocks.base.modules())
    made_for = list(map(weakref.ref, blocks.modules.values()))
    if record.made_for not in (None, made_for):  # functions of a replaced block refer to it
        record.begin_anew()
    record.made_for = made_for
    try:
        _put_on_blocks(blocks, record)
        if record.plan.head != "whole":
            _put_on_head(blocks, record)
        _put_on_parts(blocks, record)
        _put_on_forwards(blocks, record)
    except BaseException:
        record.undo_puts()
        raise
    record.enabled = True


def _put_on_blocks(blocks: FoundBlocks, record: Installation) -> None:
    """Set functions and flags. Modules without a function of their own, such as stacks, are switched off."""
    for name, module in blocks.carriers.items():
        switches.switch_off(module)  # something else may have switched it on since
        row = Switched(module, blocks.base, switches.read(module))
        record.puts.append(row)
        record.switched[name] = row
        if name in record.regions:
            row.put(record.regions[name])
    record.blocks = dict(blocks.modules)


def _put_on_parts(blocks: FoundBlocks, record: Installation) -> None:
    """Register the hooks that engines need inside blocks, and replace forwards of modules there."""
    base = blocks.base
    functions = record.functions.made
    record.functions.hooked = len(functions)
    regions = [region for region in functions.values() if region.block in blocks.modules]  # not of removed ones
    if not regions:
        return
    _drop_input_gradients(base, record)
    for module, hook, when, with_kwargs in hooks_for(regions, blocks):
        if when == "instead":
            put(record, module, "forward", Instead(base, module, hook, vars(module).get("forward")))
        elif when == "before":
            hook_before(record, module, hook, with_kwargs)
        else:
            _hook_after(record, module, hook)


def _put_on_forwards(blocks: FoundBlocks, record: Installation) -> None:
    """Register a `PassHook` on the model, on models inside it that hold stacks, and on modules that run stacks.

    The enable methods of models inside it do nothing from now on.
    """
    stack_of: dict[nn.Module, str] = {}
    """Module that runs stacks -> the name of the first."""
    for stack, runner in blocks.runners.items():
        stack_of.setdefault(runner, stack)
    drops_caches = bool(record.functions.made) or record.spec.is_planned  # a plan may come after a cache was made
    last = [*blocks.runners.values()][-1]
    record.children = []
    for name, module in blocks.around.items():
        record.children.append(vars(module)["_modules"])
        is_model = isinstance(module, compat.transformers.PreTrainedModel)
        if not (is_model or module in stack_of):  # a list
            continue
        if is_model and module is not blocks.base:
            for method in compat.transformers.ENABLE_NAMES:
                put(record, module, method, Skipped(blocks.base, module, method))
        session_name = None if module is blocks.base else stack_of.get(module, name)
        names: tuple[str, ...] = ()
        if module in stack_of:
            names = tuple(block for block in blocks.modules if not name or block.startswith(f"{name}."))
        parameters = compat.transformers.forward_parameters(module)
        is_last = module is last
        hook = PassHook(blocks.base, Place(session_name, parameters, names, is_last, drops_caches))
        hook_before(record, module, hook, with_kwargs=True)
        _hook_after(record, module, hook.after)
    # Without copies, the next forward plans for blocks that the plan does not name.
    is_for_these = {block.name for block, _ in record.plan.actions} == blocks.modules.keys()
    record.children_before = [dict(children) for children in record.children] if is_for_these else []


def put(record: Installation, module: nn.Module, name: str, value: object) -> None:
    """Set an attribute of a module, and let the record undo it."""
    before = [vars(module)[name]] if name in vars(module) else []
    record.puts.append(Put(module, name, value, *before))
    vars(module)[name] = value


def hook_before(record: Installation, module: nn.Module, hook: Callable[..., Any], with_kwargs: bool = False) -> None:
    """Register a forward pre-hook, and let the record undo it."""
    handle = module.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
    record.puts.append(Hooked(module, handle, hook))


def _hook_after(record: Installation, module: nn.Module, hook: Callable[..., Any]) -> None:
    """Register a forward hook that is also called when the module raises an error, and let the record undo it."""
    with compat.torch.same_hook_number(module._forward_hooks):
        handle = module.register_forward_hook(hook, always_call=True)
    record.puts.append(Hooked(module, handle, hook))


def _put_on_head(blocks: FoundBlocks, record: Installation) -> None:
    """Make the head run in chunks, or warn why it cannot."""
    head = blocks.head
    if head is not None and "forward" in vars(head):
        warn_whole(blocks.base, "something else has replaced its forward")
    elif head is not None:
        put(record, head, "forward", HeadForward(blocks.base, head))


def _drop_input_gradients(base: compat.transformers.PreTrainedModel, record: Installation) -> None:
    """Remove the hook that makes the embeddings' output require gradients, and keep PEFT and TRL from adding it.

    The hook exists for reentrant checkpointing. Non-reentrant checkpointing needs no input that requires gradients, and
    the hook makes frozen blocks below the first adapter save, recompute and run backward.
    https://github.com/huggingface/transformers/issues/21381
    """
    is_one = compat.transformers.makes_inputs_require_gradients
    most = 0
    for module in base.modules():
        keys = [key for key, hook in module._forward_hooks.items() if is_one(hook)]
        for key in keys:  # not by handle: a second enable call loses the first one's handle
            del module._forward_hooks[key]
        most = max(most, len(keys))
    record.puts += [WithoutInputGradients(base) for _ in range(most)]
    for name in INPUT_GRADIENTS:
        if hasattr(base, name):
            put(record, base, name, Skipped(base, base, name))


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


def remove(base: nn.Module, record: Installation) -> None:
    """As `detach`, for a model whose record is known."""
    take_off(base, record)
    if record.session is not None:
        record.session.close()
    undo(record.installed)
    record.installed = []
    vars(base).pop(RECORD, None)


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
            record.switched[name].put(region)


# --- copies of blocks -------------------------------------------------------------------------------------------------

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
        _remove_methods(base, module)


def _remove_methods(base: nn.Module, module: nn.Module) -> None:
    """Give a module its own methods back."""
    attributes = vars(module)
    forward = attributes.get("forward")
    if isinstance(forward, Instead):
        before = [] if forward.before is None else [forward.before]
        Put(module, "forward", forward, *before).undo()
    elif isinstance(forward, HeadForward) and not forward.serves_another(base, module):
        del attributes["forward"]
    for name in (*compat.transformers.ENABLE_NAMES, *INPUT_GRADIENTS):
        if isinstance(attributes.get(name), Skipped):
            del attributes[name]


def _is_copied(hook: Any, is_left: bool) -> bool:
    """Whether a forward hook that is left when all rows are undone came with a copy of a block."""
    function = getattr(hook, "func", hook)  # of a partial one
    owner = getattr(function, "__self__", function)
    if isinstance(owner, Boundaries):
        return not owner.is_on  # the session that measures a step has their handles
    return not is_left and not isinstance(owner, Reminder) and str(function.__module__).startswith("hf_ckpt.")
