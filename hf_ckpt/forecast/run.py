"""Runs the measuring steps of a training on fake tensors, and turns them into costs.

This is what `training/session.py` does with the first steps of a run: a step under `full`, and what every other action
changes in it, measured at the boundaries of blocks. Here the model is shallow, the tensors are fake, and the meter
counts their bytes and adds up the time of a device. The calls of the shallow model are then repeated up to the depth of
the real one.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import trial
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.costs.costs import Costs, StackEnd, Static, costs_of_step
from hf_ckpt.costs.steps import Call, CallName, Change, Part, Step
from hf_ckpt.engines.tiles import standing_for
from hf_ckpt.errors import HfCkptError, InPlaceError
from hf_ckpt.forecast.batches import MicroStep
from hf_ckpt.forecast.devices import Device
from hf_ckpt.forecast.model import ShallowModel, nbytes, trainable
from hf_ckpt.forecast.optimizers import optimizer_bytes
from hf_ckpt.forecast.ranks import Sharding, pass_inputs
from hf_ckpt.measure.fakes import FakeMeter
from hf_ckpt.measure.levels import Levels, part_of, step_of
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.spec.actions import FULL, Action, candidates
from hf_ckpt.spec.plan import Plan

_Place = tuple[str, int, int]
"""A call in the shallow model: (container of a stack, position in `Stack.places`, number of the call)."""


class CannotRunError(HfCkptError):
    """The model does not run on fake tensors."""


@dataclasses.dataclass(frozen=True)
class _Measured:
    """One measured step of the shallow model."""

    step: Step
    places: Mapping[CallName, _Place]
    """Call -> its place."""
    freed: Mapping[_Place, int]
    """Place -> bytes that the call allocated and that are freed after the last call, before the backward: autocast's
    copies of weights."""
    ends: Mapping[_Place, tuple[int, int]]
    """Last call of a stack -> (bytes of the stack's input, bytes of what its calls share) that are freed when it has
    ended. `step` does not contain it."""
    input_freed: int
    """Bytes that are freed when the last call has returned, because its caller held them: its input."""
    head: tuple[Part, Part]
    """What runs after the last block: the forward, and the backward."""
    reference_nanoseconds: Mapping[_Place, int]
    """Place -> time of the block in the pass without gradients, which is part of the head's time."""


def costs_of_model(
    model: ShallowModel,
    step: MicroStep,
    device: Device,
    *,
    head: int | str = "full",
    mlp: int | str = "full",
    sharding: Sharding | None = None,
) -> Costs:
    """What a model costs under every action, for one batch shape.

    Args:
        model: a shallow model.
        step: the micro-step to run.
        device: its row gives the time of operations.
        head: how the head runs, as in `Plan.head`.
        mlp: how the feed-forward of each block runs, as in `Plan.mlp`.
        sharding: how ranks share the weights; None if each has them all.

    Raises `CannotRunError` if the model does not run on fake tensors.
    """
    actions = (*(action for action in candidates() if action != FULL), FULL)
    static = _static(model, step, device, None if sharding is None else sharding.element_bytes)
    measure = functools.partial(_measure, model, step, device, mlp=mlp)
    plain = measure(FULL)
    whole = plain if head == "full" else measure(FULL, head=head)
    deep, like = _at_real_depth(model, whole)
    if any(number for _, number in deep.names):
        raise HfCkptError(
            f"{model.name} cannot be planned for before a run, because a step calls its blocks several times. A budget "
            "that is measured in the run works."
        )
    kinds = {place: number for number, place in enumerate(dict.fromkeys(like.values()))}
    changes: dict[tuple[int, Action], Change] = {}
    ratios: dict[tuple[int, Action], float] = {}
    spent = _spent(plain)
    steps = {FULL: whole}
    for action in actions[:-1]:
        other = steps[action] = measure(action)
        times = _spent(other)
        for place, change in _changes(plain, other).items():
            if place not in kinds:  # the first of two alike, which stands for no other block
                continue
            changes[kinds[place], action] = change
            ratios[kinds[place], action] = times[place] / max(1, spent[place])
    forward, backward = whole.head
    # What the last stack frees at its end is not alive in the head; what the blocks allocated counts with them.
    freed = sum(list(whole.ends.values())[-1])
    in_reference = sum(whole.reference_nanoseconds.get(place, 0) for place in like.values())
    in_reference += forward.nanoseconds - sum(whole.reference_nanoseconds.values())
    forward = Part(forward.peak + freed, forward.net + freed + sum(whole.freed.values()), in_reference)
    if sharding is not None:
        deep, static, backward = sharding.step(deep), sharding.static(static), sharding.head(backward)
    named = {block.name: block for stack in model.stacks for block in stack.blocks}
    costs = costs_of_step(
        deep,
        [named[name] for name, _ in deep.names],
        {name: kinds[place] for name, place in like.items()},
        changes,
        ratios,
        actions,
        {number: whole.freed[place] for place, number in kinds.items()},
        tuple(_stack_ends(list(like.values()), {action: each.ends for action, each in steps.items()})),
    )
    return dataclasses.replace(
        costs,
        family=model.family,
        model=model.name,
        tokens=step.tokens,
        head_tokens=head,
        mlp_tokens=mlp,
        head=(forward, backward),
        static=static,
        blocks=tuple(named.values()),
        accumulation=step.accumulation,
        optimizer_nanoseconds=device.nanoseconds(0, 2 * static.optimizer + 3 * static.gradients, 4),
    )


def _static(model: ShallowModel, step: MicroStep, device: Device, element_bytes: int | None) -> Static:
    """What is alive at every moment. An element of the optimizer's parameters has `element_bytes`, or its own size."""
    tensors = [(shape, element_bytes or size, trained) for shape, size, trained in model.tensors]
    optimizer = optimizer_bytes(tensors, step.optimizer, on_cpu=device.name == "cpu")
    # A second model as large as the first, with a copy in autocast's type that is alive during the forward.
    reference = nbytes(model.tensors) if step.reference == "model" else 0
    if reference and step.autocast is not None:
        size = step.autocast.itemsize
        reference += sum(math.prod(shape) * size for shape, own, _ in model.tensors if own > 2)
    return Static(
        parameters=nbytes(model.tensors) + reference,
        buffers=model.buffer_bytes,
        optimizer=optimizer.state,
        gradients=nbytes(trainable(model.tensors)),
        batch=sum(value.nbytes for value in step.batch.values() if isinstance(value, torch.Tensor)),
        step_bytes=optimizer.step,
    )


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(
    model: ShallowModel,
    step: MicroStep,
    device: Device,
    action: Action,
    *,
    head: int | str = "full",
    mlp: int | str = "full",
) -> _Measured:
    """Measure one micro-step of the shallow model with all blocks under one action."""
    key = step.shapes, device, action, head, mlp
    if key not in model.measured:
        model.measured[key] = _measure_anew(model, step, device, action, head, mlp)
    found: _Measured = model.measured[key]
    return found


def _measure_anew(
    model: ShallowModel, step: MicroStep, device: Device, action: Action, head: int | str, mlp: int | str
) -> _Measured:
    with contextlib.ExitStack() as stack:
        base = model.base.train()
        found = find_blocks(base)
        plan = Plan(found.family, found.model, tuple((block, action) for block in found.blocks), head=head, mlp=mlp)
        stack.enter_context(trial(base, plan))
        if device.name != "cpu":
            stack.enter_context(compat.accelerator_kernels())
        try:
            stack.enter_context(model.fake)
            stack.enter_context(compat.fake_values_count())
            stack.enter_context(compat.any_type_in_grouped_products())
            return _run(base, found.modules, step, device)
        except InPlaceError as error:
            raise HfCkptError(
                f"{model.name} cannot be planned for, because its blocks work in place on their hidden states. "
                "`full` and `selective` need no plan."
            ) from error
        except HfCkptError:
            raise
        except Exception as error:
            raise CannotRunError(_unplannable(model.name, error)) from error
        finally:
            for parameter in base.parameters():
                parameter.grad = None


def _run(model: nn.Module, modules: Mapping[str, nn.Module], step: MicroStep, device: Device) -> _Measured:
    inputs = {name: _fake(value) for name, value in step.batch.items()}
    if compat.wants_use_cache(model):
        inputs["use_cache"] = False
    if step.accumulation > 1:  # the largest micro-step adds to the gradients of earlier ones
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    meter = FakeMeter(device.nanoseconds, model, inputs, padded=step.padded, casts=device.name == "cpu")
    levels = Levels(meter)
    positions = {name: name.rpartition(".")[::2] for name in modules}
    numbers: collections.Counter[str] = collections.Counter()
    places: dict[CallName, _Place] = {}

    def mark(what: str, block: str = "", has_graph: bool = True) -> None:
        if what == "forward":
            name = block, numbers[block]
            numbers[block] += 1
            container, index = positions[block]
            meter.part = places[name] = container, int(index), name[1]
            meter.next_part = None
        elif what == "forwarded":
            meter.part, meter.next_part = ("returned", meter.part), ("behind", meter.part)
        levels.mark(what, block, has_graph)

    def note_input(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if meter.part is not None and isinstance(hidden, torch.Tensor):
            meter.allocated_by(hidden, ("input", meter.part[::2]))

    firsts = [module for name, module in modules.items() if positions[name][1] == "0"]
    handles = [module.register_forward_pre_hook(note_input, with_kwargs=True) for module in firsts]
    if step.sharded:
        handles += [module.register_forward_pre_hook(pass_inputs, with_kwargs=True) for module in modules.values()]
    boundaries = Boundaries(modules, mark)
    in_reference: collections.Counter[_Place] = collections.Counter()
    try:
        with contextlib.ExitStack() as around:
            around.callback(standing_for.reset, standing_for.set(meter.one_for_many))
            around.enter_context(meter)
            meter.part = "before"
            mark("begin")
            autocast = functools.partial(torch.autocast, "cpu", dtype=step.autocast)
            with autocast() if step.autocast is not None else contextlib.nullcontext():
                loss = _loss(model, inputs, step, functools.partial(_timed, meter, modules, positions, in_reference))
                meter.part = "exit"
            meter.part = meter.next_part = None
            mark("loss")
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        boundaries.remove()
        for handle in handles:
            handle.remove()
    found = levels.levels()
    measured = step_of(found)
    if measured is None:
        raise HfCkptError(f"{type(model).__name__} cannot be planned for, because no block has a backward of its own.")
    whats = [level.what for level in found]
    forwarded, loss_at, backward = (
        len(whats) - 1 - whats[::-1].index("forwarded"),
        whats.index("loss"),
        whats.index("backward"),
    )
    calls = [places[name] for name in measured.names]
    ends = _ends(calls, meter.freed)
    last, freed = calls[-1], meter.freed
    own = {call: freed[call, "exit"] + freed[("behind", call), "exit"] for call in calls}
    own[last] += freed[last, ("behind", last)]
    return _Measured(
        _without_ends(_joined_to_blocks(measured), {name: sum(ends.get(places[name], ())) for name in measured.names}),
        places,
        freed=own,
        ends=ends,
        input_freed=freed[calls[-2], ("returned", last)] if len(calls) > 1 else 0,
        head=(part_of(found, forwarded, loss_at), part_of(found, loss_at, backward)),
        reference_nanoseconds=in_reference,
    )


def _without_ends(step: Step, freed: Mapping[CallName, int]) -> Step:
    """The step without what is freed at the ends of stacks. After the last one, that counts with the head."""
    calls = [
        dataclasses.replace(call, forward=dataclasses.replace(call.forward, net=call.forward.net + freed[call.name]))
        for call in step.calls[:-1]
    ]
    return dataclasses.replace(step, calls=(*calls, step.calls[-1]))


def _ends(calls: list[_Place], freed: Mapping[tuple[Any, Any], int]) -> dict[_Place, tuple[int, int]]:
    """`_Measured.ends` from (part that allocated memory, part in which it was freed) -> bytes."""
    ends: dict[_Place, tuple[int, int]] = {}
    before: Any = "before"
    for stack, group in itertools.groupby(calls, lambda call: call[::2]):
        *others, last = group
        when = ("returned", last), ("behind", last)
        own = sum(freed.get((("input", stack), part), 0) for part in when)
        makers = [before, *others, *(("behind", call) for call in others)]
        shared = sum(freed.get((maker, part), 0) for maker in makers for part in when)
        shared -= freed.get((others[-1], when[0]), 0) if others else 0  # the input of the last call
        ends[last] = own, shared
        before = "behind", last
    return ends


@contextlib.contextmanager
def _timed(
    meter: FakeMeter,
    modules: Mapping[str, nn.Module],
    positions: Mapping[str, tuple[str, str]],
    spent: collections.Counter[_Place],
) -> Iterator[None]:
    """Add the time of every block that runs in this context to `spent`."""
    begun: dict[str, int] = {}
    handles: list[Any] = []
    for name, module in modules.items():
        container, index = positions[name]
        place = container, int(index), 0
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: begun.__setitem__(name, meter.stamp())))
        handles.append(
            module.register_forward_hook(
                lambda *_, name=name, place=place: spent.update({place: meter.stamp() - begun[name]})
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _joined_to_blocks(step: Step) -> Step:
    """The step with what runs between two blocks counted with the block before it, so that its change is measured."""
    calls = [
        dataclasses.replace(call, forward=call.forward.then(call.behind), behind=Part()) for call in step.calls[:-1]
    ]
    return dataclasses.replace(step, calls=(*calls, step.calls[-1]))


def _spent(measured: _Measured) -> dict[_Place, int]:
    """Place of a call -> nanoseconds of its forward and backward."""
    spent = {}
    for call in measured.step.calls:
        back = call.backward.nanoseconds if call.backward else 0
        spent[measured.places[call.name]] = call.forward.nanoseconds + back
    return spent


def _loss(
    model: nn.Module,
    inputs: Mapping[str, Any],
    step: MicroStep,
    in_reference: Callable[[], contextlib.AbstractContextManager[None]],
) -> torch.Tensor:
    """Run the forward. A separate function frees its outputs before the backward, as in a Trainer.

    The reference pass runs inside the context `in_reference`.
    """
    outputs, held = _outputs(model, inputs, step), None
    if step.reference in ("adapters-off", "model"):
        off = compat.adapters_off(model) if step.reference == "adapters-off" else contextlib.nullcontext()
        with torch.no_grad(), off, in_reference():
            held = _outputs(model, inputs, step)
    loss: torch.Tensor = step.loss(outputs) if step.loss is not None else outputs.loss
    del held
    return loss


def _outputs(model: nn.Module, inputs: Mapping[str, Any], step: MicroStep) -> Any:
    if step.forward is None:
        return model(**inputs)
    vars(model)["forward"] = compat.rebound(step.forward, model)
    try:
        return model(**inputs)
    finally:
        del vars(model)["forward"]


def _fake(value: Any) -> Any:
    """A tensor of the same shape and type, fake inside a `FakeTensorMode`; other values unchanged."""
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _unplannable(model: str, error: Exception) -> str:
    """The error message for a model that failed on fake tensors."""
    reason = f"it does not run without its weights: {type(error).__name__}: {error}"
    if compat.depends_on_values(error):  # experts called one by one
        reason = (
            f"how large its tensors are depends on their values ({error}). If that is how tokens find their experts, "
            'load the model with experts_implementation="grouped_mm" or "batched_mm"'
        )
    return f"{model} cannot be planned for, because {reason}. `selective`, `full` and other policies need no plan."


# --- from the shallow model to the real one ---------------------------------------------------------------------------


def _at_real_depth(model: ShallowModel, measured: _Measured) -> tuple[Step, dict[CallName, _Place]]:
    """The step of the real model, and the place of the shallow model's call that each of its calls repeats."""
    step, places = measured.step, measured.places
    stacks = {stack.container: stack for stack in model.stacks}
    calls: list[Call] = []
    like: dict[CallName, _Place] = {}
    for (container, number), group in itertools.groupby(step.calls, lambda call: places[call.name][::2]):
        by_position = {places[call.name][1]: call for call in group}
        for block, position in zip(stacks[container].blocks, stacks[container].like, strict=True):
            if position in by_position:  # otherwise the step skips this block
                call = by_position[position]
                calls.append(dataclasses.replace(call, name=(block.name, number)))
                like[block.name, number] = container, position, number
    kept = sum(call.forward.net - measured.freed[like[call.name]] for call in calls)
    kept -= sum(call.forward.net - measured.freed[places[call.name]] for call in step.calls)
    begun = step.at_backward_bytes + kept
    return dataclasses.replace(step, calls=tuple(calls), at_backward_bytes=begun), like


def _stack_ends(calls: list[_Place], ends: Mapping[Action, Mapping[_Place, tuple[int, int]]]) -> Iterator[StackEnd]:
    """What is freed at the ends of stacks, for calls at their real depth."""
    for container, number in dict.fromkeys(call[::2] for call in calls):
        mine = [place for place, call in enumerate(calls) if call[::2] == (container, number)]
        freed = {action: of_action[calls[mine[-1]]] for action, of_action in ends.items()}
        own, shared = ({action: sizes[part] for action, sizes in freed.items()} for part in (0, 1))
        yield StackEnd(mine[0], mine[-1], own, shared)


def _changes(full: _Measured, other: _Measured) -> dict[_Place, Change]:
    """What an action changes in each call of the shallow model, compared with `full`."""
    changes: dict[_Place, Change] = {}
    for name, place in full.places.items():
        whole, part = full.step[name], other.step[name]
        if whole is None or part is None or whole.backward is None or part.backward is None:
            continue
        is_last = name == full.step.names[-1]
        changes[place] = Change(
            forward_peak=part.forward.peak - whole.forward.peak,
            forward_net=part.forward.net - whole.forward.net - is_last * (other.input_freed - full.input_freed),
            later=full.freed[place] - other.freed[place],
            backward_peak=part.backward.peak - whole.backward.peak,
        )
    return changes
