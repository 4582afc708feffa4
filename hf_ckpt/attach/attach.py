"""Enable and disable plans on one model.

`attach` puts a small record and callable hooks on the base PreTrainedModel. The hooks enable the plan at every enable
call (`put_on`) and disable it at every disable call (`take_off`). If an enable call or a batch needs another plan, they
get it from the record's decider. Everything on the model can be pickled, is copied by `deepcopy`, and is removed by
`detach`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.hooks import HeadForward, Instead, ModelHook, PassHook, Reminder, Skipped, warn_plain
from hf_ckpt.attach.record import (
    FLAG,
    FUNCTION,
    GATE,
    GIVEN_PLAN,
    KEEPS_CACHE,
    RECORD,
    Absent,
    Functions,
    Installation,
    carriers,
    function_of,
    installation,
    is_on,
    read_switches,
    switch_off,
    write_switches,
)
from hf_ckpt.engines.check import Check
from hf_ckpt.engines.region import Region, hooks_for
from hf_ckpt.errors import HfCkptError, OwnerConflictError, SpecError
from hf_ckpt.logs import tell
from hf_ckpt.models.blocks import (
    FoundBlocks,
    base_model,
    find_blocks,
    frozen_prefix,
    plain_modules,
    vocabulary_head,
)
from hf_ckpt.models.families import GENERIC
from hf_ckpt.spec.description import Description
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec

log = logging.getLogger(__name__)

_INPUT_GRADIENT_NAMES = ("enable_input_require_grads", "disable_input_require_grads")
"""Methods of PreTrainedModel that add and remove the embedding hook; see `_drop_input_gradients`."""


def attach(found: FoundBlocks, spec: Spec, plan: Plan, decider: Any) -> Installation:
    """Make `plan` the one that a model's enable calls apply, and return the model's record.

    If checkpointing is already on, the plan takes effect at once; otherwise nothing is enabled yet. A model inside this
    one loses its own plan.

    Args:
        found: the model's blocks.
        spec: the user's spec.
        plan: one action for every block of the model.
        decider: see `Installation.decider`. It is used only if the model has no record yet.

    Raises `OwnerConflictError` if the blocks belong to a larger model whose plan is enabled.
    """
    base = found.base
    records = {module: vars(module)[RECORD] for module in base.modules() if RECORD in vars(module)}
    owned = {id(region) for record in records.values() for region in record.regions.values()}
    functions = [function_of(module) for module in found.modules.values()]
    if any(isinstance(function, Region) and id(function) not in owned for function in functions):
        raise OwnerConflictError(
            f"{found.model} is part (or a copy of a part) of a larger model whose plan is enabled on the same blocks; "
            "install on that one, or uninstall it first; call gradient_checkpointing_disable() on a copy."
        )
    was_on = any(record.enabled for record in records.values()) or any(map(is_on, carriers(base).values()))
    record: Installation | None = records.pop(base, None)
    for module in records:  # blocks have one owner: an inner model that was enabled by itself loses its plan
        detach(module)
    if record is None:
        if found.family == GENERIC:
            log.warning(
                "%s is of no known family; %d checkpointable blocks found, used as family `generic`.",
                found.model,
                len(found.blocks),
            )
        record = Installation(spec, plan, decider=decider)
        record.before = {name: read_switches(module) for name, module in carriers(base).items()}
        vars(base)[RECORD] = record
        vars(base).update(dict.fromkeys(compat.transformers.ENABLE_NAMES, EnableHook(base)))
        vars(base).update(dict.fromkeys(compat.transformers.DISABLE_NAMES, DisableHook(base)))
        # PEFT calls a model's `forward` past its hooks, but not that of the modules that run stacks.
        record.handles = [owner.register_forward_pre_hook(Reminder(base)) for owner in dict.fromkeys(found.owners)]
    adopt(found, record, spec, plan)
    if was_on:
        put_on(found, record)
    return record


def detach(model: nn.Module) -> None:
    """Remove everything from a model: attributes, hooks and flags are exactly as before `attach`.

    Without a record on the model, do nothing.
    """
    base = base_model(model)
    record = installation(base)
    if record is None:
        return
    take_off(base, record)
    modules = dict(plain_modules(base))
    for name, attributes in record.before.items():
        if name in modules:
            write_switches(modules[name], attributes)
    for name in (*compat.transformers.ENABLE_NAMES, *compat.transformers.DISABLE_NAMES, RECORD):
        vars(base).pop(name, None)


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
    found, planned = find_blocks(model), record.planned
    there = tuple((block, action) for block, action in record.plan.actions if block.name in found.modules)
    plan = dataclasses.replace(record.plan, actions=there)  # without blocks that were deleted since
    active = plan.active()
    return Description(
        plan=plan,
        spec=record.spec.to_dict(),
        enabled=record.enabled,
        frozen=tuple(name for name in frozen_prefix(model, found) if name in active),
        forwards=record.functions.counts("forwards", record.regions),
        recomputed=record.functions.counts("recomputed", record.regions),
        dropped_tensors=sum(region.dropped_tensors for region in record.regions.values()),
        chunked_heads=record.heads.calls,
        head_ran=record.heads.last,
        in_graphs=tuple(name for name, region in record.regions.items() if region.in_graph),
        compiled_by_others=record.compiled_by_others(),
        measuring=record.measuring,
        **({} if planned is None else {key: getattr(planned, key) for key in ("plans", "measured_bytes")}),
        moved={name: region.moved_bytes for name, region in record.regions.items() if region.moved_bytes},
        watched=None if record.watch is None else record.watch.report(),
    )


def put_check(module: nn.Module, block: str, **options: Any) -> Check:
    """Check the next forward of a block with an `engines.check.Check`, made with these options.

    The block must have a checkpointing function, of hf_ckpt or of anything else. The check restores it when that
    forward begins.
    """
    function = getattr(module, FUNCTION)
    before = vars(module).get(FUNCTION, Absent.ABSENT)

    def put_back(check: Check) -> None:
        if vars(module).get(FUNCTION) is check:
            write_switches(module, {FUNCTION: before})

    check = Check(block, module, function, put_back=put_back, **options)
    write_switches(module, {FUNCTION: check})
    return check


def lost_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the names of planned blocks that no longer have their function, because other code set their flags.

    Without an enabled plan there are none. Raises `OwnerConflictError` if torch's checkpoint wrapper has been put
    around a block since.
    """
    record = installation(model)
    if record is None or not record.enabled:
        return ()
    modules = find_blocks(model).modules
    return tuple(
        name
        for name, region in record.regions.items()
        if name not in modules or function_of(modules[name]) is not region or not is_on(modules[name])
    )


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
    record = installation(base)
    if record is None or not record.enabled:
        yield
        return
    take_off(base, record)
    try:
        yield
    finally:
        if installation(base) is record:
            put_on(find_blocks(base), record)


