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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import trial
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.costs.costs import Costs, StackEnd, Static, costs_of_step
from hf_ckpt.costs.steps import Change, Part, Step
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.batches import DTYPES, MicroStep, micro_step
from hf_ckpt.forecast.devices import Device
from hf_ckpt.forecast.model import ShallowModel, nbytes
from hf_ckpt.forecast.optimizers import optimizer_bytes
from hf_ckpt.forecast.question import OF_THE_PLAN, Question
from hf_ckpt.forecast.ranks import Sharding
from hf_ckpt.measure.fakes import FakeMeter
from hf_ckpt.measure.levels import Level, Levels, part_of, step_of
from hf_ckpt.models.blocks import find_blocks, vocabulary_head
from hf_ckpt.spec.actions import FULL, Action, candidates
from hf_ckpt.spec.plan import Plan


@dataclasses.dataclass(frozen=True)
class _Measured:
    """One measured step of the shallow model. Blocks go by their names in it."""

    step: Step
    """What runs between two blocks counts with the first of them. What `ends` says is left out."""
    freed: Mapping[str, int]
    """Block -> bytes that its call allocated and that are freed after the last call, before the backward: autocast's
    copies of weights."""
    ends: Mapping[str, tuple[int, int]]
    """Last block of a stack -> (bytes of the stack's input, bytes of what its calls share) that are freed then."""
    input_freed: int
    """Bytes that are freed when the last call has returned, because its caller held them: its input."""
    head: tuple[Part, Part]
    """What runs after the last block: the forward, and the backward."""
    reference: float
    """Time of the pass without gradients, which is part of the head's, as a multiple of that of the model's forward."""
    chunks_help: bool = False
    """See `Boundaries.chunks_help`."""


def costs_of_model(model: ShallowModel, asked: Question, device: Device, *, head: int | str = "full") -> Costs:
    """What a model costs under every action, for one batch shape.

    Args:
        model: a shallow model.
        asked: the training.
        device: its row gives the time of operations.
        head: how the head runs, as in `Plan.head`.

    Raises `HfCkptError` if the model does not run on fake tensors, or if a step calls a block twice.
    """
    actions = (*(action for action in candidates() if action != FULL), FULL)
    sharding = Sharding(model, asked) if asked.sharded else None
    step = micro_step(asked, model.base)
    static = _static(model, asked, step.batch, device)
    plain = _measure(model, asked, device, FULL, "full")
    whole = plain if head == "full" else _measure(model, asked, device, FULL, head)
    deep, like = _at_real_depth(model, whole)
    kinds = {block: number for number, block in enumerate(dict.fromkeys(like.values()))}
    changes: dict[tuple[int, Action], Change] = {}
    ratios: dict[tuple[int, Action], float] = {}
    steps = {FULL: whole}
    for action in actions[:-1]:
        other = steps[action] = _measure(model, asked, device, action, "full")
        for block, number in kinds.items():
            if changed := _change(plain, other, block):
                changes[number, action], ratios[number, action] = changed
    forward, backward = whole.head
    # What the last stack frees at its end is not alive in the head; what the blocks allocated counts with them.
    freed = sum(list(whole.ends.values())[-1])
    deeper = sum(call.forward.nanoseconds for call in deep.calls)
    deeper -= sum(call.forward.nanoseconds for call in whole.step.calls)
    spent = forward.nanoseconds + round(whole.reference * deeper)
    forward = Part(forward.peak + freed, forward.net + freed + sum(whole.freed.values()), spent)
    if sharding is not None:
        deep, static, backward = sharding.step(deep), sharding.static(static), sharding.head(backward)
    found = find_blocks(model.base)
    named = {block.name: block for stack in model.stacks for block in stack.blocks}
    costs = costs_of_step(
        deep,
        [named[name] for name in like],
        {(name, 0): kinds[block] for name, block in like.items()},
        changes,
        ratios,
        actions,
        {number: whole.freed[block] for block, number in kinds.items()},
        tuple(_stack_ends(list(like.values()), {action: each.ends for action, each in steps.items()})),
    )
    return dataclasses.replace(
        costs,
        family=found.family,
        model=found.model,
        tokens=asked.rows * max(asked.tokens, asked.target_tokens or 0) if "input_ids" in step.batch else 0,
        sequences=asked.batch,
        has_host=device.host_bandwidth > 0,
        head_tokens=head,
        chunks_help=whole.chunks_help and head == "full" and not asked.sharded,
        head=(forward, backward),
        static=static,
        blocks=tuple(named.values()),
        accumulation=asked.accumulation,
        optimizer_nanoseconds=device.nanoseconds(0, 2 * static.optimizer + 3 * static.gradients, 4),
    )


