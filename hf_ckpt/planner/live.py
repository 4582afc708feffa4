"""Plans for `budget` and `auto` in training: when a forward is given the first batch, and again for larger ones."""

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
from hf_ckpt.attach.attach import paused, watched_forwards
from hf_ckpt.attach.record import Installation
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.measure.machine import DeviceMemory, device_memory
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.planner.budgets import costs_behind, plan_of, plan_of_least, plan_within
from hf_ckpt.planner.options import cost_options
from hf_ckpt.prediction.batches import Inputs, batch_for, batch_of, has_room_for, inputs_of, loss_for, with_room_for
from hf_ckpt.prediction.costs import Costs
from hf_ckpt.prediction.devices import Device
from hf_ckpt.prediction.fsdp2 import Layout, with_shards
from hf_ckpt.prediction.layout import held_bytes, layout_of
from hf_ckpt.prediction.machine import this_device
from hf_ckpt.prediction.optimizers import optimizer_name, state_bytes
from hf_ckpt.prediction.skeleton import skeleton_of
from hf_ckpt.prediction.trace import Step, trace_costs
from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Plan, Prediction
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import budget_bytes, format_bytes, format_seconds, parse_bytes

log = logging.getLogger(__name__)

Sizes = dict[str, tuple[int, int]]
"""Stack -> (sequences, tokens) that go into the stack."""
MARGIN = 0.05
"""Share of the device's memory that `auto` leaves free; and share of its prediction by which a measured peak may exceed
it before the plan is tightened."""


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """What a batch looks like, and the state that training is in, as far as a plan depends on them."""

    sizes: Sizes
    padded: bool = False
    """Whether attention gets a mask that masks anything."""
    accumulation: int = 1
    """Micro-steps of one optimizer step; 2 stands for any number above 1."""
    autocast: torch.dtype | None = None
    """The type that autocast computes in; None without autocast."""
    held_back: bool = False
    """Whether FSDP2 keeps whole gradients from one micro-step to the next, instead of this rank's part of them."""
    inputs: Inputs = ()
    """All that goes into the model, where that is more than text of these sizes."""

    def covers(self, other: BatchShape) -> bool:
        """Whether a plan for this shape fits the other shape, too."""
        return (
            all(
                stack in self.sizes and size[0] <= self.sizes[stack][0] and size[1] <= self.sizes[stack][1]
                for stack, size in other.sizes.items()
            )
            and self.padded >= other.padded
            and (self.accumulation > 1) >= (other.accumulation > 1)
            and self.held_back >= other.held_back
            and has_room_for(self.inputs, other.inputs)
        )

    def with_room_for(self, other: BatchShape) -> BatchShape:
        """The smallest shape that covers both."""
        sizes = {
            stack: (max(mine[0], yours[0]), max(mine[1], yours[1]))
            for stack in self.sizes | other.sizes
            for mine, yours in [(self.sizes.get(stack, (0, 0)), other.sizes.get(stack, (0, 0)))]
        }
        accumulation = max(self.accumulation, other.accumulation)
        padded, held_back = self.padded or other.padded, self.held_back or other.held_back
        inputs = with_room_for(self.inputs, other.inputs)
        return BatchShape(sizes, padded, accumulation, self.autocast, held_back, inputs)

    def __str__(self) -> str:
        shapes = {f"{name} of {' x '.join(map(str, shape))}" for name, shape, _ in self.inputs} or {
            f"{batch} x {tokens} tokens" for batch, tokens in self.sizes.values()
        }
        padded = ", padded" if self.padded else ""
        return " and ".join(sorted(shapes)) + padded + (", accumulated" if self.accumulation > 1 else "")


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan that was made for a batch shape, and what it was made from."""

    shape: BatchShape
    limit_bytes: int
    """The peak that was allowed."""
    costs: tuple[Costs, ...]
    """The candidates that the plan was chosen from."""
    plan: Plan
    memory: DeviceMemory
    """The device's memory as it was when the plan was made."""


