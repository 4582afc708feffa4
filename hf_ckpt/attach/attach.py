"""Put a record on one model, and take it off again.

`attach` puts a small record and callable hooks on the base PreTrainedModel. The hooks enable the plan at every enable
call and disable it at every disable call, see `enable`. If an enable call or a batch needs another plan, they get it
from the record's decider. Everything on the model can be pickled, is copied by `deepcopy`, and is removed by `detach`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.enable import put_on, remove, remove_others, take_off
from hf_ckpt.attach.hooks import ModelHook
from hf_ckpt.attach.passes import Reminder
from hf_ckpt.attach.puts import Hooked, Put, put
from hf_ckpt.attach.record import RECORD, Installation, PlanChooser, record_on
from hf_ckpt.attach.switches import FLAG, function_of, is_on
from hf_ckpt.engines.region import Region
from hf_ckpt.errors import OwnerConflictError, SpecError
from hf_ckpt.logs import tell
from hf_ckpt.models.blocks import FoundBlocks, base_model, find_blocks
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec

GIVEN_PLAN = "(given as a Plan object)"
"""The value of `Spec.plan` for a plan that was passed as an object, and so has no path."""


def spec_of(plan: Plan, options: Spec) -> Spec:
    """Return the spec of a plan that was passed as an object, with what `options` says about how it runs."""
    keys = ("preserve_rng_state", "determinism_check", "host_budget", "check_every", "on_mismatch")
    return Spec(plan=GIVEN_PLAN, head=plan.head, **{key: getattr(options, key) for key in keys})


def attach(blocks: FoundBlocks, spec: Spec, plan: Plan, decider: PlanChooser | None) -> Installation:
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
    records = {module: record for module in blocks.named.values() if (record := record_on(module)) is not None}
    regions_here = {id(region) for record in records.values() for region in record.regions.values()}
    functions = map(function_of, blocks.modules.values())
    is_part = base not in records or not records[base].enabled  # else these are copies of its own blocks
    if is_part and any(isinstance(function, Region) and id(function) not in regions_here for function in functions):
        raise OwnerConflictError(
            f"{blocks.class_name} is part (or a copy of a part) of a larger model whose plan is enabled on the same "
            "blocks; install on that one, or uninstall it first; call gradient_checkpointing_disable() on a copy."
        )
    was_on = is_on(*blocks.carriers.values()) or any(record.enabled for record in records.values())
    record = records.get(base)
    if record is None:
        remove_others(blocks)
        record = Installation(spec, plan, decider=decider)
        _put_record(blocks, record)
    record.adopt(spec, plan)
    if was_on:
        put_on(blocks, record)
    return record


def _put_record(blocks: FoundBlocks, record: Installation) -> None:
    """Put a record on a model, methods that enable and disable its plan, and hooks that remind of it."""
    base = blocks.base
    vars(base)[RECORD] = record
    # Under `vars`, they are no submodules, and the class and other models keep their methods. Libraries call either
    # name, and transformers' new method looks whether an object has replaced the old one.
    rows = [Put(base, name, EnableHook(base, name)) for name in compat.transformers.ENABLE_NAMES]
    rows += [Put(base, name, DisableHook(base, name)) for name in compat.transformers.DISABLE_NAMES]
    rows += [Put(module, FLAG, False) for module in blocks.carriers.values() if is_on(module)]
    put(rows, record.installed)
    # PEFT calls a model's `forward` past its hooks, but not that of the modules that run stacks.
    runners = dict.fromkeys(blocks.runners.values())
    put((Hooked(runner, Reminder(base), "before", False) for runner in runners), record.puts)


def detach(model: nn.Module) -> None:
    """Remove everything from a model: attributes, hooks and flags are exactly as before `attach`.

    Without a record on the model, do nothing.
    """
    remove(base_model(model))


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
    """`model.gradient_checkpointing_enable` and `model.activation_checkpointing_enable` of an installed model.

    Args:
        base: the model.
        name: the name of the method.
    """

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
        base, name = self.arguments()
        record = self.record
        if record is None:  # what somebody has put around this method outlives `uninstall`
            getattr(type(base), name)(base, options)
            return
        # transformers takes these two out of the kwargs and passes them separately.
        options = {"every_n_layers": every_n_layers, "offload": offload, **options}
        blocks = find_blocks(base)
        decided = None if record.decider is None else record.decider.asked(blocks, record, options)
        if decided is not None:
            record.adopt(*decided)
        put_on(blocks, record)
        EnableHook.calls += 1
        tell_plan(base, record)


class DisableHook(ModelHook):
    """`model.gradient_checkpointing_disable` and `model.activation_checkpointing_disable` of an installed model.

    Args:
        base: the model.
        name: the name of the method.
    """

    def __call__(self) -> None:
        """Disable the plan. The record keeps it, so that an enable call can enable it again."""
        base, name = self.arguments()
        record = self.record
        if record is None:
            getattr(type(base), name)(base)
        else:
            take_off(base, record)
