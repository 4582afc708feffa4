"""What becomes of plans in training: one for each bucket of batch shapes, and corrections by measured steps."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from hf_ckpt import compat
from hf_ckpt.attach.attach import paused
from hf_ckpt.attach.record import Installation
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.models.families import learned_positions
from hf_ckpt.planner.buckets import DIGITS, Buckets, Node, Planned, Trace
from hf_ckpt.planner.budgets import costs_behind, peak_of_least, plan_within
from hf_ckpt.planner.live import costs_of, plan_for, tell, within_or_least
from hf_ckpt.planner.policies import fit_plan
from hf_ckpt.planner.shapes import BatchShape, autocast_of, is_padded, micro_steps, sizes_with
from hf_ckpt.prediction.batches import inputs_of
from hf_ckpt.prediction.costs import Costs
from hf_ckpt.prediction.optimizers import state_bytes
from hf_ckpt.prediction.timeline import timeline
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import format_bytes

log = logging.getLogger(__name__)


def plan_batch(
    base: compat.PreTrainedModel,
    record: Installation,
    stack: str | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Planned | None:
    """The plan for a training batch that a forward is given; None where the present plan serves.

    It is an earlier plan where one of those serves, and else is made for the bucket of the batch.

    Args:
        base: the model; its plan is paused while costs are traced.
        record: what hf_ckpt keeps on the model.
        stack: the stack whose forward it is; None for that of the whole model.
        args: positional arguments of the forward.
        kwargs: keyword arguments of the forward.

    Raises what `plan_for` raises.
    """
    forward = _Forward(base, record, stack, args, kwargs)
    before: Planned | None = record.planned
    if before is None:
        return _first(forward)
    buckets = before.buckets
    if stack is not None and buckets.told and record.outermost.is_running(base):
        return None
    key = buckets.key(base, stack, args, kwargs)
    found = buckets.seen.get(key)
    if found is None:
        found = _found(forward)
        if found is not None:
            buckets.remember(key, found)
    buckets.told = stack is None and found is not None
    return None if found is before else found


class _Forward(NamedTuple):
    """A forward that is about to run."""

    base: compat.PreTrainedModel
    record: Installation
    stack: str | None
    """The stack whose forward it is; None for that of the whole model."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def whole_call(self) -> tuple[bool, tuple[Any, ...], Mapping[str, Any]]:
        """Whether the arguments of the whole model's forward are known, and the arguments: that forward's, where it was
        called past its hooks and only the forward of a stack is seen."""
        called = None if self.stack is None else compat.call_past_hooks(self.base)
        return (self.stack is None, self.args, self.kwargs) if called is None else (True, *called)

    def trainers_call(self) -> compat.Call | None:
        """The call of the trainer that it is a part of, as far as that can be told."""
        return compat.call_of(self.base, self.kwargs if self.stack is None else None)


def _first(forward: _Forward) -> Planned | None:
    """The first plan of a training; None where the forward does not tell the shape of its batch."""
    base, record, stack = forward[:3]
    whole, args, kwargs = forward.whole_call()
    inputs = inputs_of(base, args, kwargs) if whole else ()
    stacks = _stacks(record)
    sizes = sizes_with(stacks, None if whole else stack, args, kwargs, inputs)
    if not sizes:
        return None
    first = next(iter(sizes.values()))
    sizes = {name: sizes.get(name, first) for name in stacks}
    held_back = compat.holds_gradients_back(base)
    accumulation = 2 if held_back else micro_steps(base)
    seen = BatchShape(sizes, is_padded(kwargs, False), accumulation, autocast_of(base), held_back, inputs)
    call = forward.trainers_call()
    with paused(base):
        made = plan_for(base, record.spec, seen, call)
    buckets = made.buckets
    buckets.nodes.append(Node(made.shape, made.costs))
    buckets.on_lines = record.spec.compile is None
    buckets.most = learned_positions(base.config) or 0
    buckets.expected = 0 if call is None else compat.longest_of(call.trainer)
    buckets.observe(base, made.shape, sharded=not compat.parameters_stay(base))
    buckets.told = stack is None
    return buckets.hold(_fitted(record, made))


def _stacks(record: Installation) -> list[str]:
    return list(dict.fromkeys(block.stack for block, _ in record.plan.actions))