def _static(model: ShallowModel, asked: Question, batch: Mapping[str, Any], device: Device) -> Static:
    """What is alive at every moment, before weights are split over ranks."""
    size = DTYPES[asked.dtype].itemsize  # of shards, which have the type of the weights
    tensors = [(shape, size if asked.sharded else own, trained) for shape, own, trained in model.tensors]
    state, temporary = optimizer_bytes(tensors, asked.optimizer, on_cpu=device.name == "cpu")
    # A second model as large as the first, with a copy in autocast's type that is alive during the forward.
    reference = nbytes(model.tensors) if asked.reference == "model" else 0
    if reference and asked.autocast_name:
        copied = DTYPES[asked.autocast_name].itemsize
        reference += sum(math.prod(shape) * copied for shape, own, _ in model.tensors if own > 2)
    return Static(
        parameters=nbytes(model.tensors) + reference,
        buffers=model.buffer_bytes,
        optimizer=state,
        gradients=nbytes(tensor for tensor in model.tensors if tensor[2]),
        batch=sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor)),
        step_bytes=temporary,
    )


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(model: ShallowModel, asked: Question, device: Device, action: Action, head: int | str) -> _Measured:
    """Measure one micro-step of the shallow model with all blocks under one action; once for each."""
    key = dataclasses.replace(asked, **OF_THE_PLAN, optimizer="adamw"), device, action, head
    if key in model.measured:
        found: _Measured = model.measured[key]
        return found
    base = model.base.train()
    blocks = find_blocks(base)
    plan = Plan(blocks.family, blocks.model, tuple((block, action) for block in blocks.blocks), head=head)
    try:
        # Blocks run as under FSDP2: none may rebuild its input from parameters of another one.
        stay = mock.patch.object(compat.distributed, "parameters_stay", return_value=not asked.sharded)
        with trial(base, plan), stay, model.fake, compat.fakes.running(on_accelerator=device.name != "cpu"):
            model.measured[key] = measured = _run(base, blocks.modules, asked, device)
            return measured
    except HfCkptError:
        raise
    except Exception as error:
        reason = f"it does not run without its weights: {type(error).__name__}: {error}"
        if compat.fakes.depends_on_values(error):  # experts called one by one
            reason = (
                f"how large its tensors are depends on their values ({error}). If that is how tokens find their "
                'experts, load the model with experts_implementation="grouped_mm" or "batched_mm"'
            )
        raise HfCkptError(f"{blocks.model} cannot be planned for, because {reason}. Other policies work.") from error
    finally:
        for parameter in base.parameters():
            parameter.grad = None


