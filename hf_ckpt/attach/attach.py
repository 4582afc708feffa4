"""Enable and disable plans on one model.

`attach` puts a small record and callable hooks on the base PreTrainedModel. The hooks enable the plan at every enable
call (`put_on`) and disable it at every disable call (`take_off`). If an enable call or a batch needs another plan, they
get it from the record's decider. Everything on the model can be pickled, is copied by `deepcopy`, and is removed by
`detach`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt import compat
from hf_ckpt.attach import switches
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.attach.hooks import HeadForward, Instead, ModelHook, Skipped, warn_whole
from hf_ckpt.attach.passes import PassHook, Place, Reminder
from hf_ckpt.attach.record import RECORD, ChunkCalls, Decider, Functions, Installation, installation, record_on
from hf_ckpt.attach.switches import FUNCTION, carriers, function_of, is_on
from hf_ckpt.engines.check import Check
from hf_ckpt.engines.region import Region, hooks_for
from hf_ckpt.errors import HfCkptError, OwnerConflictError, SpecError
from hf_ckpt.logs import tell
from hf_ckpt.models.blocks import FoundBlocks, base_model, find_blocks, plain_modules
from hf_ckpt.models.parts import frozen_prefix, vocabulary_head
from hf_ckpt.spec.description import Description
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec

GIVEN_PLAN = "(given as a Plan object)"
"""The value of `Spec.plan` for a plan that was passed as an object, and so has no path."""


def spec_of(plan: Plan, options: Spec) -> Spec:
    """Return the spec of a plan that was passed as an object, with what `options` says about how it runs."""
    keys = ("preserve_rng_state", "determinism_check", "host_budget", "check_every", "on_mismatch")
    return Spec(plan=GIVEN_PLAN, head=plan.head, **{key: getattr(options, key) for key in keys})


# --- installing -------------------------------------------------------------------------------------------------------


def attach(blocks: FoundBlocks, spec: Spec, plan: Plan, decider: Decider | None) -> Installation:
    """Make `plan` the one that a model's enable calls apply, and return the model's record.

    If checkpointing is already on, the plan takes effect at once; otherwise nothing is enabled yet. A model inside this
    one loses its own plan.

    Args:
        blocks: the model's blocks.
        spec: the user's spec.
        plan: one action for every block of the model.
        decider: see `Installation.decider`. It is used only if the model has no record yet.

    Raises `OwnerConflictError` if the blocks belong to a larger model whose plan is enabled.
    """
    base = blocks.base
    records: dict[nn.Module, Installation] = {
        module: record for module in blocks.named.values() if (record := record_on(module)) is not None
    }
    regions_here = {id(region) for record in records.values() for region in record.regions.values()}
    functions = map(function_of, blocks.modules.values())
    is_part = base not in records or not records[base].enabled  # else these are copies of its own blocks
    if is_part and any(isinstance(function, Region) and id(function) not in regions_here for function in functions):
        raise OwnerConflictError(
            f"{blocks.model} is part (or a copy of a part) of a larger model whose plan is enabled on the same blocks; "
            "install on that one, or uninstall it first; call gradient_checkpointing_disable() on a copy."
        )
    flags = carriers(blocks.named)
    was_on = any(record.enabled for record in records.values()) or any(map(is_on, flags.values()))
    record = records.pop(base, None)
    for module in records:  # blocks have one owner: an inner model that was enabled by itself loses its plan
        detach(module)
    if record is None:
        record = Installation(spec, plan, decider=decider)
        record.originals = {name: switches.original(module) for name, module in flags.items()}
        vars(base)[RECORD] = record
        # Under `vars`, they are no submodules, and the class and other models keep their methods. Libraries call either
        # name, and transformers' new method looks whether an object has replaced the old one.
        vars(base).update(dict.fromkeys(compat.transformers.ENABLE_NAMES, EnableHook(base)))
        vars(base).update(dict.fromkeys(compat.transformers.DISABLE_NAMES, DisableHook(base)))
        # PEFT calls a model's `forward` past its hooks, but not that of the modules that run stacks.
        runners = dict.fromkeys(blocks.runners.values())
        record.handles = [runner.register_forward_pre_hook(Reminder(base)) for runner in runners]
    adopt(blocks, record, spec, plan)
    if was_on:
        put_on(blocks, record)
    return record


def detach(model: nn.Module) -> None:
    """Remove everything from a model: attributes, hooks and flags are exactly as before `attach`.

    Without a record on the model, do nothing.
    """
    base = base_model(model)
    record = record_on(base)
    if record is None:
        return
    take_off(base, record)
    if record.session is not None:
        record.session.close()
    modules = dict(plain_modules(base))
    for name, values in record.originals.items():
        if name in modules:  # blocks may have been deleted since
            switches.write(modules[name], values)
    for name in (*compat.transformers.ENABLE_NAMES, *compat.transformers.DISABLE_NAMES, RECORD):
        vars(base).pop(name, None)


def adopt(blocks: FoundBlocks, record: Installation, spec: Spec, plan: Plan) -> None:
    """Make `plan` the one that the record will enable next, with new functions that count from 0.

    First disable the current plan, if it is enabled.
    """
    if record.enabled:
        take_off(blocks.base, record)
    record.spec = spec
    record.plan = plan
    record.tightened = None
    _begin_anew(record)


def _begin_anew(record: Installation) -> None:
    """Forget what was measured, found and counted under another spec, or on other blocks."""
    if record.session is not None:
        record.session.stop(record)
        record.session.close()
    record.session = None
    record.watch = None
    record.heads = ChunkCalls()
    record.functions = Functions(record.spec)
    record.regions = record.functions.of(record.plan)


# --- what is installed ------------------------------------------------------------------------------------------------


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
        frozen=tuple(name for name in frozen_prefix(blocks) if name in active),
        forwards=record.functions.counts("forwards", regions),
        recomputed=record.functions.counts("recomputed", regions),
        dropped_tensors=sum(region.dropped_tensors for region in regions.values()),
        chunked_heads=record.heads.calls,
        head_ran=record.heads.last,
        in_graphs=tuple(name for name, region in regions.items() if region.in_graph),
        compiled_by_others=record.compiled_by_others(),
        not_in_tiles=tuple(name for name, region in regions.items() if region.runs_whole),
        measuring=record.measuring,
        moved={name: region.moved_bytes for name, region in regions.items() if region.moved_bytes},
    )
    if record.session is not None:
        description = record.session.described(description)
    if record.watch is not None:
        description = dataclasses.replace(description, watched=record.watch.report())
    return description


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


# --- for a while ------------------------------------------------------------------------------------------------------


def put_check(module: nn.Module, block: str, **options: Any) -> Check:
    """Check the next forward of a block with an `engines.check.Check`, made with these options.

    The block must have a checkpointing function, of hf_ckpt or of anything else. The check restores it when that
    forward begins.
    """
    function = getattr(module, FUNCTION)
    before = switches.read(module)

    def put_back(check: Check) -> None:
        if vars(module).get(FUNCTION) is check:  # a plan may have put another function there since
            switches.write(module, before)

    check = Check(block, module, function, put_back=put_back, **options)
    switches.write(module, {**before, FUNCTION: check})
    return check


@contextlib.contextmanager
def paused(model: nn.Module) -> Iterator[None]:
    """Context manager that disables the plan, for example to generate or to score, and enables it again at the end.

        with hf_ckpt.paused(model):
            model.generate(**inputs)

    Without an enabled plan, it does nothing. What `budget` and `auto` have measured is kept.

    Args:
        model: plain or wrapped.
    """
    base = base_model(model)
    record = record_on(base)
    if record is None or not record.enabled:
        yield
        return
    take_off(base, record)
    try:
        yield
    finally:
        if record_on(base) is record:  # not if it was uninstalled inside
            put_on(find_blocks(base), record)


@contextlib.contextmanager
def _inner_plans_aside(base: nn.Module) -> Iterator[None]:
    """Context manager in which models inside `base` have no plans of their own. They get them back at the end."""
    names = (RECORD, *compat.transformers.ENABLE_NAMES, *compat.transformers.DISABLE_NAMES)
    with contextlib.ExitStack() as undo:
        for module in [module for module in base.modules() if module is not base and RECORD in vars(module)]:
            undo.enter_context(paused(module))  # it looks for the record at the end, so that comes back first
            undo.callback(vars(module).update, {name: vars(module).pop(name) for name in names})
        yield


@contextlib.contextmanager
def trial(
    model: nn.Module, plan: Plan, spec: Spec | None = None, decider: Decider | None = None
) -> Iterator[Installation]:
    """Enable a plan inside the `with` block, and restore the model, its installation and its counts afterwards.

    The plan gets a record of its own, which `with` returns, so the session, the watch and all counts of an installation
    are left alone.

    Args:
        model: a PreTrainedModel, plain or wrapped.
        plan: one action for every block of the model.
        spec: the spec of the plan; None if the plan was passed as an object.
        decider: as for `attach`.

    Raises what `attach` and `find_blocks` raise. The model is as before then.
    """
    blocks = find_blocks(model)
    base = blocks.base
    before = record_on(base)
    spec = Spec(plan=GIVEN_PLAN) if spec is None else spec
    with paused(base), _inner_plans_aside(base):
        if before is not None:
            # Not what the model is like while the plan is paused.
            vars(base)[RECORD] = Installation(spec, plan, decider=before.decider, originals=before.originals)
        try:
            record = attach(blocks, spec, plan, decider)
            record.unchecked = True
            put_on(blocks, record)
            yield record
        finally:
            if before is None:
                detach(base)
            else:
                take_off(base, vars(base)[RECORD])
                vars(base)[RECORD] = before


# --- enabling and disabling -------------------------------------------------------------------------------------------


def put_on(blocks: FoundBlocks, record: Installation) -> None:
    """Enable the record's plan: set functions and flags on the blocks, and register the hooks that engines need."""
    base = blocks.base
    if record.enabled:
        _take_off(base, blocks.named, record)
    made_for = list(map(weakref.ref, blocks.modules.values()))
    if record.made_for not in (None, made_for):  # functions of a replaced block refer to it
        _begin_anew(record)
    record.made_for = made_for
    _remove_hooks(base, record)
    for name, module in carriers(blocks.named).items():
        before = record.originals.setdefault(name, switches.original(module))  # layers may have been added since
        switches.switch(module, record.regions.get(name), before)
    regions = [region for region in record.functions.made.values() if region.block in blocks.modules]  # not removed
    record.functions.hooked = len(record.functions.made)
    record.blocks = dict(blocks.modules)
    if record.plan.head != "full":
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


