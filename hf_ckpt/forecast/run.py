"""Runs the measuring steps of a training on fake tensors, and turns them into costs.

This is what `training/session.py` does with the first steps of a run: a step under `full`, and what every other action
changes in it, measured at the boundaries of blocks. Here the model is shallow, the tensors are fake, and the meter
counts their bytes and adds up the time of a device. The calls of the shallow model are then repeated up to the depth of
the real one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import trial
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.costs.costs import CallCosts, Cost, Costs, StackEnd, Static
from hf_ckpt.costs.steps import Part, Step
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.batches import DTYPES, NO_PLAN, MicroStep, micro_step
from hf_ckpt.forecast.devices import Device
from hf_ckpt.forecast.model import ShallowModel, nbytes
from hf_ckpt.forecast.optimizers import optimizer_bytes
from hf_ckpt.forecast.question import OF_THE_PLAN, Question
from hf_ckpt.forecast.ranks import Sharding
from hf_ckpt.measure.fakes import FakeMeter
from hf_ckpt.measure.levels import Level, Levels, part_of, step_of
from hf_ckpt.models.blocks import find_blocks, vocabulary_head
from hf_ckpt.spec.actions import FULL, KEEP, Action, candidates
from hf_ckpt.spec.plan import Block, Plan


@dataclasses.dataclass(frozen=True)
class _Measured:
    """One measured step of the shallow model. Blocks go by their names in it."""

    step: Step
    """What runs between two blocks counts with the first of them, and so does the input of the last call, if it is
    freed when that returns. What `ends` says is left out."""
    lent: Mapping[str, int]
    """Block -> bytes that its call allocated and that are freed after the last call, before the backward: autocast's
    copies of weights."""
    ends: Mapping[str, tuple[int, int]]
    """Last block of a stack -> (bytes of the stack's input, bytes of what its calls share) that are freed then."""
    head: tuple[Part, Part]
    """What runs after the last block: the forward without freeing what `lent` and `ends` say, and the backward."""
    reference: float
    """Time of the pass without gradients, which is part of the head's, as a multiple of that of the model's forward."""
    chunks_help: bool
    """See `Boundaries.chunks_help`."""


def costs_of_model(model: ShallowModel, training: Question, device: Device) -> Costs:
    """What a model costs under every action, for one batch shape.

    Args:
        model: a shallow model.
        training: what is trained, and how.
        device: its row gives the time of operations.

    Raises `HfCkptError` if the model does not run on fake tensors, or if a step calls a block twice.
    """
    with model.fake:
        batch = micro_step(training, model.base).batch
    whole = _measure(model, training, device, FULL, training.head)
    # The head does not change what blocks cost.
    measured = {action: _measure(model, training, device, action, "full") for action in candidates() if action != FULL}
    measured[FULL] = whole
    places = _places(model, whole.step)
    steps = {action: _at_real_depth(each.step, places) for action, each in measured.items()}
    static = _static(model, training, batch, device)
    forward, backward = whole.head
    deeper = _forward_nanoseconds(steps[FULL]) - _forward_nanoseconds(whole.step)
    spent = forward.nanoseconds + round(whole.reference * deeper)
    forward = dataclasses.replace(forward, nanoseconds=spent)
    if training.sharded:
        sharding = Sharding(model, training)
        steps = {action: sharding.step(step) for action, step in steps.items()}
        static = sharding.static(static)
        backward = sharding.head(backward)
    ends = {action: each.ends for action, each in measured.items()}
    kept_bytes = sum(call.forward.net - whole.lent[call.name[0]] for call in whole.step.calls)
    freed_bytes = sum(map(sum, whole.ends.values()))
    found = find_blocks(model.base)
    return Costs(
        actions=tuple(measured),
        calls=tuple(_costs_of_calls(places, steps, measured)),
        before=steps[FULL].before,
        at_backward_bytes=whole.step.at_backward_bytes - whole.step.before.net - kept_bytes + freed_bytes,
        head=(forward, backward),
        input_bytes=max(0, round(statistics.median(call.forward.net for call in steps[FULL].calls))),
        static=static,
        ends=tuple(_stack_ends(places.values(), ends)),
        family=found.family,
        model=found.model,
        tokens=training.rows * max(training.tokens, training.target_tokens or 0) if "input_ids" in batch else 0,
        sequences=training.batch,
        has_host=device.host_bandwidth > 0,
        blocks=tuple(block for stack in model.stacks for block in stack.blocks),
        accumulation=training.accumulation,
        optimizer_nanoseconds=device.nanoseconds(0, 2 * static.optimizer + 3 * static.gradients, 4),
        head_tokens=training.head,
        chunks_help=whole.chunks_help and training.head == "full" and not training.sharded,
    )


def _costs_of_calls(
    places: Mapping[Block, str], steps: Mapping[Action, Step], measured: Mapping[Action, _Measured]
) -> Iterator[CallCosts]:
    """What each call of the real model costs under every action, from the steps at their real depth."""
    for number, (block, name) in enumerate(places.items()):
        calls = {action: step.calls[number] for action, step in steps.items()}
        lent = {action: each.lent[name] for action, each in measured.items()}
        full, left = calls[FULL], 0
        if full.backward is None:  # nothing to recompute
            costs = {KEEP: Cost(full.forward, Part(), lent[FULL])}
        else:
            costs = {
                action: Cost(call.forward, call.backward, lent[action])
                for action, call in calls.items()
                if call.backward is not None
            }
            left = full.backward.net + full.forward.net - lent[FULL] - sum(measured[FULL].ends.get(name, ()))
        yield CallCosts((block,), left, costs)


def _static(model: ShallowModel, training: Question, batch: Mapping[str, Any], device: Device) -> Static:
    """What is alive at every moment, before weights are split over ranks."""
    size = DTYPES[training.dtype].itemsize  # of shards, which have the type of the weights
    tensors = [(shape, size if training.sharded else own, trained) for shape, own, trained in model.tensors]
    state, temporary = optimizer_bytes(tensors, training.optimizer, on_cpu=device.name == "cpu")
    # A second model as large as the first, with a copy in autocast's type that is alive during the forward.
    reference = nbytes(model.tensors) if training.reference == "model" else 0
    if reference and training.autocast_name:
        copied = DTYPES[training.autocast_name].itemsize
        reference += sum(math.prod(shape) * copied for shape, own, _ in model.tensors if own > 2)
    batch_bytes = sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
    return Static(
        parameters=nbytes(model.tensors) + reference,
        optimizer=state,
        gradients=nbytes(tensor for tensor in model.tensors if tensor[2]),
        buffers=model.buffer_bytes + batch_bytes,
        step_bytes=temporary,
    )


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(model: ShallowModel, training: Question, device: Device, action: Action, head: int | str) -> _Measured:
    """Measure one micro-step of the shallow model with all blocks under one action; once for each."""
    key = dataclasses.replace(training, **OF_THE_PLAN, optimizer="adamw"), device, action, head
    if key in model.measured:
        found: _Measured = model.measured[key]
        return found
    base = model.base.train()
    blocks = find_blocks(base)
    plan = Plan(blocks.family, blocks.model, tuple((block, action) for block in blocks.blocks), head=head)
    try:
        # Blocks run as under FSDP2: none may rebuild its input from parameters of another one.
        stay = mock.patch.object(compat.distributed, "parameters_stay", return_value=not training.sharded)
        with trial(base, plan), stay, model.fake, compat.fakes.running(on_accelerator=device.name != "cpu"):
            model.measured[key] = measured = _run(base, blocks.modules, training, device)
            return measured
    except HfCkptError:
        raise
    except Exception as error:
        reason = f"it does not run without its weights: {type(error).__name__}: {error}"
        if compat.fakes.depends_on_values(error):
            advice = 'Experts that are called one by one need experts_implementation="grouped_mm" or "batched_mm"'
            reason = f"how large its tensors are depends on their values ({error}). {advice}"
        raise HfCkptError(f"{blocks.model} cannot be planned for, because {reason}. Other policies work.") from error
    finally:
        for parameter in base.parameters():
            parameter.grad = None


def _run(model: nn.Module, modules: Mapping[str, nn.Module], training: Question, device: Device) -> _Measured:
    step = micro_step(training, model)
    if training.accumulation > 1:  # the largest micro-step adds to the gradients of earlier ones
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    padded = training.padded or (training.packing and not training.attention.startswith("flash_attention"))
    meter = FakeMeter(device.nanoseconds, model, step.batch, padded=padded, casts=device.name == "cpu")
    levels = Levels(meter, meter)
    autocast = DTYPES[training.autocast_name] if training.autocast_name else None

    def mark(what: str, block: str = "", has_graph: bool = True, action: Action | None = None) -> None:
        if what == "forward":
            meter.part = block
            meter.next_part = None
        elif what == "forwarded":
            meter.part = "returned", block
            meter.next_part = "behind", block
        levels.mark(what, block, has_graph)

    def note_input(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(meter.part, str) and isinstance(hidden, torch.Tensor):
            meter.allocated_by(hidden, ("input", _stack_of(meter.part)))

    with contextlib.ExitStack() as cleanup:
        for name, module in modules.items():
            if name.endswith(".0"):
                cleanup.callback(module.register_forward_pre_hook(note_input, with_kwargs=True).remove)
        boundaries = Boundaries(modules, mark, head=vocabulary_head(model))
        cleanup.callback(boundaries.remove)
        if step.forward is not None:
            vars(model)["forward"] = step.forward
            cleanup.callback(vars(model).pop, "forward")
        with meter:
            meter.part = "before"
            mark("begin")
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss = _loss(model, training, step, mark)
                meter.part = "exit"
            meter.part = None
            meter.next_part = None
            mark("loss")
            loss.backward()  # type: ignore[no-untyped-call]
    return _measured(levels.levels(), meter.freed, type(model).__name__, boundaries.chunks_help)


def _loss(model: nn.Module, training: Question, step: MicroStep, mark: Callable[[str], None]) -> torch.Tensor:
    """The loss. As in a Trainer, the outputs are freed before the backward."""
    outputs = model(**step.batch)
    mark("outputs")
    held = None
    if training.reference is not None:
        off = compat.peft.adapters_off(model) if training.reference == "adapters-off" else contextlib.nullcontext()
        with torch.no_grad(), off:
            held = model(**step.batch)
    mark("reference")
    loss: torch.Tensor = step.loss(outputs) if step.loss is not None else outputs.loss
    del held
    return loss


def _measured(
    levels: Sequence[Level], freed: Mapping[tuple[Any, Any], int], model: str, chunks_help: bool
) -> _Measured:
    """What was measured, from the levels of a step and (part that allocated memory, part in which it was freed) ->
    bytes."""
    step = _step_of(levels, model)
    blocks = [name for name, _ in step.names]
    last = blocks[-1]
    lent = {block: freed[block, "exit"] + freed[("behind", block), "exit"] for block in blocks}
    lent[last] += freed[last, ("behind", last)]
    ends: dict[str, tuple[int, int]] = {}
    before: Any = "before"
    for stack, group in itertools.groupby(blocks, _stack_of):
        *others, end = group
        when = ("returned", end), ("behind", end)
        makers = [before, *others, *(("behind", block) for block in others)]
        shared = sum(freed[maker, part] for maker in makers for part in when)
        shared -= freed[others[-1], when[0]] if others else 0  # the input of the last call
        ends[end] = sum(freed[("input", stack), part] for part in when), shared
        before = "behind", end
    input_bytes = freed[blocks[-2], ("returned", last)] if len(blocks) > 1 else 0
    calls = []
    for call in step.calls:
        if call.name[0] == last:
            part = call.forward.then(Part(net=-input_bytes))
        else:
            part = call.forward.then(call.behind)
            net = part.net + sum(ends.get(call.name[0], ()))
            part = dataclasses.replace(part, peak=max(part.peak, net), net=net)
        calls.append(dataclasses.replace(call, forward=part, behind=Part()))
    whats = [level.what for level in levels]
    loss = whats.index("loss")
    backward = whats.index("backward")
    forwarded = max(place for place, what in enumerate(whats) if what == "forwarded")
    # The head begins when the input of the last call and what its stack frees are gone.
    forward = Part(net=input_bytes + sum(ends[last])).then(part_of(levels, forwarded, loss))
    forward = dataclasses.replace(forward, net=forward.net + sum(lent.values()))
    head = forward, part_of(levels, loss, backward)
    forward_nanoseconds = part_of(levels, 0, whats.index("outputs")).nanoseconds
    ratio = levels[whats.index("reference")].nanoseconds / max(1, forward_nanoseconds)
    return _Measured(dataclasses.replace(step, calls=tuple(calls)), lent, ends, head, ratio, chunks_help)


def _step_of(levels: Sequence[Level], model: str) -> Step:
    """The step between these levels. Raises `HfCkptError` if it cannot be planned for."""
    step = step_of(levels)
    if step is None:
        raise HfCkptError(f"no block of {model} has a backward of its own: {NO_PLAN}")
    if any(call for _, call in step.names):
        raise HfCkptError(f"a step of {model} calls its blocks several times: {NO_PLAN}")
    return step


def _stack_of(block: str) -> str:
    """The list that holds a block, by its name."""
    return block.rpartition(".")[0]


# --- from the shallow model to the real one ---------------------------------------------------------------------------


def _places(model: ShallowModel, step: Step) -> dict[Block, str]:
    """The blocks of the real model that a step calls, in the order of the calls, with the names of the blocks of the
    shallow model that stand for them."""
    stacks = {stack.container: stack for stack in model.stacks}
    called = [name for name, _ in step.names]
    places = {}
    for container in dict.fromkeys(map(_stack_of, called)):
        for block, position in zip(stacks[container].blocks, stacks[container].like, strict=True):
            name = f"{container}.{position}"
            if name in called:
                places[block] = name
    return places


def _at_real_depth(step: Step, places: Mapping[Block, str]) -> Step:
    """The step with a call of every block of the real model."""
    by_name = {call.name[0]: call for call in step.calls}
    calls = (dataclasses.replace(by_name[name], name=(block.name, 0)) for block, name in places.items())
    return dataclasses.replace(step, calls=tuple(calls))


def _forward_nanoseconds(step: Step) -> int:
    return sum(call.forward.nanoseconds for call in step.calls)


def _stack_ends(called: Iterable[str], ends: Mapping[Action, Mapping[str, tuple[int, int]]]) -> Iterator[StackEnd]:
    """What is freed at the ends of stacks, for calls at their real depth."""
    first = 0
    for _, group in itertools.groupby(called, _stack_of):
        *others, end = group
        inputs = {action: sizes[end][0] for action, sizes in ends.items()}
        shared = {action: sizes[end][1] for action, sizes in ends.items()}
        yield StackEnd(first, first + len(others), inputs, shared)
        first += len(others) + 1
