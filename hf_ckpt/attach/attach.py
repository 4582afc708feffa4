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
from hf_ckpt.attach import switches
from hf_ckpt.attach.enable import put_on, take_off
from hf_ckpt.attach.hooks import ModelHook
from hf_ckpt.attach.passes import Reminder
from hf_ckpt.attach.record import RECORD, Decider, Installation, record_on
from hf_ckpt.attach.switches import carriers, function_of, is_on
from hf_ckpt.engines.region import Region
from hf_ckpt.errors import OwnerConflictError, SpecError
from hf_ckpt.logs import tell
from hf_ckpt.models.blocks import FoundBlocks, base_model, find_blocks, plain_modules
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec

GIVEN_PLAN = "(given as a Plan object)"
"""The value of `Spec.plan` for a plan that was passed as an object, and so has no path."""


def spec_of(plan: Plan, options: Spec) -> Spec:
    """Return the spec of a plan that was passed as an object, with what `options` says about how it runs."""
    keys = ("preserve_rng_state", "determinism_check", "host_budget", "check_every", "on_mismatch")
    return Spec(plan=GIVEN_PLAN, head=plan.head, **{key: getattr(options, key) for key in keys})


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
            f"{blocks.class_name} is part (or a copy of a part) of a larger model whose plan is enabled on the same "
            "blocks; install on that one, or uninstall it first; call gradient_checkpointing_disable() on a copy."
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
    record.plan = record.avoiding(plan)
    record.tightened = None
    record.begin_anew()


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
