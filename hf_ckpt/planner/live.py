"""The first plan of `budget` and `auto` in training, and what further ones are made from: costs of a live model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.around import watched_forwards
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.logs import PLANS
from hf_ckpt.measure.machine import DeviceMemory, device_memory
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.planner.buckets import Planned
from hf_ckpt.planner.budgets import costs_behind, plan_of, plan_of_least, plan_within
from hf_ckpt.planner.options import cost_options, ways_to_run
from hf_ckpt.planner.shapes import BatchShape, autocast_of, is_padded, micro_steps, sizes_with
from hf_ckpt.prediction.batches import batch_for, batch_of, inputs_of, loss_for, step_as_called
from hf_ckpt.prediction.costs import Costs
from hf_ckpt.prediction.devices import Device
from hf_ckpt.prediction.fsdp2 import Layout, with_shards
from hf_ckpt.prediction.layout import held_bytes, layout_of
from hf_ckpt.prediction.machine import this_device
from hf_ckpt.prediction.optimizers import bytes_of
from hf_ckpt.prediction.skeleton import Skeleton, skeleton_of
from hf_ckpt.prediction.trace import Step, actions_for, trace_costs
from hf_ckpt.spec.actions import ACTIONS, KEEP, Action, lighter, offloads
from hf_ckpt.spec.plan import Plan, Prediction
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import budget_bytes, format_bytes, format_seconds, parse_bytes

log = logging.getLogger(__name__)

MARGIN = 0.05
"""Share of the device's memory that `auto` leaves free."""


def plan_for(model: nn.Module, spec: Spec, shape: BatchShape, call: compat.Call | None = None) -> Planned:
    """The first plan of a training: the fastest one for a batch shape and a model in its present state.

    All ranks agree on it, so that all of them must call this: it is made for the largest sizes and parts and the
    smallest limit of any rank, and is that of rank 0. Where one of them cannot plan, all raise.

    Args:
        model: plain or wrapped; no plan is enabled on it.
        spec: with the policy `budget` or `auto`.
        shape: of the batch.
        call: how the trainer calls the model; None where it is not known.

    Raises `InfeasibleError` where no plan fits. Raises `HfCkptError` where parameters are split over ranks by other
    means than FSDP2, another rank cannot plan, or the model cannot be traced.
    """
    layout = _layout_of(model, spec, shape)
    memory = device_memory(held_bytes(model), {parameter.device for parameter in model.parameters()})
    shape, limit, layout = _with_room_for_all_ranks(shape, limit_bytes(spec, memory), layout)
    device = this_device()
    costs: tuple[Costs, ...] = ()
    plan: Plan | None = None
    failure: Exception | None = None
    try:
        costs = _traced(model, spec, shape, layout, call)
        plan = plan_within(costs, limit, device.name)
    except Exception as error:  # whatever it is, the other ranks wait for this one to tell
        failure = error
    plan = _agreed(plan, failure)
    if failure is not None:
        raise failure
    assert plan is not None
    tell(spec, shape, plan, limit)
    return Planned(shape, limit, costs, plan, memory)


def costs_of(
    model: nn.Module, spec: Spec, shape: BatchShape, call: compat.Call | None, known: Costs
) -> tuple[Costs, ...]:
    """The candidates for a further plan of a training, for another batch shape.

    Further plans are each rank's own: under DDP and FSDP2 ranks may recompute differently, because their collective
    operations are the same whatever the actions. Arguments and errors are those of `plan_for`, which agrees on the
    first plan; here, nobody is waited for. `known` are costs of another shape, which have the same actions.
    """
    added = {*offloads().values(), *lighter()}
    actions = [action for action in known.actions if action not in added]
    return _traced(model, spec, shape, _layout_of(model, spec, shape), call, actions)


def _layout_of(model: nn.Module, spec: Spec, shape: BatchShape) -> Layout | None:
    """How FSDP2 holds the parameters; None without it. Raises `HfCkptError` where others split them over ranks."""
    layout = layout_of(model, shape.held_back)
    if layout is None and compat.is_sharded(model):
        raise HfCkptError(
            f"`policy: {spec.policy}` cannot plan for parameters that are split over ranks by FSDP1 or ZeRO-3. Use "
            "`selective` or `full`, a plan of `hf-ckpt plan`, or FSDP2 (`fsdp_version: 2`)."
        )
    return layout


