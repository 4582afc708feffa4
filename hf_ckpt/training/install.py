"""`hf_ckpt.install` and `hf_ckpt.uninstall`: turn a spec into a plan, for one model or all models of the process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hf_ckpt.attach.attach import GIVEN_PLAN, attach, detach, spec_of, tell_plan
from hf_ckpt.attach.described import description_of
from hf_ckpt.attach.enable import put_on
from hf_ckpt.attach.for_a_while import temporarily
from hf_ckpt.attach.hooks import WHOLE
from hf_ckpt.attach.process import ProcessHooks, detach_everywhere, everywhere, install_on_enabled
from hf_ckpt.attach.record import Installation, installation, record_on
from hf_ckpt.errors import NoBlocksError, PlanMismatchError, SpecError
from hf_ckpt.logs import warn_once
from hf_ckpt.models.blocks import FoundBlocks, find_blocks
from hf_ckpt.planner.policies import fit_plan, make_plan, parse_for
from hf_ckpt.spec.actions import KEEP
from hf_ckpt.spec.description import Description
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec, SpecLike
from hf_ckpt.training.ranks import session_for
from hf_ckpt.training.session import Session
from hf_ckpt.training.watch import Watch
from hf_ckpt.units import counted

log = logging.getLogger(__name__)


def install(
    model: nn.Module | None = None, spec: SpecLike | Plan = None, *, enable_when_trained: bool = False
) -> Description | None:
    """Choose what `model.activation_checkpointing_enable()` and `gradient_checkpointing_enable()` do.

        hf_ckpt.install(model, {"policy": "selective", "layers": "0-15"})
        model.activation_checkpointing_enable()  # a Trainer calls this if its arguments ask for checkpointing

    `install` stores the plan on the model. The plan takes effect with the next enable call, or at once if
    checkpointing is already enabled. Gradients stay the same; no parameter or module is renamed.

    Args:
        model: a `PreTrainedModel`, plain or wrapped by PEFT, DDP or torch.compile. None installs on every
            `PreTrainedModel` of the process, including models created later, until `uninstall()`.
        spec: the policy, in any form that `Spec.parse` accepts, or a `Plan`. None keeps an installed plan; a model
            without one gets `full`. Arguments of an enable call take precedence.
        enable_when_trained: for scripts that never enable checkpointing. Enables it on every trainable model when its
            first training forward begins. Ignored if `model` is given.

    Returns the same as `describe(model)`, or None if no model is given.

    Raises:
        SpecError: the spec is invalid. An installed plan is unchanged.
        NoBlocksError: the model has no blocks that can be checkpointed.
        PlanMismatchError: the plan was made for another model.
        OwnerConflictError: the model is part of a larger model whose plan is enabled.
    """
    if model is None:
        if spec is not None and not isinstance(spec, Plan):
            spec = Spec.parse(spec)  # an invalid one is refused before anything changes
            if spec.plan is not None:
                Plan.load(spec.plan)
        everywhere.close()

        def put(base: nn.Module) -> None:
            install_on(find_blocks(base), spec)

        everywhere.callback(ProcessHooks(put, enable_when_trained=enable_when_trained).close)
        install_on_enabled(put)
        return None
    blocks = find_blocks(model)
    record = install_on(blocks, spec)
    record.is_of_process = False  # from now on it is the user's own
    return description_of(blocks, record)


def uninstall(model: nn.Module | None = None) -> None:
    """Undo `install`: restore the model's attributes, hooks and flags.

        hf_ckpt.uninstall(model)

    Args:
        model: plain or wrapped. A model without a plan is unchanged. None undoes `install()` without a model, on all
            models and copies of them; models with an own `install(model)` keep their plan.
    """
    if model is None:
        everywhere.close()
        detach_everywhere()
    else:
        detach(model)


def installed_temporarily(
    model: nn.Module, spec: SpecLike | Plan = None
) -> contextlib.AbstractContextManager[Installation]:
    """Make a context that enables a plan on a model, and restores the model, its counts and its session at the end.

    Args:
        model: a `PreTrainedModel`, plain or wrapped.
        spec: as for `install`. None enables the installed plan, or `full` if there is none. Under `budget` and `auto`
            this is the current plan, without any measuring.

    Raises the errors of `install`, before the model changes.
    """
    record = installation(model)
    if spec is not None or record is None:
        parsed, plan = decide(find_blocks(model), spec)
        return temporarily(model, plan, parsed, DECIDER)
    # A spec with a fixed plan: `budget` would begin a session, and measure.
    parsed = spec_of(record.plan, record.spec) if record.spec.is_planned else record.spec
    return temporarily(model, record.plan, parsed, DECIDER)


def install_on(blocks: FoundBlocks, spec: SpecLike | Plan) -> Installation:
    """Install on one model, and return its record. Without a spec, keep an installed plan.

    Raises the errors of `install`.
    """
    record = record_on(blocks.base)
    if record is None or spec is not None:
        parsed, plan = decide(blocks, spec)
        record = attach(blocks, parsed, plan, DECIDER)
        if record.enabled:
            tell_plan(blocks.base, record)
    return record


def _plans(blocks: FoundBlocks) -> Callable[[Spec], Plan]:
    """Return what makes the plan of a spec for these blocks."""
    return functools.partial(make_plan, blocks=blocks.blocks, family=blocks.family, model=blocks.class_name)


def decide(blocks: FoundBlocks, spec: SpecLike | Plan) -> tuple[Spec, Plan]:
    """Return the parsed spec, and the plan that it gives these blocks.

    Raises `SpecError` if the spec is invalid or does not fit the blocks, and `PlanMismatchError` for a plan of another
    model.
    """
    plan_of = _plans(blocks)
    if isinstance(spec, Plan):
        parsed = Spec(plan=GIVEN_PLAN)
        plan = fit_plan(spec, blocks.blocks, blocks.family, blocks.class_name)
    else:
        parsed = parse_for(lambda: Spec.parse(spec), plan_of)
        plan = plan_of(parsed)
    longest = 1 + max(block.index for block in blocks.blocks)
    if parsed.every_n_layers > longest:
        text = "hf_ckpt: `every_n_layers` is %d, but no stack of %s has more than %s: only block 0 is used."
        warn_once(log, text, parsed.every_n_layers, blocks.class_name, counted(longest, "block"))
    if plan.head != "whole" and blocks.head is None:
        warn_once(log, WHOLE, blocks.class_name, "it has no projection onto a vocabulary")
        plan = dataclasses.replace(plan, head="whole")
    return parsed, plan


class Decider:
    """Chooses plans for the hooks on a model, and is pickled with them.

    `attach` may not import this room. So whoever installs hands this object over, and `attach` calls its methods.
    """

    def asked(self, blocks: FoundBlocks, record: Installation, options: Mapping[str, Any]) -> tuple[Spec, Plan] | None:
        """Return the spec and plan after an enable call with these options; None if they do not change."""
        user_spec = record.tightened
        has_same_blocks = {block.name for block, _ in record.plan.actions} == blocks.modules.keys()
        # The guard's plan is none for layers that were added or dropped since.
        before = record.spec if user_spec is None or has_same_blocks else user_spec
        spec = parse_for(lambda: before.updated(options), _plans(blocks))
        # TRL enables a model again after each generation, and a Trainer in each `train`.
        if has_same_blocks and (
            spec == record.spec or (user_spec is not None and user_spec.updated(options) == user_spec)
        ):
            return None
        if spec.plan is None or spec.plan != record.spec.plan:
            return spec, decide(blocks, spec)[1]
        # Keep a plan that was loaded or passed before; its file may be gone by now.
        plan = dataclasses.replace(record.plan, head=spec.head) if "head" in options else record.plan
        return spec, decide(blocks, plan)[1]

    def changed(self, base: nn.Module, record: Installation) -> None:
        """Plan for the layers that a model has now. Some were added, removed or replaced while its plan is enabled."""
        try:
            blocks = find_blocks(base)
        except NoBlocksError:  # no reason to end a training, either
            text = (
                "hf_ckpt: %s has no blocks any more, and trains without a plan. Call `hf_ckpt.install` again "
                "once it has some."
            )
            warn_once(log, text, type(base).__name__)
            detach(base)
            return
        try:
            decided = self.asked(blocks, record, {})
        except (SpecError, PlanMismatchError) as error:  # no reason to end a training
            text = "hf_ckpt: the layers of %s have changed, and its plan does not fit: new ones keep everything. %s"
            warn_once(log, text, blocks.class_name, error)
            actions = tuple((block, record.plan.active().get(block.name, KEEP)) for block in blocks.blocks)
            decided = record.spec, dataclasses.replace(record.plan, actions=actions)
        if decided is None:  # as many as before, or only others than blocks, such as the head
            put_on(blocks, record)
            return
        attach(blocks, *decided, self)
        tell_plan(base, record)

    def before_forward(
        self, base: nn.Module, record: Installation, running: nn.Module, stack: str | None, args: Any, kwargs: Any
    ) -> None:
        """Let the session plan for a training forward of `running` that is about to begin, and the watch check it."""
        spec = record.spec
        if isinstance(record.watch, Watch):
            record.watch.avoid(base, record)
        session: Session | None = None
        if spec.is_planned:
            if not isinstance(record.session, Session):
                record.session = session_for(base, record)
            session = record.session
            session.on_batch(record, running, stack, args, kwargs)
        # After the session, whose measurements it leaves alone.
        if spec.check_every and not record.unchecked:
            if not isinstance(record.watch, Watch):
                record.watch = Watch(spec.check_every, spec.on_mismatch)
            record.watch.on_forward(base, record, running, session)


DECIDER = Decider()