def _run(model: nn.Module, modules: Mapping[str, nn.Module], asked: Question, device: Device) -> _Measured:
    step = micro_step(asked, model)
    inputs: dict[str, Any] = {
        name: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in step.batch.items()
    }
    if compat.transformers.wants_use_cache(model):
        inputs["use_cache"] = False
    if asked.accumulation > 1:  # the largest micro-step adds to the gradients of earlier ones
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    padded = asked.padded or (asked.packing and not asked.attention.startswith("flash_attention"))
    meter = FakeMeter(device.nanoseconds, model, inputs, padded=padded, casts=device.name == "cpu")
    levels = Levels(meter, meter)
    autocast = DTYPES[asked.autocast_name] if asked.autocast_name else None
    called: set[str] = set()

    def mark(what: str, block: str = "", has_graph: bool = True, action: Action | None = None) -> None:
        if what == "forward":
            if block in called:
                raise HfCkptError(
                    f"{type(model).__name__} cannot be planned for before a run, because a step calls its blocks "
                    "several times. A budget that is measured in the run works."
                )
            called.add(block)
            meter.part, meter.next_part = block, None
        elif what == "forwarded":
            meter.part, meter.next_part = ("returned", block), ("behind", block)
        levels.mark(what, block, has_graph)

    def note_input(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(meter.part, str) and isinstance(hidden, torch.Tensor):
            meter.allocated_by(hidden, ("input", _stack_of(meter.part)))

    with contextlib.ExitStack() as cleanup:
        for name, module in modules.items():
            if name.endswith(".0"):
                hook = module.register_forward_pre_hook(note_input, with_kwargs=True)
                cleanup.callback(hook.remove)
        boundaries = Boundaries(modules, mark, head=vocabulary_head(model))
        cleanup.callback(boundaries.remove)
        if step.forward is not None:
            vars(model)["forward"] = step.forward
            cleanup.callback(vars(model).pop, "forward")
        with meter:
            meter.part = "before"
            mark("begin")
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss, reference = _loss(model, inputs, asked, step, meter)
                meter.part = "exit"
            meter.part = meter.next_part = None
            mark("loss")
            loss.backward()  # type: ignore[no-untyped-call]
    measured = _measured(levels.levels(), meter.freed, reference, type(model).__name__)
    return dataclasses.replace(measured, chunks_help=boundaries.chunks_help)


def _loss(
    model: nn.Module, inputs: Mapping[str, Any], asked: Question, step: MicroStep, meter: FakeMeter
) -> tuple[torch.Tensor, float]:
    """The loss, and `_Measured.reference`. As in a Trainer, the outputs are freed before the backward."""
    stamps, held = [meter.stamp()], None
    outputs = model(**inputs)
    stamps.append(meter.stamp())
    if asked.reference is not None:
        off = compat.peft.adapters_off(model) if asked.reference == "adapters-off" else contextlib.nullcontext()
        with torch.no_grad(), off:
            held = model(**inputs)
    begun, forwarded, ended = *stamps, meter.stamp()
    loss: torch.Tensor = step.loss(outputs) if step.loss is not None else outputs.loss
    del held
    return loss, (ended - forwarded) / max(1, forwarded - begun)


def _measured(levels: Sequence[Level], freed: Mapping[tuple[Any, Any], int], reference: float, model: str) -> _Measured:
    """What was measured, from the levels of a step and (part that allocated memory, part in which it was freed) ->
    bytes."""
    step = step_of(levels)
    if step is None:
        raise HfCkptError(f"{model} cannot be planned for, because no block has a backward of its own.")
    whats = [level.what for level in levels]
    loss, backward = whats.index("loss"), whats.index("backward")
    forwarded = max(place for place, what in enumerate(whats) if what == "forwarded")
    head = part_of(levels, forwarded, loss), part_of(levels, loss, backward)
    blocks = [name for name, _ in step.names]
    last = blocks[-1]
    own = {block: freed[block, "exit"] + freed[("behind", block), "exit"] for block in blocks}
    own[last] += freed[last, ("behind", last)]
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
    calls = []
    for call in step.calls[:-1]:
        part = call.forward.then(call.behind)
        part = dataclasses.replace(part, net=part.net + sum(ends.get(call.name[0], ())))
        calls.append(dataclasses.replace(call, forward=part, behind=Part()))
    step = dataclasses.replace(step, calls=(*calls, step.calls[-1]))
    input_freed = freed[blocks[-2], ("returned", last)] if len(blocks) > 1 else 0
    return _Measured(step, own, ends, input_freed, head, reference)


def _stack_of(block: str) -> str:
    """The list that holds a block, by its name."""
    return block.rpartition(".")[0]


# --- from the shallow model to the real one ---------------------------------------------------------------------------


def _at_real_depth(model: ShallowModel, measured: _Measured) -> tuple[Step, dict[str, str]]:
    """The step of the real model; and for each of its blocks that is called, the block of the shallow model that stands
    for it, in the order of the calls."""
    step = measured.step
    stacks = {stack.container: stack for stack in model.stacks}
    by_block = {call.name[0]: call for call in step.calls}
    calls, like = [], {}
    for container in dict.fromkeys(map(_stack_of, by_block)):
        for block, position in zip(stacks[container].blocks, stacks[container].like, strict=True):
            call = by_block.get(f"{container}.{position}")
            if call is not None:  # otherwise the step skips this block
                calls.append(dataclasses.replace(call, name=(block.name, 0)))
                like[block.name] = call.name[0]
    kept = sum(call.forward.net - measured.freed[like[call.name[0]]] for call in calls)
    kept -= sum(call.forward.net - measured.freed[call.name[0]] for call in step.calls)
    begun = step.at_backward_bytes + kept
    return dataclasses.replace(step, calls=tuple(calls), at_backward_bytes=begun), like


def _stack_ends(blocks: list[str], ends: Mapping[Action, Mapping[str, tuple[int, int]]]) -> Iterator[StackEnd]:
    """What is freed at the ends of stacks, for calls at their real depth."""
    first = 0
    for _, group in itertools.groupby(blocks, _stack_of):
        *_, end = found = list(group)
        own, shared = ({action: sizes[end][part] for action, sizes in ends.items()} for part in (0, 1))
        yield StackEnd(first, first + len(found) - 1, own, shared)
        first += len(found)


def _change(full: _Measured, other: _Measured, block: str) -> tuple[Change, float] | None:
    """What an action changes in a block of the shallow model, compared with `full`, and its time as a multiple of that
    under `full`; None if the block has no backward."""
    whole, part = full.step[block, 0], other.step[block, 0]
    if not (whole and part and whole.backward and part.backward):
        return None
    is_last = whole is full.step.calls[-1]
    change = Change(
        forward_peak=part.forward.peak - whole.forward.peak,
        forward_net=part.forward.net - whole.forward.net - is_last * (other.input_freed - full.input_freed),
        later=full.freed[block] - other.freed[block],
        backward_peak=part.backward.peak - whole.backward.peak,
    )
    spent = part.forward.nanoseconds + part.backward.nanoseconds
    return change, spent / max(1, whole.forward.nanoseconds + whole.backward.nanoseconds)
