"""What becomes of plans in training: one for each batch that needs another, and corrections by measured steps."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from hf_ckpt import compat
from hf_ckpt.attach.attach import paused
from hf_ckpt.attach.record import Installation
from hf_ckpt.planner.budgets import costs_behind, peak_of_least
from hf_ckpt.planner.live import Planned, plan_for, within_or_least
from hf_ckpt.planner.shapes import BatchShape, autocast_of, is_padded, micro_steps, sizes_with
from hf_ckpt.prediction.batches import inputs_of
from hf_ckpt.prediction.optimizers import state_bytes
from hf_ckpt.prediction.timeline import timeline
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import format_bytes

log = logging.getLogger(__name__)

REMEMBERED = 4
"""How many plans for other batch shapes are remembered beside the one in use."""


def plan_batch(
    base: compat.PreTrainedModel,
    record: Installation,
    stack: str | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Planned | None:
    """The plan for a training batch that a forward is given; None where the present plan serves.

    It is an earlier plan where one of those serves, and else is made for the batch.

    Args:
        base: the model; its plan is paused while another is made.
        record: what hf_ckpt keeps on the model.
        stack: the stack whose forward it is; None for that of the whole model.
        args: positional arguments of the forward.
        kwargs: keyword arguments of the forward.

    Raises what `plan_for` raises.
    """
    before: Planned | None = record.planned
    if stack is not None:
        called = compat.call_past_hooks(base)
        if called is not None:
            stack, (args, kwargs) = None, called
        elif before is not None and before.shape.inputs:
            return None  # the forward of the whole model was seen
    seen = _shape_of(base, record, stack, args, kwargs)
    if seen is None:
        return None
    if before is not None:
        known = (before, *before.others)
        serving = [found for found in known if found.serves(seen)]
        if serving:
            best = next((found for found in serving if not found.over), serving[0])
            return None if best is before else _taken_up(best, before)
    call = compat.call_of(base, kwargs if stack is None else None)
    with paused(base):
        if before is None:
            return plan_for(base, record.spec, seen, call=call)
        return _more(base, record, before, seen, call)


def _shape_of(
    base: compat.PreTrainedModel,
    record: Installation,
    stack: str | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> BatchShape | None:
    """The shape of a batch, with the sizes of all stacks for a first plan; None where the arguments do not tell it."""
    stacks = list(dict.fromkeys(block.stack for block, _ in record.plan.actions))
    inputs = inputs_of(base, args, kwargs) if stack is None else ()
    sizes = sizes_with(stacks, stack, args, kwargs, inputs)
    if not sizes:
        return None
    before: Planned | None = record.planned
    if before is None:
        first = next(iter(sizes.values()))
        sizes = {name: sizes.get(name, first) for name in stacks}
    held_back = compat.holds_gradients_back(base)
    padded = is_padded(kwargs, before is not None and before.shape.padded)
    return BatchShape(sizes, padded, 2 if held_back else micro_steps(base), autocast_of(base), held_back, inputs)


def _taken_up(planned: Planned, before: Planned) -> Planned:
    """A plan that was made earlier, in place of `before`, with the bias that is known by now."""
    others = tuple(found for found in (before, *before.others) if found.shape != planned.shape)
    found = dataclasses.replace(planned, others=())
    if before.bias_bytes > planned.bias_bytes:
        found = _made_again(dataclasses.replace(found, bias_bytes=before.bias_bytes))
    return dataclasses.replace(found, others=others)


def _more(
    base: compat.PreTrainedModel, record: Installation, before: Planned, seen: BatchShape, call: compat.Call | None
) -> Planned:
    """A plan for a batch that no plan so far serves: with room for earlier ones, or else for this one by itself.

    Where neither fits it is the one with the lowest peak for this batch, with a warning.
    """
    known = (before, *before.others)
    usual = next((found for found in known if not found.over), before)
    wide = usual.shape.with_room_for(seen)
    made = plan_for(base, record.spec, wide, usual, call)
    alone = dataclasses.replace(wide, sizes={**usual.shape.sizes, **seen.sizes})
    if made.over and alone != wide:
        made = plan_for(base, record.spec, alone, usual, call)
    if made.over and not any(found.over for found in known):
        log.warning(
            "hf_ckpt: no plan fits %s into %s: the lowest peak is %s. Such batches get the plan that needs least; %s",
            made.shape,
            format_bytes(made.limit_bytes),
            format_bytes(_peak(made.plan) + made.bias_bytes),
            _what_would_fit(usual, made),
        )
    others = (found for found in known if found.over or made.over or not made.shape.covers(found.shape))
    return dataclasses.replace(
        made, others=tuple(dataclasses.replace(found, others=()) for found in others)[:REMEMBERED]
    )


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
    """The plan for the same shape with `excess_bytes` less to use.

    Where none fits it is the plan with the lowest peak, with a warning.
    """
    limit = max(1, planned.limit_bytes - excess_bytes)
    return _made_again(dataclasses.replace(planned, limit_bytes=limit, others=()))


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
    device = planned.plan.prediction.device if planned.plan.prediction else ""
    plan, over = within_or_least(planned.costs, planned.limit_bytes, planned.bias_bytes, device)
    if over:
        log.warning(
            "hf_ckpt: no plan for %s is tight enough for %s, so the tightest is taken, which is predicted to need %s.",
            planned.shape,
            format_bytes(planned.limit_bytes),
            format_bytes(_peak(plan) + planned.bias_bytes),
        )
    return dataclasses.replace(planned, plan=plan, over=over)


def after_step(planned: Planned, base: compat.PreTrainedModel, measured_bytes: int, accumulated: bool) -> Planned:
    """What is known after the first step of a plan was measured; see `corrected`.

    Args:
        planned: the plan that ran.
        base: the model.
        measured_bytes: the peak of one micro-step, without the optimizer's step behind it.
        accumulated: whether the micro-step added to gradients of earlier ones.
    """
    costs, choice = costs_behind(planned.costs, planned.plan)
    moments = timeline(costs, choice, accumulated and costs.accumulation > 1).moments
    predicted = max(moment.peak_bytes for moment in moments[:-1])
    there = sum(map(state_bytes, compat.optimizers_of(base)))  # there is none before the first step of an optimizer
    return corrected(planned, measured_bytes, predicted - max(0, costs.static.optimizer - there))


def _peak(plan: Plan) -> int:
    assert plan.prediction is not None
    return plan.prediction.peak_bytes
