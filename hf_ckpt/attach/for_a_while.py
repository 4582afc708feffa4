"""Changes of a model that end by themselves: a check of one forward, a pause, and a plan inside a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach import switches
from hf_ckpt.attach.attach import GIVEN_PLAN, attach, detach
from hf_ckpt.attach.enable import put_on, take_off
from hf_ckpt.attach.record import RECORD, Installation, PlanChooser, record_on
from hf_ckpt.attach.switches import FUNCTION
from hf_ckpt.engines.check import Check
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec


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
def without_cache(base: nn.Module) -> Iterator[None]:
    """Context manager in which a model builds no key/value cache, unless a call asks for one."""
    all_configs: list[Any] = [vars(module).get("config") for module in base.modules()]
    configs = {id(config): config for config in all_configs if getattr(config, "use_cache", False)}
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


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
def temporarily(
    model: nn.Module, plan: Plan, spec: Spec | None = None, decider: PlanChooser | None = None
) -> Iterator[Installation]:
    """Enable a plan inside the `with` block, and restore the model, its installation and its counts afterwards.

    The plan gets a record of its own, which `with` returns, so the plans, the watch and all counts of an installation
    are left alone. A session only drops what it has measured of a step that has not ended.

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
            vars(base)[RECORD] = Installation(spec, plan, decider=before.decider)
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