def _found(forward: _Forward) -> Planned | None:
    """The plan for a batch that is like none before; None where the arguments do not tell the shape of the batch."""
    base, record, stack = forward[:3]
    before: Planned = record.planned
    buckets = before.buckets
    whole, args, kwargs = forward.whole_call()
    if not whole and before.shape.inputs:
        return before  # the forward of the whole model was seen
    inputs = inputs_of(base, args, kwargs) if whole else ()
    sizes = sizes_with(_stacks(record), None if whole else stack, args, kwargs, inputs)
    if not sizes:
        return None
    state = buckets.state(base, kwargs)
    seen = BatchShape(sizes={**before.shape.sizes, **sizes}, inputs=inputs, **state)
    buckets.observe(base, seen)
    found = buckets.serving(seen)
    if found is not None:
        return _with_bias(record, found)

    def trace(shape: BatchShape) -> tuple[Costs, ...]:
        with paused(base):
            return costs_of(base, record.spec, shape, forward.trainers_call(), before.costs[0])

    return buckets.hold(_fitted(record, _more(record, before, seen, trace)))


def _fitted(record: Installation, planned: Planned) -> Planned:
    """What was planned, for the blocks as they are."""
    blocks = [block for block, _ in record.plan.actions]
    plan = fit_plan(planned.plan, blocks, record.plan.family, record.plan.model)
    return dataclasses.replace(planned, plan=plan)


def _with_bias(record: Installation, planned: Planned) -> Planned:
    """A plan that was made earlier, with the bias that is known by now: another one where it breaks the limit."""
    bias = planned.buckets.bias_bytes
    if bias <= planned.bias_bytes:
        return planned
    found = dataclasses.replace(planned, bias_bytes=bias)
    if not found.over and _peak(found.plan) + bias > found.limit_bytes:
        found = _fitted(record, _made_again(found))
    return planned.buckets.hold(found, instead=planned)


def _more(record: Installation, before: Planned, seen: BatchShape, trace: Trace) -> Planned:
    """A plan for the bucket of a batch that no plan so far serves, or where none fits that, for a narrower one.

    Where no plan fits the batch by itself, it is the one with the lowest peak for this batch, with a warning.
    """
    buckets = before.buckets
    limit, bias = before.limit_bytes, buckets.bias_bytes
    for wanted in _rooms(buckets, seen):
        try:
            shape, costs = buckets.costs_for(wanted, trace)
            plan = plan_within(costs, limit - bias, _device(before))
        except InfeasibleError:
            continue
        except HfCkptError:  # the model may have no place for so many tokens
            if wanted == seen:
                raise
            continue
        tell(record.spec, shape, plan, limit)
        return dataclasses.replace(before, shape=shape, costs=costs, plan=plan, bias_bytes=bias, over=False)
    return _tightest(record, dataclasses.replace(before, shape=seen, bias_bytes=bias), trace)


def _rooms(buckets: Buckets, seen: BatchShape) -> list[BatchShape]:
    """The shapes that a plan for a batch may be made for: its buckets, the widest first, and the batch by itself."""
    wider = [buckets.bucket_of(seen, digits) for digits in DIGITS]
    usual = buckets.largest()
    if seen.inputs and usual is not None:  # images and the like: one plan for all, as far as it fits
        wider = [usual.shape.with_room_for(seen)]
    rooms = [*wider, seen]
    return [shape for place, shape in enumerate(rooms) if shape not in rooms[:place]]


def _tightest(record: Installation, planned: Planned, trace: Trace) -> Planned:
    """The plan with the lowest peak for a shape, unless one fits after all; with a warning the first time."""
    buckets, seen = planned.buckets, planned.shape
    usual, first = buckets.largest(), not any(found.over for found in buckets.held)
    if first and all(node.shape != seen for node in buckets.nodes):
        buckets.trace(seen, trace)  # the line through other shapes may lie too high
    costs = buckets.costs_for(seen, trace)[1]
    plan, over = within_or_least(costs, planned.limit_bytes, planned.bias_bytes, _device(planned))
    made = dataclasses.replace(planned, costs=costs, plan=plan, over=over)
    tell(record.spec, seen, plan, planned.limit_bytes)
    if over and first:
        log.warning(
            "hf_ckpt: no plan fits %s into %s: the lowest peak is %s. Such batches get the plan that needs least; %s",
            seen,
            format_bytes(made.limit_bytes),
            format_bytes(_peak(plan) + made.bias_bytes),
            _what_would_fit(usual or made, made),
        )
    return made