@contextlib.contextmanager
def trial(model: nn.Module, plan: Plan, spec: Spec | None = None, decider: Any = None) -> Iterator[Installation]:
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
    found = find_blocks(model)
    base, record = found.base, installation(found.base)
    spec = Spec(plan=GIVEN_PLAN) if spec is None else spec
    with paused(base):
        if record is not None:
            vars(base)[RECORD] = Installation(spec, plan, before=record.before, decider=record.decider)
        try:
            own = attach(found, spec, plan, decider)
            own.unchecked = True
            put_on(found, own)
            yield own
        finally:
            if record is None:
                detach(base)
            else:
                take_off(base, vars(base)[RECORD])
                vars(base)[RECORD] = record


def adopt(found: FoundBlocks, record: Installation, spec: Spec, plan: Plan) -> None:
    """Make `plan` the one that the record will enable next, with new functions that count from 0.

    First disable the current plan, if it is enabled.
    """
    if record.enabled:
        take_off(found.base, record)
    if record.planned is not None and plan != record.planned.plan:
        record.planned = None
    record.session = record.watch = None
    record.spec, record.plan = spec, plan
    record.heads.last = ""
    record.functions = Functions(spec)
    record.regions = record.functions.of(plan)


def exchange(base: nn.Module, record: Installation, planned: Any) -> None:
    """Switch to another plan of the same spec during training. Existing functions keep their counts.

    If only functions on blocks differ, exchange these and leave the hooks alone. All plans of a spec run the head
    alike.

    Args:
        base: the model.
        record: the record on it.
        planned: what a session records with the plan; see `Installation.planned`. If the plan has the same actions,
            only the record changes.
    """
    had_these_actions = record.enabled and planned.plan == record.plan
    record.planned = planned
    record.plan = planned.plan
    if had_these_actions and len(record.functions.made) == record.hooked:  # the predicted costs may be others
        return
    before = record.regions
    record.regions = record.functions.of(record.plan)
    if not record.enabled or len(record.functions.made) > record.hooked:  # new functions need hooks
        put_on(find_blocks(base), record)
        return
    for name, module in record.blocks.items():
        if record.regions.get(name) is not before.get(name):
            _switch(module, record.regions.get(name), record.before[name])