def plan_for(model: nn.Module, spec: Spec, shape: BatchShape, before: Planned | None = None) -> Planned:
    """The fastest plan for a batch shape and a model in its present state.

    All ranks agree on the first plan, so that all of them must call this for it: it is made for the largest sizes and
    parts and the smallest limit of any rank, and is that of rank 0. Where one of them cannot plan, all raise. Later
    plans are each rank's own: under DDP and FSDP2 ranks may recompute differently, because their collective operations
    are the same whatever the actions.

    Args:
        model: plain or wrapped; no plan is enabled on it.
        spec: with the policy `budget` or `auto`.
        shape: of the batch, with room for earlier ones.
        before: what was planned before; None for the first plan.

    Raises `InfeasibleError` where no plan fits, and `HfCkptError` where parameters are split over ranks by other means
    than FSDP2, another rank cannot plan, or the model cannot be traced.
    """
    layout = layout_of(model, shape.held_back)
    if layout is None and compat.is_sharded(model):
        raise HfCkptError(
            f"`policy: {spec.policy}` cannot plan for parameters that are split over ranks by FSDP1 or ZeRO-3. Use "
            "`selective` or `full`, a plan of `hf-ckpt plan`, or FSDP2 (`fsdp_version: 2`)."
        )
    held = held_bytes(model)
    memory = device_memory(held)
    first = before is None
    limit = before.limit_bytes if before is not None else limit_bytes(spec, memory)
    if first:
        shape, limit, layout = _with_room_for_all_ranks(shape, limit, layout)
    device = this_device()
    wanted, parts = shape, layout
    host_limit = None if spec.host_budget is None else parse_bytes(spec.host_budget)
    costs: tuple[Costs, ...] = ()
    plan: Plan | None = None
    failure: Exception | None = None
    try:
        costs = _in_clean_thread(lambda: _trace(model, spec.head, host_limit, wanted, device, parts))
        plan = plan_within(costs, limit, device.name)
    except Exception as error:  # whatever it is, the other ranks wait for this one to tell
        failure = error
    if first:
        plan = _agreed(plan, failure)
    if failure is not None:
        raise failure
    assert plan is not None
    _tell(spec, shape, plan, limit)
    return Planned(shape, limit, costs, plan, memory)


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


def tightened(planned: Planned, excess_bytes: int) -> Planned:
    """The plan for the same shape with `excess_bytes` less to use.

    Where none fits it is the plan with the lowest peak, with a warning.
    """
    limit = max(1, planned.limit_bytes - excess_bytes)
    device = planned.plan.prediction.device if planned.plan.prediction else ""
    try:
        plan = plan_within(planned.costs, limit, device)
    except InfeasibleError as error:
        plan = plan_of_least(planned.costs, limit, device)
        log.warning("hf_ckpt: no plan is tight enough, so the tightest is taken. %s", error)
    return dataclasses.replace(planned, limit_bytes=limit, plan=plan)


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
    candidates = _in_clean_thread(lambda: _trace(model, plan.head, host_limit, shape, device))
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
    head: int | str,
    host_limit: int | None,
    shape: BatchShape,
    device: Device,
    layout: Layout | None = None,
) -> tuple[Costs, ...]:
    """The candidates for a plan of a live model; see `cost_options` for `head` and `host_limit`."""
    skeleton = skeleton_of(model)
    name, known = "adamw", None
    optimizers = compat.optimizers_of(model)
    if optimizers:
        name = optimizer_name(optimizers[0])
        known = sum(map(state_bytes, optimizers)) or None
    step = Step(
        batch=batch_of(shape.inputs) if shape.inputs else batch_for(skeleton.base, shape.sizes),
        padded=shape.padded,
        autocast=shape.autocast,
        accumulation=shape.accumulation,
        optimizer=name,
        optimizer_bytes=known,
        loss=loss_for(skeleton.base, shape.inputs),
    )
    costs = trace_costs(skeleton, step, device)
    options = functools.partial(cost_options, skeleton=skeleton, step=step, device=device)
    if layout is not None:  # a sharded head cannot run in chunks
        found = options(costs, head="full", host_limit=host_limit)
        return tuple(with_shards(each, dataclasses.replace(layout, held_back=shape.held_back)) for each in found)
    if compat.is_distributed():
        # DistributedDataParallel keeps a second copy of all gradients, in its buckets.
        static = dataclasses.replace(costs.static, buffers=costs.static.buffers + costs.static.gradients)
        costs = dataclasses.replace(costs, static=static)
    return options(costs, head=head, host_limit=host_limit)


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


def _tell(spec: Spec, shape: BatchShape, plan: Plan, limit: int) -> None:
    """Log a plan."""
    prediction = plan.prediction
    assert prediction is not None
    log.info(
        "hf_ckpt: planned for %s within %s (`%s`): peak %s, step %s predicted.\n%s",
        shape,
        format_bytes(limit),
        spec.policy,
        format_bytes(prediction.peak_bytes),
        format_seconds(prediction.step_seconds),
        plan,
    )