def tell_plan(base: nn.Module, record: Installation) -> None:
    """Log the plan that was put on a model, unless it was the last one that was logged."""
    text = record.plan.summary()
    if record.spec.is_planned:  # the plan of a batch is logged when it is made
        budget = record.spec.to_dict().get("budget", "")
        text = f"{record.spec.policy} {budget}".rstrip() + ", planned in the first steps"
    if record.logged != (record.spec, text):
        record.logged = (record.spec, text)
        tell("hf_ckpt: %s: %s", type(base).__name__, text)


class EnableHook(ModelHook):
    """`model.gradient_checkpointing_enable` and `model.activation_checkpointing_enable` of an installed model."""

    calls = 0
    """Enable calls that this class has handled, over all models, since `hf_ckpt.install()` without a model."""

    # PEFT looks for a parameter of exactly this name before it passes its keyword arguments.
    def __call__(
        self,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool | str = False,
        *,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Enable the plan, or another one if the arguments ask for it.

        Args:
            gradient_checkpointing_kwargs: keys of a spec. Keys that choose blocks or a policy replace the plan; None,
                an empty dict or only other keys keep it.
            every_n_layers: transformers' own option, read as the key of the spec with this name.
            offload: transformers' own option, read as the key of the spec with this name.
            activation_checkpointing_kwargs: the new name of `gradient_checkpointing_kwargs`.

        Raises `SpecError` for invalid keys.
        """
        options = gradient_checkpointing_kwargs or activation_checkpointing_kwargs or {}
        if not isinstance(options, Mapping):
            raise SpecError([f"the checkpointing kwargs must be a dict, but are {options!r} instead"])
        base = self.base
        record: Installation = vars(base)[RECORD]
        record.outermost = None  # of a forward that Ctrl-C has ended: torch called no hook after it
        # transformers takes these two out of the kwargs and passes them separately.
        options = {"every_n_layers": every_n_layers, "offload": offload, **options}
        blocks = find_blocks(base)
        decided = None if record.decider is None else record.decider.asked(blocks, record, options)
        if decided is not None:
            adopt(blocks, record, *decided)
        put_on(blocks, record)
        EnableHook.calls += 1
        tell_plan(base, record)


class DisableHook(ModelHook):
    """`model.gradient_checkpointing_disable` and `model.activation_checkpointing_disable` of an installed model."""

    def __call__(self) -> None:
        """Disable the plan. The record keeps it, so that an enable call can enable it again."""
        take_off(self.base, vars(self.base)[RECORD])