def _switch(module: nn.Module, region: Region | None, before: Mapping[str, Any]) -> None:
    """Let a block call `region`; without one, restore its state before the installation, but never checkpointed."""
    if region is None:
        switch_off(module, before)
    else:
        keeps = True if region.takes_caches else before.get(KEEPS_CACHE, Absent.ABSENT)
        write_switches(module, {FLAG: GATE, FUNCTION: region, KEEPS_CACHE: keeps})


def put_on(found: FoundBlocks, record: Installation) -> None:
    """Enable the record's plan: set functions and flags on the blocks, and register the hooks that engines need."""
    base = found.base
    if record.enabled:
        _take_off(base, record)
    record.remove_hooks()
    for name, module in carriers(base).items():
        record.before.setdefault(name, read_switches(module))
        _switch(module, record.regions.get(name), record.before[name])
    regions = [region for region in record.functions.made.values() if region.block in found.modules]  # not removed
    record.hooked = len(record.functions.made)
    record.blocks = dict(found.modules)
    if record.plan.head != "full":
        _put_on_head(found, record)
    if regions:
        _drop_input_gradients(base, record)
        for module, hook, when, with_kwargs in hooks_for(regions, found):
            if when == "instead":
                vars(module)["forward"] = Instead(base, module, hook, vars(module).get("forward"))
            elif when == "before":
                record.handles.append(module.register_forward_pre_hook(hook, with_kwargs=with_kwargs))
            else:
                record.handles.append(_always_after(module, hook))
    _put_on_forwards(found, record)
    record.enabled = True


def _put_on_forwards(found: FoundBlocks, record: Installation) -> None:
    """Register a `PassHook` on the model, on models inside it that hold stacks, and on modules that run stacks.

    The enable methods of models inside it do nothing from now on.
    """
    owned: dict[nn.Module, str] = {}
    """Module that runs stacks -> the name of the first."""
    for stack, owner in zip(dict.fromkeys(block.stack for block in found.blocks), found.owners, strict=True):
        owned.setdefault(owner, stack)
    for name, module in found.base.named_modules():
        inside, is_model = set(module.modules()), isinstance(module, compat.transformers.PreTrainedModel)
        if inside.isdisjoint(owned) or not (is_model or module in owned):
            continue
        for method in compat.transformers.ENABLE_NAMES if is_model and module is not found.base else ():
            vars(module).setdefault(method, Skipped(method))
        hook = PassHook(
            found.base,
            None if module is found.base else owned.get(module, name),
            compat.transformers.forward_parameters(module),
            tuple(block for block, its in found.modules.items() if module in owned and its in inside),
            bool(record.functions.made) or record.spec.is_planned,  # a plan may come after a cache was made
            module is found.owners[-1],
        )
        record.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        record.handles.append(_always_after(module, hook.after))


def _always_after(module: nn.Module, hook: Callable[..., Any]) -> Any:
    """Register a forward hook that is also called when the module raises an error."""
    with compat.torch.same_hook_number(module._forward_hooks):
        return module.register_forward_hook(hook, always_call=True)


def take_off(base: compat.transformers.PreTrainedModel, record: Installation) -> None:
    """Disable the record's plan, and end the current measurement of its session.

    The record, and the hooks that replace the enable and disable methods, remain.
    """
    if record.session is not None:
        record.session.stop(record)
    _take_off(base, record)