@contextlib.contextmanager
def watching(model: nn.Module) -> Iterator[list[BatchShape]]:
    """As a context: the shapes of the batches that training forwards of a model are given, in a list that grows."""
    stacks = list(dict.fromkeys(block.stack for block in find_blocks(model).blocks))
    seen: list[BatchShape] = []

    def note(base: nn.Module, stack: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        inputs = inputs_of(base, args, kwargs) if stack is None else seen[-1].inputs if seen else ()
        sizes = _sizes_of_batch(stacks, stack, args, kwargs, inputs)
        if sizes:
            known = seen[-1].sizes if stack is not None and seen else {}
            first = next(iter(sizes.values()))
            whole = {name: sizes.get(name, known.get(name, first)) for name in stacks}
            shape = BatchShape(whole, _is_padded(kwargs, None), _micro_steps(base), _autocast(base), inputs=inputs)
            seen.append(shape)

    with watched_forwards(model, note):
        yield seen


def plan_batch(
    base: compat.PreTrainedModel,
    record: Installation,
    stack: str | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Planned | None:
    """Plan for a training batch that a forward is given; None where the present plan has room for it.

    Args:
        base: the model; its plan is paused while another is made.
        record: what hf_ckpt keeps on the model.
        stack: the stack whose forward it is; None for that of the whole model.
        args: positional arguments of the forward.
        kwargs: keyword arguments of the forward.

    Raises what `plan_for` raises.
    """
    before: Planned | None = record.planned
    stacks = list(dict.fromkeys(block.stack for block, _ in record.plan.actions))
    if stack is not None:
        called = compat.call_past_hooks(base)
        if called is not None:
            stack, (args, kwargs) = None, called
        elif before is not None and before.shape.inputs:
            return None  # the forward of the whole model was seen
    inputs = inputs_of(base, args, kwargs) if stack is None else ()
    sizes = _sizes_of_batch(stacks, stack, args, kwargs, inputs)
    if not sizes:
        return None
    held_back = compat.holds_gradients_back(base)
    micro_steps = 2 if held_back else _micro_steps(base)
    seen = BatchShape(sizes, _is_padded(kwargs, before), micro_steps, _autocast(base), held_back, inputs)
    if before is not None:
        if before.shape.covers(seen):
            return None
        seen = before.shape.with_room_for(seen)
    else:
        first = next(iter(sizes.values()))
        seen = dataclasses.replace(seen, sizes={name: sizes.get(name, first) for name in stacks})
    with paused(base):
        return plan_for(base, record.spec, seen, before)


def _sizes_of_batch(
    stacks: Sequence[str], stack: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: Inputs
) -> Sizes:
    """`sizes_of` a batch; of one without text, how many samples it has, as sequences of one token."""
    found = sizes_of(stacks, stack, args, kwargs)
    if found or not inputs:
        return found
    return {stacks[0]: (next((shape[0] for _, shape, _ in inputs if shape), 1), 1)}


def sizes_of(stacks: Sequence[str], stack: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sizes:
    """The sequences and tokens that go into each stack, as far as the arguments of a forward tell.

    Args:
        stacks: names of the model's stacks, in the order in which they run.
        stack: the stack whose forward it is; None for that of the whole model.
        args: positional arguments of the forward.
        kwargs: keyword arguments of the forward: tensors of [sequences, tokens, ...].
    """
    found: Sizes = {}

    def take(name: str, *values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.dim() >= 2:
                found[name] = value.shape[0], value.shape[1]
                return

    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
    take(stack or stacks[0], *given, kwargs.get("hidden_states"))
    if stack is None and len(stacks) > 1:
        names = ("labels", "decoder_input_ids", "decoder_inputs_embeds")
        take(stacks[-1], *(kwargs.get(name) for name in names))
    return found


def _is_padded(kwargs: Mapping[str, Any], planned: Planned | None) -> bool:
    """Whether the attention mask masks anything.

    Once a plan has room for masks, any mask counts: to ask for its values makes the host wait for the device.
    """
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor):
        return False
    if planned is not None and planned.shape.padded:
        return True
    return mask.dim() > 2 or not bool((mask != 0).all())


def _micro_steps(base: nn.Module) -> int:
    """1, or 2 for any number above: what matters is whether gradients of earlier micro-steps are there."""
    there = any(parameter.grad is not None for parameter in base.parameters() if parameter.requires_grad)
    return 2 if there or compat.accumulated_steps() > 1 else 1


def _autocast(base: nn.Module) -> torch.dtype | None:
    """The type that autocast computes in on the model's device; None while it is off."""
    parameter = next(base.parameters())
    return compat.autocast_dtype(parameter.device.type)
