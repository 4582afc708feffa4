"""Answers `hf_ckpt.install`: makes the plan that a spec asks for, and puts it on a model or on all of the process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from hf_ckpt.attach import attach as on_model
from hf_ckpt.attach.attach import attach, description, detach
from hf_ckpt.attach.process import hook_process, unhook_process
from hf_ckpt.attach.record import GIVEN_PLAN, Installation, installation
from hf_ckpt.models.blocks import FoundBlocks, feed_forwards, find_blocks
from hf_ckpt.planner.policies import fit_plan, make_plan
from hf_ckpt.spec.description import Description
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec, SpecLike
from hf_ckpt.training.session import Session


def install(
    model: nn.Module | None = None,
    spec: SpecLike | Plan = None,
    *,
    enable_when_trained: bool = False,
    around_training_step: Callable[..., Any] | None = None,
) -> Description | None:
    """Let hf_ckpt answer `gradient_checkpointing_enable` (and its new name) of a model, or of every model.

        hf_ckpt.install(model)                                     # a bare enable call then means `full`
        hf_ckpt.install(model, {"policy": "full", "layers": "0-15"})
        hf_ckpt.install(spec="full")                               # every PreTrainedModel of the process

    Args:
        model: a PreTrainedModel, plain or wrapped by PEFT, DDP or torch.compile. None hooks every PreTrainedModel of
            the process from now on, until `uninstall()`.
        spec: what an enable call without a policy of its own applies, in any form that `Spec.parse` takes, or a saved
            `Plan`. Without it that is the plan already installed, or else `full`.
        enable_when_trained: only without a model: also enable on every trainable model that `Accelerator.prepare`
            gets, and on every other one when its first training forward begins, for scripts that never ask for it.
        around_training_step: only without a model: what every Trainer runs in place of its `training_step`, called with
            the trainer, that method, and its arguments.

    Nothing is enabled yet, unless the model already had checkpointing on; then the plan takes over at once.

    Returns what is installed on the model, as `describe`; None without a model.

    Raises:
        SpecError: the spec is refused; whatever was installed before stays as it was.
        NoBlocksError: no blocks were found in the model.
        PlanMismatchError: the plan was made for another model.
        OwnerConflictError: the blocks belong to a larger model whose plan is enabled.
    """
    if model is None:
        _install_everywhere(spec, enable_when_trained, around_training_step)
        return None
    found = install_one(model, spec)
    record = installation(found.base)
    assert record is not None
    return description(model, found, record)


def uninstall(model: nn.Module | None = None) -> None:
    """Take everything off a model, so that its attributes, hooks and flags are as before; without a model, undo
    `install()` of the process.

    A model on which nothing is installed is left alone.
    """
    if model is None:
        unhook_process()
    else:
        detach(model)


@contextlib.contextmanager
def trial(model: nn.Module, spec: SpecLike | Plan = None) -> Iterator[None]:
    """As a context: enable a plan on a model; afterwards the model, its installation and its counts are as they were.

    Args:
        model: a PreTrainedModel, plain or wrapped.
        spec: as `install` takes it. Without it the installed plan is enabled, or else `full`.

    Raises what `install` raises, before anything changes.
    """
    record = installation(model)
    if spec is None and record is not None:
        asked, plan = record.spec, record.plan
    else:
        asked, plan = decide(find_blocks(model), spec)
    with on_model.trial(model, plan, asked, DECIDER):
        yield


def install_one(model: nn.Module, given: SpecLike | Plan) -> FoundBlocks:
    """Install on one model and return its blocks; without a spec, what is installed already stays.

    Raises what `install` raises.
    """
    found = find_blocks(model)
    if given is not None or installation(found.base) is None:
        attach(found, *decide(found, given), DECIDER)
    return found


def decide(found: FoundBlocks, given: SpecLike | Plan) -> tuple[Spec, Plan]:
    """Read what was asked for: the spec, and the plan that it means for the blocks that were found.

    Raises `SpecError` where the spec is refused or does not fit the blocks, and `PlanMismatchError` for a plan that was
    made for another model.
    """
    if isinstance(given, Plan):
        spec, plan = Spec(plan=GIVEN_PLAN), fit_plan(given, found.blocks, found.family, found.model)
    else:
        spec = Spec.parse(given)
        plan = make_plan(spec, found.blocks, found.family, found.model)
    if plan.mlp != "full":
        feed_forwards(found)
    return spec, plan


def _install_everywhere(
    given: SpecLike | Plan, enable_when_trained: bool, around_training_step: Callable[..., Any] | None
) -> None:
    """Install on every model of the process; a spec that is refused is refused before anything changes."""
    if not isinstance(given, Plan):
        given = Spec.parse(given)
        if given.plan is not None:
            Plan.load(given.plan)
    hook_process(
        functools.partial(install_one, given=given),
        enable_when_trained=enable_when_trained,
        around_training_step=around_training_step,
    )


class _Decider:
    """Decides for the hooks on a model what the model gets: see `attach.record.Decider`."""

    def asked(self, found: FoundBlocks, record: Installation, asked: Mapping[str, Any]) -> tuple[Spec, Plan] | None:
        """The spec and plan after an enable call with the arguments `asked`; None where they stay as they are."""
        spec = record.spec.updated(asked)
        changed = {
            block.name for block, _ in record.plan.actions
        } != found.modules.keys()  # layers were added or dropped
        if spec == record.spec and not changed:
            return None
        # A plan that was loaded or given once stays; its file may be gone by now.
        same = spec.plan is not None and spec.plan == record.spec.plan
        plan = decide(found, record.plan if same else spec)[1]
        chunks: dict[str, Any] = {key: getattr(spec, key) for key in ("head", "mlp") if key in asked}
        return spec, dataclasses.replace(plan, **chunks) if same else plan

    def session(self, base: nn.Module, record: Installation) -> Session:
        """Begin what measures and plans for the batches of a run under `budget` and `auto`."""
        return Session(base, record)


DECIDER = _Decider()