def _device(planned: Planned) -> str:
    """Name of the row of the device table that a plan was made with."""
    return planned.plan.prediction.device if planned.plan.prediction else ""


def _what_would_fit(usual: Planned, over: Planned) -> str:
    """How long sequences of a batch that is too large may be, by a line through the lowest peaks of two shapes."""
    room = over.limit_bytes - over.bias_bytes
    (few, less), (many, more) = ((found.shape.tokens, peak_of_least(found.costs)) for found in (usual, over))
    if many <= few or more <= less or room < less:
        return "smaller batches or shorter sequences fit."
    share = (few + (many - few) * (room - less) / (more - less)) / many
    sizes = [f"{sequences} x {int(tokens * share)}" for sequences, tokens in over.shape.sizes.values()]
    return f"about {' and '.join(dict.fromkeys(sizes))} tokens would fit."


def tightened(planned: Planned, excess_bytes: int) -> Planned:
    """The plan for the same shape with `excess_bytes` less to use; plans for other shapes are made anew from then on.

    Where none fits it is the plan with the lowest peak, with a warning.
    """
    limit = max(1, planned.limit_bytes - excess_bytes)
    buckets = planned.buckets.without_plans()
    return buckets.hold(_made_again(dataclasses.replace(planned, limit_bytes=limit, buckets=buckets)))


def corrected(planned: Planned, measured_bytes: int, predicted_bytes: int) -> Planned:
    """What is known after a step of a plan was measured: the same plan, unless its peak lies above the limit.

    The difference between what was measured and what was predicted for the same step is remembered as a bias, and later
    plans are made for so much less. The present plan is made again only where it really breaks the limit: a bias alone
    changes nothing, however often it is measured.

    Args:
        planned: the plan that ran.
        measured_bytes: the peak of a micro-step.
        predicted_bytes: what was predicted for that micro-step.
    """
    bias = max(planned.bias_bytes, measured_bytes - predicted_bytes)
    if bias == planned.bias_bytes:
        return planned
    known = dataclasses.replace(planned, bias_bytes=bias)
    prediction = planned.plan.prediction
    if planned.over or prediction is None or prediction.peak_bytes + bias <= planned.limit_bytes:
        return known
    log.warning(
        "hf_ckpt: a step needed %s more than was predicted, which is above the limit of %s; planned again for less.",
        format_bytes(bias),
        format_bytes(planned.limit_bytes),
    )
    return _made_again(known)


def _made_again(planned: Planned) -> Planned:
    """The plan for the same shape by the limit and the bias as they are now; with a warning where none fits."""
    plan, over = within_or_least(planned.costs, planned.limit_bytes, planned.bias_bytes, _device(planned))
    if over:
        log.warning(
            "hf_ckpt: no plan for %s is tight enough for %s, so the tightest is taken, which is predicted to need %s.",
            planned.shape,
            format_bytes(planned.limit_bytes),
            format_bytes(_peak(plan) + planned.bias_bytes),
        )
    return dataclasses.replace(planned, plan=plan, over=over)


def after_step(base: compat.PreTrainedModel, record: Installation, measured_bytes: int, accumulated: bool) -> Planned:
    """What is known after a step of the plan that is on was measured; see `corrected`.

    Args:
        base: the model.
        record: what hf_ckpt keeps on it.
        measured_bytes: the peak of one micro-step, without the optimizer's step behind it.
        accumulated: whether the micro-step added to gradients of earlier ones.
    """
    planned: Planned = record.planned
    costs, choice = costs_behind(planned.costs, planned.plan)
    moments = timeline(costs, choice, accumulated and costs.accumulation > 1).moments
    predicted = max(moment.peak_bytes for moment in moments[:-1])
    there = sum(map(state_bytes, compat.optimizers_of(base)))  # there is none before the first step of an optimizer
    planned.buckets.measured.add(id(planned))
    found = corrected(planned, measured_bytes, predicted - max(0, costs.static.optimizer - there))
    if found is planned:
        return planned
    return planned.buckets.hold(found if found.plan is planned.plan else _fitted(record, found), instead=planned)


def _peak(plan: Plan) -> int:
    assert plan.prediction is not None
    return plan.prediction.peak_bytes