def _take_off(base: compat.transformers.PreTrainedModel, record: Installation) -> None:
    for name, module in carriers(base).items():
        switch_off(module, record.before.get(name, {}))
    record.remove_hooks()
    for module in base.modules():  # not only the current head: adapters may have wrapped it since
        replaced = (HeadForward, Instead, Skipped)
        for name in [key for key, value in vars(module).items() if isinstance(value, replaced)]:
            before = getattr(vars(module).pop(name), "before", None)
            if before is not None:
                vars(module)[name] = before
    for _ in range(record.input_gradient_hooks):
        base.enable_input_require_grads()
    record.input_gradient_hooks = 0
    record.enabled, record.blocks = False, {}


def _put_on_head(found: FoundBlocks, record: Installation) -> None:
    """Make the head run in chunks, or warn why it cannot."""
    base = found.base
    head = vocabulary_head(base)
    if head is None:
        warn_plain(f"the head of {type(base).__name__}", "it has no projection onto a vocabulary")
    elif "forward" in vars(head):
        warn_plain(f"the head of {type(base).__name__}", "something else has replaced its forward")
    else:
        vars(head)["forward"] = HeadForward(base, head, record.plan.head, record.heads)


def _drop_input_gradients(base: compat.transformers.PreTrainedModel, record: Installation) -> None:
    """Remove the hook that makes the embeddings' output require gradients, and keep PEFT and TRL from adding it.

    The hook exists for reentrant checkpointing. Non-reentrant checkpointing needs no input that requires gradients, and
    the hook makes frozen blocks below the first adapter save, recompute and run backward.
    https://github.com/huggingface/transformers/issues/21381
    """
    is_one = compat.transformers.makes_inputs_require_gradients
    for module in base.modules():
        found = [key for key, hook in module._forward_hooks.items() if is_one(hook)]
        for key in found:  # not by handle: a second enable call loses the first one's handle
            del module._forward_hooks[key]
        record.input_gradient_hooks = max(record.input_gradient_hooks, len(found))
    for name in _INPUT_GRADIENT_NAMES:
        if hasattr(base, name):
            vars(base)[name] = Skipped(name)


class EnableHook(ModelHook):
    """`model.gradient_checkpointing_enable` and `model.activation_checkpointing_enable` of an installed model."""

    calls = 0
    """Enable calls that this class has handled in this process, over all models."""

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

        Raises `SpecError` for invalid keys, and `OwnerConflictError` if accelerate's FSDP plugin is also set to
        checkpoint.
        """
        asked = gradient_checkpointing_kwargs or activation_checkpointing_kwargs or {}
        if not isinstance(asked, Mapping):
            raise SpecError([f"the checkpointing kwargs must be a dict, but are {asked!r} instead"])
        if compat.distributed.accelerate_owns_checkpointing():
            raise OwnerConflictError(
                "accelerate's FSDP plugin is set to checkpoint activations too (`fsdp_activation_checkpointing: true`)"
                ", and it recomputes without preserving random state. Set it to false: checkpointing needs one owner."
            )
        base = self.base
        record = installation(base)
        assert record is not None, "the hook outlived its record"
        # transformers takes these two out of the kwargs and passes them separately.
        asked = {"every_n_layers": every_n_layers, "offload": offload, **asked}
        found = find_blocks(base)
        decided = None if record.decider is None else record.decider.asked(found, record, asked)
        if decided is not None:
            adopt(found, record, *decided)
        put_on(found, record)
        EnableHook.calls += 1
        if record.told != (record.spec, record.plan):  # a plan for a batch is logged when it is made
            spec, plan = record.told = record.spec, record.plan
            later = f"{spec.policy} {spec.to_dict().get('budget', '')}".rstrip() + ", planned in the first steps"
            tell("hf_ckpt: %s: %s", type(base).__name__, later if spec.is_planned else plan.summary())


class DisableHook(ModelHook):
    """`model.gradient_checkpointing_disable` and `model.activation_checkpointing_disable` of an installed model."""

    def __call__(self) -> None:
        """Disable the plan. The record keeps it, so that an enable call can enable it again."""
        record = installation(self.base)
        assert record is not None, "the hook outlived its record"
        take_off(self.base, record)