def _traced(
    model: nn.Module,
    spec: Spec,
    shape: BatchShape,
    layout: Layout | None,
    call: compat.Call | None,
    actions: Sequence[Action] | None = None,
) -> tuple[Costs, ...]:
    host_limit = None if spec.host_budget is None else parse_bytes(spec.host_budget)
    device, compiled = this_device(), spec.compile is not None
    return _in_clean_thread(
        lambda: _trace(model, spec, host_limit, shape, device, layout, call, compiled=compiled, actions=actions)
    )


def within_or_least(costs: Sequence[Costs], limit: int, bias: int, device: str) -> tuple[Plan, bool]:
    """The fastest plan for a limit less a bias, in bytes, or the one with the lowest peak; and whether it is that."""
    try:
        return plan_within(costs, limit - bias, device), False
    except InfeasibleError:
        return plan_of_least(costs, limit, device), True


def _with_room_for_all_ranks(
    shape: BatchShape, limit: int, layout: Layout | None
) -> tuple[BatchShape, int, Layout | None]:
    """The largest shape, the smallest limit and the largest parts of any rank. All ranks must call it."""
    for theirs, their_limit, their_layout in compat.of_all_ranks((shape, limit, layout)):
        shape, limit = shape.with_room_for(theirs), min(limit, their_limit)
        layout = layout.largest(their_layout) if layout is not None and their_layout is not None else layout
    return shape, limit, layout


def _agreed(plan: Plan | None, failure: Exception | None) -> Plan | None:
    """The plan of rank 0. All ranks must call it.

    Raises `HfCkptError` where this rank has a plan and another has none, because that one will not go on.
    """
    ranks = compat.of_all_ranks((None if plan is None else plan.to_dict(), str(failure)))
    without = [(rank, text) for rank, (found, text) in enumerate(ranks) if found is None]
    if failure is None and without:
        raise HfCkptError(f"rank {without[0][0]} cannot plan: {without[0][1]}")
    return None if ranks[0][0] is None else Plan.from_dict(ranks[0][0])


def prediction_of(model: nn.Module, plan: Plan, shape: BatchShape) -> Prediction:
    """What a plan is predicted to cost for a batch shape, with what fills its peak.

    Args:
        model: plain or wrapped; no plan is enabled on it.
        plan: of any policy. Its segments are priced as single blocks.
        shape: of the batch.

    Raises `HfCkptError` where that cannot be told: for parameters that are split over ranks, for actions that planning
    does not choose from, and where the model cannot be traced.
    """
    if compat.is_sharded(model):
        raise HfCkptError("parameters are split over ranks")
    device = this_device()
    actions = [(block, dataclasses.replace(action, segment=None)) for block, action in plan.actions]
    if device.name == "cpu":  # there, nothing is copied to host memory
        actions = [
            (block, Action("full") if action.kind == "offload" else dataclasses.replace(action, moved=False))
            for block, action in actions
        ]
    host_limit = sys.maxsize if any(action.kind == "offload" or action.moved for _, action in actions) else None
    compiled = [action for _, action in actions if ACTIONS[action.kind].compiles]
    if compiled and len(compiled) < len(actions):
        raise HfCkptError("some of its blocks are compiled, and others are not")
    kept = {moved: on_device for on_device, moved in offloads().items()}
    asked: Sequence[Action] = list(dict.fromkeys((KEEP, *(kept.get(action, action) for _, action in actions))))
    if compiled:
        asked = sorted(set(compiled), key=lambda action: -(action.share or 0.0))
    candidates = _in_clean_thread(lambda: _trace(model, plan, host_limit, shape, device, actions=asked))
    try:
        costs, choice = costs_behind(candidates, dataclasses.replace(plan, actions=tuple(actions)))
    except ValueError as error:
        raise HfCkptError(str(error)) from error
    prediction = plan_of(costs, choice, device=device.name).prediction
    assert prediction is not None
    return prediction


def limit_bytes(spec: Spec, memory: DeviceMemory) -> int:
    """The peak that the policy `budget` or `auto` allows, in bytes.

    `auto` allows what the process may come to hold, less a margin (`MARGIN`); shares are of all of the memory.
    """
    if spec.policy == "auto":
        return memory.available_bytes - round(MARGIN * memory.total_bytes)
    assert spec.budget is not None, "a spec without a budget is refused when it is read"
    return budget_bytes(spec.budget, memory.total_bytes)


