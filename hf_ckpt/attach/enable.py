"""Enable and disable the plan of a record: functions and flags on blocks, hooks on modules, and a chunked head.

`put_on` does it at every enable call, `take_off` undoes it, and `exchange` switches between plans of one spec while a
model trains. The hooks and functions can be pickled, and a copy of the model gets copies of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt import compat
from hf_ckpt.attach import switches
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.attach.hooks import HeadForward, Instead, Skipped, warn_whole
from hf_ckpt.attach.passes import PassHook, Place, Reminder
from hf_ckpt.attach.record import Installation
from hf_ckpt.attach.switches import carriers
from hf_ckpt.engines.region import hooks_for
from hf_ckpt.models.blocks import FoundBlocks, find_blocks, plain_modules
from hf_ckpt.models.parts import vocabulary_head
from hf_ckpt.spec.plan import Plan


def put_on(blocks: FoundBlocks, record: Installation) -> None:
    """Enable the record's plan: set functions and flags on the blocks, and register the hooks that engines need."""
    base = blocks.base
    if record.enabled:
        _take_off(base, blocks.named, record)
    made_for = list(map(weakref.ref, blocks.modules.values()))
    if record.made_for not in (None, made_for):  # functions of a replaced block refer to it
        record.begin_anew()
    record.made_for = made_for
    _remove_hooks(base, record)
    for name, module in carriers(blocks.named).items():
        before = record.originals.setdefault(name, switches.original(module))  # layers may have been added since
        switches.switch(module, record.regions.get(name), before)
    regions = [region for region in record.functions.made.values() if region.block in blocks.modules]  # not removed
    record.functions.hooked = len(record.functions.made)
    record.blocks = dict(blocks.modules)
    if record.plan.head != "whole":
        _put_on_head(base, record)
    if regions:
        _drop_input_gradients(base, record)
        for module, hook, when, with_kwargs in hooks_for(regions, blocks):
            if when == "instead":
                vars(module)["forward"] = Instead(base, module, hook, vars(module).get("forward"))
            elif when == "before":
                record.handles.append(module.register_forward_pre_hook(hook, with_kwargs=with_kwargs))
            else:
                record.handles.append(_always_after(module, hook))
    _put_on_forwards(blocks, record)
    record.enabled = True


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
                vars(module).setdefault(method, Skipped(method))
        session_name = None if module is blocks.base else stack_of.get(module, name)
        names: tuple[str, ...] = ()
        if module in stack_of:
            names = tuple(block for block in blocks.modules if not name or block.startswith(f"{name}."))
        parameters = compat.transformers.forward_parameters(module)
        is_last = module is last
        hook = PassHook(blocks.base, Place(session_name, parameters, names, is_last, drops_caches))
        record.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        record.handles.append(_always_after(module, hook.after))
    # Without copies, the next forward plans for blocks that the plan does not name.
    is_for_these = {block.name for block, _ in record.plan.actions} == blocks.modules.keys()
    record.children_before = [dict(children) for children in record.children] if is_for_these else []


def _always_after(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Register a forward hook that is also called when the module raises an error."""
    with compat.torch.same_hook_number(module._forward_hooks):
        return module.register_forward_hook(hook, always_call=True)


def _put_on_head(base: compat.transformers.PreTrainedModel, record: Installation) -> None:
    """Make the head run in chunks, or warn why it cannot."""
    head = vocabulary_head(base)
    if head is not None and "forward" in vars(head):
        warn_whole(base, "something else has replaced its forward")
    elif head is not None:
        vars(head)["forward"] = HeadForward(base, head)


def _drop_input_gradients(base: compat.transformers.PreTrainedModel, record: Installation) -> None:
    """Remove the hook that makes the embeddings' output require gradients, and keep PEFT and TRL from adding it.

    The hook exists for reentrant checkpointing. Non-reentrant checkpointing needs no input that requires gradients, and
    the hook makes frozen blocks below the first adapter save, recompute and run backward.
    https://github.com/huggingface/transformers/issues/21381
    """
    is_one = compat.transformers.makes_inputs_require_gradients
    for module in base.modules():
        keys = [key for key, hook in module._forward_hooks.items() if is_one(hook)]
        for key in keys:  # not by handle: a second enable call loses the first one's handle
            del module._forward_hooks[key]
        record.input_gradient_hooks = max(record.input_gradient_hooks, len(keys))
    for name in ("enable_input_require_grads", "disable_input_require_grads"):
        if hasattr(base, name):
            vars(base)[name] = Skipped(name)


def take_off(base: compat.transformers.PreTrainedModel, record: Installation) -> None:
    """Disable the record's plan, and end the current measurement of its session.

    The record, and the hooks that replace the enable and disable methods, remain.
    """
    if record.session is not None:
        record.session.stop(record)
    _take_off(base, dict(plain_modules(base)), record)


def _take_off(base: compat.transformers.PreTrainedModel, named: Mapping[str, nn.Module], record: Installation) -> None:
    """As `take_off`, with the modules of the model by name. A session goes on measuring."""
    for name, module in carriers(named).items():
        switches.switch_off(module, record.originals.get(name, switches.original(module)))
    _remove_hooks(base, record)
    for module in base.modules():  # not only the current head: adapters may have wrapped it since
        replaced = (HeadForward, Instead, Skipped)
        for name in [key for key, value in vars(module).items() if isinstance(value, replaced)]:
            hook = vars(module).pop(name)
            before = hook.arguments()[3] if isinstance(hook, Instead) else None
            if before is not None:
                vars(module)[name] = before
    for _ in range(record.input_gradient_hooks):
        base.enable_input_require_grads()
    record.input_gradient_hooks = 0
    record.enabled = False
    record.blocks = {}
    record.children = []
    record.children_before = []


def _remove_hooks(base: nn.Module, record: Installation) -> None:
    """Remove all hooks of a plan, also those that came with a copy of a block, to which no handle refers."""
    record.remove_hooks()
    for module in base.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if _has_no_handle(hook)]:
                del hooks[key]


def _has_no_handle(hook: Any) -> bool:
    """Whether a forward hook that is left when all handles are removed came with a copy of a block."""
    function = getattr(hook, "func", hook)  # of a partial one
    owner = getattr(function, "__self__", function)
    if isinstance(owner, Boundaries):
        return not owner.is_on  # the session that measures a step has their handles
    return not isinstance(owner, Reminder) and str(function.__module__).startswith("hf_ckpt.")


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
    for name, module in record.blocks.items():
        if record.regions.get(name) is not before.get(name):
            switches.switch(module, record.regions.get(name), record.originals[name])
