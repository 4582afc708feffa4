"""Runs the measuring steps of a training on fake tensors, and turns them into costs.

This is what `training/session.py` does with the first steps of a run: a step under `full`, and what trials of the other
actions change in it. Here the model is shallow, the tensors are fake, and the meter counts their bytes and adds up the
time of a device. The calls of the shallow model are then repeated up to the depth of the real one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from hf_ckpt import compat
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.attach.enable import put_on
from hf_ckpt.attach.for_a_while import temporarily
from hf_ckpt.attach.record import Installation
from hf_ckpt.costs.costs import CallCosts, Costs, Static, costs_of_step
from hf_ckpt.costs.steps import Call, Needs, Step
from hf_ckpt.engines.trials import Attempts
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.batches import DTYPES, NO_PLAN, MicroStep, has_targets, micro_step
from hf_ckpt.forecast.devices import Device
from hf_ckpt.forecast.model import ShallowModel, kinds_of, nbytes, only, refuse_other_config
from hf_ckpt.forecast.optimizers import optimizer_bytes
from hf_ckpt.forecast.quantised import EightBitLinear
from hf_ckpt.forecast.question import COSTS, MODEL, STEP, Question
from hf_ckpt.forecast.ranks import gathered_linear, on_a_rank
from hf_ckpt.measure.fakes import FakeMeter
from hf_ckpt.measure.levels import Boundary, Levels, step_of
from hf_ckpt.models.blocks import find_blocks, vocabulary_head
from hf_ckpt.models.families import refuse_long
from hf_ckpt.spec.actions import FULL, FULL_SELECTIVE, KEEP, SELECTIVE, Action, planned_actions
from hf_ckpt.spec.plan import Block, Plan


@dataclasses.dataclass(frozen=True)
class _Measured:
    """One measured step of the shallow model. Blocks go by their names in it."""

    step: Step
    chunks_help: bool
    """See `Boundaries.chunks_help`."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """All that a function which measures is given beside the model. It can read nothing else, so what it returns is
    stored by this."""

    training: Question
    """The fields of a question that it may read; others have their defaults."""
    device: Device
    """Its row gives the time of operations."""
    actions: tuple[Action, ...]
    """The actions to measure."""

    def step(self, action: Action, head: int | str | None = None) -> Inputs:
        """The inputs of one micro-step with an action; with another head, if `head` is not None."""
        training = self.training if head is None else dataclasses.replace(self.training, head=head)
        return Inputs(training.only(MODEL, STEP), self.device, (action,))


def inputs_of(training: Question, device: Device, further: Iterable[Action] = ()) -> Inputs:
    """All that the costs of a training depend on.

    Args:
        training: what is trained, and how.
        device: where.
        further: actions beside those that a plan for a budget chooses from.

    Raises `HfCkptError` for actions that ranks cannot be planned with.
    """
    actions = tuple(dict.fromkeys([*planned_actions(tile=_tile_of(training)), *further]))
    if not training.way.rebuilds:
        actions = tuple(action for action in actions if action in (KEEP, FULL))
        if set(further) - set(actions):
            raise HfCkptError(f"{training.parallel} is planned for with `keep` and `full` only: use another spec.")
    return Inputs(training.only(MODEL, STEP, COSTS), device, actions)


def _tile_of(training: Question) -> int | str | None:
    """Tokens of a tile, or `auto`; None if feed-forwards run as a whole."""
    return None if training.mlp == "whole" else training.mlp


def costs_of_model(model: ShallowModel, inputs: Inputs) -> Costs:
    """What a shallow model costs under every action, for one batch shape.

    Raises `HfCkptError` for too long sequences, if the model does not run on fake tensors, or if a step calls a block
    twice.
    """
    training = inputs.training
    device = inputs.device
    refuse_long(model.base.config, training.tokens, training.model)
    with model.fake:
        batch = micro_step(training, model.base).batch
    whole = _measure(model, inputs.step(FULL))
    all_blocks = find_blocks(model.base)
    shallow = _shallow_costs(model, inputs, whole.step, all_blocks.blocks)
    calls = _at_real_depth(model, shallow.calls)
    forward, backward = shallow.head
    spent = forward.nanoseconds
    if training.trainer == "dpo":  # the pass of the reference is part of the head's, and goes through all blocks
        spent += _forward_nanoseconds(calls) - _forward_nanoseconds(shallow.calls)
    static = _static(model, training, batch)
    costs = dataclasses.replace(
        shallow,
        calls=calls,
        head=(dataclasses.replace(forward, nanoseconds=spent), backward),
        static=static,
        family=all_blocks.family,
        model=all_blocks.class_name,
        tokens=training.rows * _tokens_of(training, model.base, batch),
        sequences=training.batch,
        has_host=device.host_bandwidth > 0,
        blocks=tuple(model.likes),
        accumulation=training.accumulation,
        divides=not training.sharded,
        least=FULL if _tile_of(training) is None else Action("full+tiles", tile=_tile_of(training)),
        # A fused step reads and writes the state, and reads gradients and weights and writes these.
        optimizer_nanoseconds=device.nanoseconds(0, 2 * static.optimizer + 3 * static.gradients, 4),
        head_tokens=training.head,
        # FSDP frees the head's weight after its forward. Chunks are computed later, when the loss is called.
        chunks_help=whole.chunks_help and training.head == "whole" and not training.sharded,
    )
    return on_a_rank(costs, model, training)


def least_bytes(model: ShallowModel, inputs: Inputs) -> int:
    """Bytes that every plan needs, whatever blocks keep: before them, or in the head. It measures one step only."""
    costs = costs_of_model(model, dataclasses.replace(inputs, actions=(FULL,)))
    forward, backward = costs.head
    return costs.resident_bytes + max(costs.before.peak, forward.peak, forward.net + backward.peak)


def _shallow_costs(model: ShallowModel, inputs: Inputs, full: Step, blocks: Iterable[Block]) -> Costs:
    """What the step of a shallow model costs, from that under `full`."""
    step = _with_needs_of(inputs, full, model)
    needs = {call.name: _needs_of(call, inputs.actions) for call in step.calls}
    by_name = {block.name: block for block in blocks}
    return costs_of_step(step, [by_name[name] for name, _ in step.names], needs, inputs.actions)


def _with_needs_of(inputs: Inputs, step: Step, model: ShallowModel) -> Step:
    """A step under `full`, with what other steps show of further actions.

    In these, only one block of each kind runs, and the first of each stack.
    """
    shown_by = _shown_by(model, step)
    with only(model, set(shown_by.values())) as meanwhile:
        for action in inputs.actions:
            if action == FULL:
                continue
            if action.kind == FULL_SELECTIVE.kind:  # what it costs follows from this one
                action = Action(SELECTIVE.kind, action.save)
            other = _measure(model, inputs.step(action, head="whole")).step  # which the head does not change
            calls = (dataclasses.replace(call, name=(meanwhile[call.name[0]], call.name[1])) for call in other.calls)
            other = dataclasses.replace(other, calls=tuple(calls))
            if action.tile is None:
                step = step.with_needs(other)
            else:  # tiles change the forward, too, so all blocks ran in that step as they run under a plan
                step = step.with_actions(other, {name: action for name, _ in other.names})
    needs = {name: call.needs for (name, _), call in zip(step.names, step.calls, strict=True)}
    shared = (dataclasses.replace(call, needs=needs[shown_by[call.name[0]]]) for call in step.calls)
    return dataclasses.replace(step, calls=tuple(shared))


def _shown_by(model: ShallowModel, step: Step) -> dict[str, str]:
    """For each block that a step calls, the block whose trials show what it costs under further actions."""
    kinds = kinds_of(model)
    alike: dict[Any, list[str]] = {}
    shown_by: dict[str, list[str]] = {}
    for place, call in enumerate(step.calls):
        block = call.name[0]
        is_first = place == 0 or kinds[step.calls[place - 1].name[0]][0] != kinds[block][0]
        backward_nanoseconds = call.backward and call.backward.nanoseconds
        # Times are sums over operations. The last block of T5, for example, has one less: it adds no gradient to that
        # of the position bias.
        ran = call.has_input_graph, call.records_graph, call.forward.nanoseconds, backward_nanoseconds
        blocks = alike.setdefault((kinds[block], is_first, ran), [])
        blocks.append(block)
        shown_by[block] = blocks
    # The second of several, whose neighbours are blocks of its kind, stands for them.
    return {block: blocks[min(1, len(blocks) - 1)] for block, blocks in shown_by.items()}


def _needs_of(call: Call, actions: Iterable[Action]) -> dict[Action, Needs]:
    """What a call needs under every action that it may have; those that keep most come first."""
    if call.backward is None:  # nothing to recompute
        return {KEEP: call.as_it_ran()}
    needs = {**call.needs, FULL: call.as_it_ran()}
    for action in actions:
        if action.kind == FULL_SELECTIVE.kind:
            needs[action] = call.recomputed(needs[Action(SELECTIVE.kind, action.save)])
    return {action: needs[action] for action in actions}


def _at_real_depth(model: ShallowModel, calls: Iterable[CallCosts]) -> tuple[CallCosts, ...]:
    """The calls of the real model's blocks, in the order of the stacks' first calls.

    Each costs what the call of the block does that stands for it in the shallow model.
    """
    by_name = {call.block.name: call for call in calls}
    # The step's order: a vision tower may stand after the text model in the list of modules, but runs before it.
    order = [by_name[name].block.stack for name in by_name]
    likes = [(block, by_name[name]) for block, name in model.likes.items() if name in by_name]
    likes.sort(key=lambda pair: order.index(pair[0].stack))
    return tuple(dataclasses.replace(call, block=block) for block, call in likes)


def _tokens_of(training: Question, base: Any, batch: Mapping[str, Any]) -> int:
    """Tokens of one row of a batch; 0 without text. A source and its target count once."""
    if "input_ids" not in batch:
        return 0
    targets = training.target_tokens if has_targets(base) else None
    tokens = max(training.tokens, targets or 0)
    return tokens * training.choices if batch["input_ids"].dim() == 3 else tokens


def _forward_nanoseconds(calls: Iterable[CallCosts]) -> int:
    return sum(next(iter(call.costs.values())).forward.nanoseconds for call in calls)


def _static(model: ShallowModel, training: Question, batch: Mapping[str, Any]) -> Static:
    """What is alive at every moment, before weights are split over ranks."""
    tensors = model.tensors
    if training.way.states:  # shards have the type of the weights; DeepSpeed's optimizer updates float32 copies
        element_bytes = 4 if training.way.deepspeed else DTYPES[training.dtype].itemsize
        tensors = tuple(tensor._replace(element_bytes=element_bytes) for tensor in tensors)
    if training.way.flat:
        tensors = tuple(tensor._replace(shape=(math.prod(tensor.shape),)) for tensor in tensors)
    state, temporary = optimizer_bytes(tensors, training.optimizer)
    # A second model as large as the first, with a copy in autocast's type that is alive during the forward.
    reference = nbytes(model.tensors) if training.trainer == "dpo" and training.lora is None else 0
    if reference and training.autocast_name:
        reference += nbytes(tensor._replace(element_bytes=2) for tensor in model.tensors if tensor.element_bytes > 2)
    gradients = nbytes(tensor for tensor in model.tensors if tensor.trainable)
    copies = gradients if training.ranks > 1 and not training.way.states else 0  # in buckets of DDP
    batch_bytes = sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
    return Static(
        parameters=nbytes(model.tensors) + reference,
        optimizer=state,
        gradients=gradients,
        buffers=sum(buffer.nbytes for buffer in model.base.buffers()) + batch_bytes,
        buckets=copies,
        step_bytes=temporary,
    )


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(model: ShallowModel, inputs: Inputs) -> _Measured:
    """Measure one micro-step of the shallow model under `full`, with trials of an action; once for each.

    Feed-forwards in tiles run so in the forward, too. So all blocks have such an action themselves.
    """
    if inputs in model.measured:
        measured: _Measured = model.measured[inputs]
        return measured
    training = inputs.training
    (action,) = inputs.actions
    base = model.base.train()
    blocks = find_blocks(base)
    uniform = FULL if action.tile is None else action
    actions = tuple((block, uniform) for block in blocks.blocks)
    plan = Plan(blocks.family, blocks.class_name, actions, head=training.head)
    try:
        # Blocks run as under FSDP: none may rebuild its input from parameters of another one.
        stay = mock.patch.object(compat.distributed, "parameters_stay", return_value=not training.sharded)
        fakes = compat.fakes.as_on_real_devices(on_accelerator=inputs.device.name != "cpu")
        eight = mock.patch.object(EightBitLinear, "on_accelerator", inputs.device.name != "cpu")
        way = training.way
        product = gathered_linear if way.deepspeed and way.weights else functional.linear
        linear = mock.patch.object(functional, "linear", product)
        with stay, eight, linear, temporarily(base, plan) as record, model.fake, fakes:
            last = None if action == uniform else action
            attempts = dict.fromkeys(blocks.modules, Attempts(last=last))
            for name in attempts:
                record.functions.make_for_trials(name, attempts[name])
            put_on(blocks, record)
            model.measured[inputs] = measured = _run(base, record, attempts, inputs)
            return measured
    except HfCkptError:
        raise
    except Exception as error:  # of all kinds: this runs code of the model, which may read values that are not there
        refuse_other_config(type(base), base.config, training)
        reason = f"it does not run without its weights: {type(error).__name__}: {error}"
        if compat.fakes.depends_on_values(error):
            advice = 'Experts that are called one by one need experts_implementation="grouped_mm" or "batched_mm"'
            reason = f"how large its tensors are depends on their values ({error}). {advice}"
        name = blocks.class_name
        raise HfCkptError(f"{name} cannot be planned for, because {reason}. Other policies work.") from error
    finally:  # the next measuring step begins without gradients, as this one did
        base.zero_grad()


def _run(model: nn.Module, record: Installation, attempts: Mapping[str, Attempts], inputs: Inputs) -> _Measured:
    training = inputs.training
    step = micro_step(training, model)
    if training.accumulation > 1:  # the largest micro-step adds to the gradients of earlier ones
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    # FlashAttention gets the lengths of packed sequences; others get a mask of [tokens, tokens].
    padded = training.padded or (training.packing and not training.attention.startswith("flash_attention"))
    meter = FakeMeter(inputs.device.nanoseconds, model, step.batch, padded=padded)
    marks = Levels(meter.memory, meter)
    autocast = DTYPES[training.autocast_name] if training.autocast_name else None
    with contextlib.ExitStack() as cleanup:
        boundaries = Boundaries(record.blocks, marks.mark, head=vocabulary_head(model))
        cleanup.callback(boundaries.remove)
        record.set_trials(attempts, marks.mark)  # the recomputations of this step run under the action
        if step.forward is not None:
            cleanup.enter_context(mock.patch.object(model, "forward", step.forward))
        with meter:
            marks.mark(Boundary.BEGIN)
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss = _loss_of(model, training, step)
            marks.mark(Boundary.RETURNED)
            loss.backward()  # type: ignore[no-untyped-call]
    levels = marks.levels()
    measured = step_of(levels)
    if measured is None:
        raise HfCkptError(f"no block of {type(model).__name__} has a backward of its own: {NO_PLAN}")
    if any(call for _, call in measured.names):
        raise HfCkptError(f"a step of {type(model).__name__} calls its blocks several times: {NO_PLAN}")
    return _Measured(measured, boundaries.chunks_help)


def _loss_of(model: nn.Module, training: Question, step: MicroStep) -> torch.Tensor:
    """The loss. As in a Trainer, the outputs are freed before the backward."""
    outputs = model(**step.batch)
    if training.trainer == "dpo":  # the reference is the model without adapters, or as large as the model
        with torch.no_grad(), compat.peft.adapters_off(model):
            reference = model(**step.batch)  # noqa: F841  # alive while the loss is computed
    return step.loss(outputs)