def _trace(
    model: nn.Module,
    asked: Spec | Plan,
    host_limit: int | None,
    shape: BatchShape,
    device: Device,
    layout: Layout | None = None,
    call: compat.Call | None = None,
    *,
    compiled: bool = False,
    actions: Sequence[Action] | None = None,
) -> tuple[Costs, ...]:
    """The candidates for a plan of a live model; see `cost_options` for `host_limit`.

    Head and feed-forward run as is asked, in which a spec leaves more open than a plan. Blocks have the `actions` that
    are given, or else those that a plan chooses from, in eager mode or `compiled`.
    """
    skeleton = skeleton_of(model)
    optimizers = compat.optimizers_of(model)
    step = Step(
        batch=batch_of(shape.inputs) if shape.inputs else batch_for(skeleton.base, shape.sizes),
        padded=shape.padded,
        autocast=shape.autocast,
        accumulation=shape.accumulation,
        optimizer_bytes=bytes_of(optimizers) if optimizers else None,
        loss=loss_for(skeleton.base, shape.inputs),
    )
    if compiled and actions is None:
        actions = actions_for(skeleton, step, device, compiled=True)
    mlps = ways_to_run(asked.mlp) if isinstance(asked, Spec) else (asked.mlp,)
    step, ways = _costs_as_called(skeleton, step, device, call, actions, mlps)
    options = functools.partial(cost_options, skeleton=skeleton, step=step, device=device)
    if layout is not None:  # a sharded head cannot run in chunks
        found = options(ways, head="full", host_limit=host_limit, segments=False)
        return tuple(with_shards(each, dataclasses.replace(layout, held_back=shape.held_back)) for each in found)
    if compat.is_distributed():
        # DistributedDataParallel keeps a second copy of all gradients, in its buckets.
        static = ways[0].static
        static = dataclasses.replace(static, buffers=static.buffers + static.gradients)
        ways = [dataclasses.replace(costs, static=static) for costs in ways]
    return options(ways, head=asked.head, host_limit=host_limit, segments=compat.parameters_stay(model))


def _costs_as_called(
    skeleton: Skeleton,
    step: Step,
    device: Device,
    call: compat.Call | None,
    actions: Sequence[Action] | None,
    mlps: Sequence[int | str],
) -> tuple[Step, list[Costs]]:
    """What the step costs as the trainer runs it, or as the model runs by itself where that cannot be traced.

    The costs are those with the feed-forward of each block as each of `mlps` says.
    """

    def traced(step: Step) -> list[Costs]:
        chosen = actions_for(skeleton, step, device) if actions is None else actions
        return [trace_costs(skeleton, step, device, actions=chosen, mlp=mlp) for mlp in mlps]

    if call is not None:
        as_called = step_as_called(step, call)
        try:
            return as_called, traced(as_called)
        except HfCkptError as error:
            log.info("hf_ckpt: planned with the model's own loss, because the trainer's cannot be traced: %s", error)
    return step, traced(step)


def _in_clean_thread(work: Callable[[], tuple[Costs, ...]]) -> tuple[Costs, ...]:
    """Do work in a thread of its own, so that it runs without the training's autocast, saved-tensor hooks and dispatch
    modes. Random state is left as it was."""
    found: list[tuple[Costs, ...]] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            with compat.forked_random_state(), torch.enable_grad():
                found.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="hf_ckpt planning")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


def tell(spec: Spec, shape: BatchShape, plan: Plan, limit: int) -> None:
    """Log a plan."""
    prediction = plan.prediction
    assert prediction is not None
    PLANS.info(
        "hf_ckpt: %s: planned for %s within %s (`%s`): %s; peak %s, step %s predicted",
        plan.model,
        shape,
        format_bytes(limit),
        spec.policy,
        plan.summary(),
        format_bytes(prediction.peak_bytes),
        format_seconds(prediction.step_seconds),
    )


@contextlib.contextmanager
def watching(model: nn.Module) -> Iterator[list[BatchShape]]:
    """As a context: the shapes of the batches that training forwards of a model are given, in a list that grows."""
    stacks = list(dict.fromkeys(block.stack for block in find_blocks(model).blocks))
    seen: list[BatchShape] = []

    def note(base: nn.Module, stack: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        inputs = inputs_of(base, args, kwargs) if stack is None else seen[-1].inputs if seen else ()
        sizes = sizes_with(stacks, stack, args, kwargs, inputs)
        if sizes:
            known = seen[-1].sizes if stack is not None and seen else {}
            first = next(iter(sizes.values()))
            whole = {name: sizes.get(name, known.get(name, first)) for name in stacks}
            shape = BatchShape(whole, is_padded(kwargs, False), micro_steps(base), autocast_of(base), inputs=inputs)
            seen.append(shape)

    with watched_forwards(model, note):
        yield seen
