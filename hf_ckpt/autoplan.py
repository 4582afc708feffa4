"""`budget` and `auto`: the plan for the batch that is really trained on, made when it is first seen."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.blueprint import Weights, blueprint_of
from hf_ckpt.budgets import costs_behind, plan_of, plan_of_least, plan_within
from hf_ckpt.cost import Apply, Step, optimizer_name, optimizer_state, trace_costs
from hf_ckpt.devices import DEVICES, Device, device_like
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.families import find_blocks
from hf_ckpt.measure import DeviceMemory, device_memory, device_name, of_all_ranks
from hf_ckpt.plan import Action, Plan, Prediction
from hf_ckpt.setups import batch_for, loss_for
from hf_ckpt.shards import Gathered, Layout, with_shards
from hf_ckpt.spec import Spec
from hf_ckpt.timeline import Costs
from hf_ckpt.units import format_bytes, format_seconds, parse_bytes, parse_fraction
from hf_ckpt.variants import all_variants

log = logging.getLogger(__name__)

Sizes = dict[str, tuple[int, int]]
"""Stack -> (sequences, tokens) that go into it."""
MARGIN = 0.05
"""Share of the device that `auto` leaves free, and by which a measured peak may be above its prediction."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a plan was made for."""

    sizes: Sizes
    padded: bool = False
    """Whether attention gets a mask."""
    accumulation: int = 1
    autocast: torch.dtype | None = None
    held_back: bool = False
    """Whether FSDP2 keeps whole gradients from one micro-step to the next, instead of its part of them."""

    def covers(self, other: Situation) -> bool:
        """Whether a plan for this one fits the other, too."""
        return (
            all(
                stack in self.sizes and size[0] <= self.sizes[stack][0] and size[1] <= self.sizes[stack][1]
                for stack, size in other.sizes.items()
            )
            and self.padded >= other.padded
            and (self.accumulation > 1) >= (other.accumulation > 1)
            and self.held_back >= other.held_back
        )

    def with_room_for(self, other: Situation) -> Situation:
        """The least that covers both."""
        sizes = {
            stack: (max(mine[0], yours[0]), max(mine[1], yours[1]))
            for stack in self.sizes | other.sizes
            for mine, yours in [(self.sizes.get(stack, (0, 0)), other.sizes.get(stack, (0, 0)))]
        }
        accumulation = max(self.accumulation, other.accumulation)
        padded, held_back = self.padded or other.padded, self.held_back or other.held_back
        return Situation(sizes, padded, accumulation, self.autocast, held_back)

    def __str__(self) -> str:
        shapes = {f"{batch} x {tokens} tokens" for batch, tokens in self.sizes.values()}
        padded = ", padded" if self.padded else ""
        return " and ".join(sorted(shapes)) + padded + (", accumulated" if self.accumulation > 1 else "")


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan that was made for a situation, and what it was made from."""

    situation: Situation
    limit_bytes: int
    costs: tuple[Costs, ...]
    """The ways to choose from."""
    plan: Plan
    memory: DeviceMemory
    """As it was when planning."""


def plan_for(
    model: nn.Module, spec: Spec, situation: Situation, apply: Apply, before: Planned | None = None
) -> Planned:
    """Plan for a model in its present state and a situation.

    The first plan (`before` is None) is agreed on by all ranks, which must all come here: the largest sizes and parts,
    the smallest limit, and the plan of rank 0. Where one of them cannot plan, all raise. Later plans are each rank's
    own: ranks of DDP may recompute differently, and so may those of FSDP2, which finds a block's parameters gathered
    whatever its action.

    Raises `InfeasibleError` when nothing fits, and `HfCkptError` where parameters are split over ranks by other means
    than FSDP2, or the model cannot be traced.
    """
    layout = layout_of(model, situation.held_back)
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
        for theirs, their_limit, their_layout in of_all_ranks((situation, limit, layout)):
            situation, limit = situation.with_room_for(theirs), min(limit, their_limit)
            layout = layout.largest(their_layout) if layout is not None and their_layout is not None else layout
    device = this_device()
    wanted, parts = situation, layout
    host_limit = None if spec.host_budget is None else parse_bytes(spec.host_budget)
    costs: tuple[Costs, ...] = ()
    plan: Plan | None = None
    failure: Exception | None = None
    try:
        costs = _in_clean_thread(lambda: _trace(model, spec.head, host_limit, wanted, device, apply, parts))
        plan = plan_within(costs, limit, device.name)
    except Exception as error:  # of whatever kind: others wait
        failure = error
    if first:
        plan = _agreed(plan, failure)
    if failure is not None:
        raise failure
    assert plan is not None
    _tell(spec, situation, plan, limit)
    return Planned(situation, limit, costs, plan, memory)


def _agreed(plan: Plan | None, failure: Exception | None) -> Plan | None:
    """The plan of rank 0. Raises where another rank has none: it will not go on."""
    ranks = of_all_ranks((None if plan is None else plan.to_dict(), str(failure)))
    without = [(rank, text) for rank, (found, text) in enumerate(ranks) if found is None]
    if failure is None and without:
        raise HfCkptError(f"rank {without[0][0]} cannot plan: {without[0][1]}")
    return None if ranks[0][0] is None else Plan.from_dict(ranks[0][0])


def tightened(planned: Planned, excess_bytes: int) -> Planned:
    """The plan for the same situation with `excess_bytes` less to use, or what keeps least if there is none."""
    limit = max(1, planned.limit_bytes - excess_bytes)
    device = planned.plan.prediction.device if planned.plan.prediction else ""
    try:
        plan = plan_within(planned.costs, limit, device)
    except InfeasibleError as error:
        plan = plan_of_least(planned.costs, limit, device)
        log.warning("hf_ckpt: no plan is tight enough, so the tightest is taken. %s", error)
    return dataclasses.replace(planned, limit_bytes=limit, plan=plan)


def prediction_of(model: nn.Module, plan: Plan, situation: Situation, apply: Apply) -> Prediction:
    """What a plan is predicted to cost in a situation, with what fills its peak.

    Raises `HfCkptError` where that cannot be told: for parameters that are split over ranks, and for actions that
    planning does not know.
    """
    if compat.is_sharded(model):
        raise HfCkptError("parameters are split over ranks")
    device = this_device()
    actions = [(block, dataclasses.replace(action, segment=None)) for block, action in plan.actions]
    if device.name == "cpu":  # what is in host memory there stays where it was
        actions = [
            (block, Action("full") if action.kind == "offload" else dataclasses.replace(action, moved=False))
            for block, action in actions
        ]
    host_limit = sys.maxsize if any(action.kind == "offload" or action.moved for _, action in actions) else None
    ways = _in_clean_thread(lambda: _trace(model, plan.head, host_limit, situation, device, apply))
    try:
        costs, choice = costs_behind(ways, dataclasses.replace(plan, actions=tuple(actions)))
    except ValueError as error:
        raise HfCkptError(str(error)) from error
    prediction = plan_of(costs, choice, device=device.name).prediction
    assert prediction is not None
    return prediction


def limit_bytes(spec: Spec, memory: DeviceMemory) -> int:
    """The peak that a spec allows on a device, in bytes."""
    if spec.policy == "auto":
        return memory.available_bytes - round(MARGIN * memory.total_bytes)
    budget = spec.budget
    if isinstance(budget, float):
        return round(budget * memory.total_bytes)
    if isinstance(budget, str) and budget.strip().endswith("%"):
        return round(parse_fraction(budget) * memory.total_bytes)
    assert budget is not None, "a spec without a budget is refused when it is read"
    return parse_bytes(budget)


def held_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters, their gradients, its buffers, and the state of its optimizers, as they are now, on
    this rank."""
    shards = (shard.parameter for unit in compat.shard_units(model) for shard in unit.shards)
    total = sum(buffer.nbytes for buffer in model.buffers())
    for parameter in {id(parameter): parameter for parameter in (*model.parameters(), *shards)}.values():
        total += compat.local(parameter).nbytes
        total += 0 if parameter.grad is None else compat.local(parameter.grad).nbytes
    return total + sum(state_bytes(optimizer) for optimizer in compat.optimizers_of(model))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state on this rank, as it is now; on the accelerator, where there is one:
    what FSDP2 keeps in host memory is no part of a peak there."""
    values = (value for state in list(optimizer.state.values()) for value in state.values())
    found = (compat.local(value) for value in values if isinstance(value, torch.Tensor))
    here = compat.accelerator_type() or "cpu"
    return sum(tensor.nbytes for tensor in found if tensor.device.type == here)


def layout_of(model: nn.Module, held_back: bool = False) -> Layout | None:
    """How FSDP2 splits a model; None where it does not."""
    units = compat.shard_units(model)
    if not units:
        return None
    blocks: dict[str, Gathered] = {}
    owners = {id(inner): name for name, module in find_blocks(model).modules.items() for inner in module.modules()}
    outside = Gathered()
    shards = [shard for unit in units for shard in unit.shards]
    for unit in units:
        names = {owners.get(id(module)) for module in unit.modules}
        name = names.pop() if len(names) == 1 and unit.let_go else None
        found = sum((_gathered(shard) for shard in unit.shards), start=Gathered())
        if name is None:
            outside += found
        else:
            blocks[name] = blocks.get(name, Gathered()) + found
    mine = {id(shard.parameter) for shard in shards} | {id(shard.gathered) for shard in shards}
    others = [parameter for parameter in model.parameters() if id(parameter) not in mine]
    here = [shard for shard in shards if shard.on_device]
    kept = sum(parameter.nbytes * (2 if parameter.requires_grad else 1) for parameter in others)
    return Layout(
        parameters=kept + sum(shard.numel * shard.parameter.element_size() for shard in here),
        optimizer=_optimizer_bytes(model, [*(shard.parameter for shard in here), *others]),
        blocks=blocks,
        outside=outside,
        held_back=held_back,
        widened=max((-(-shard.reduce.itemsize // shard.compute.itemsize) for shard in shards), default=1),
    )


def _gathered(shard: compat.Shard) -> Gathered:
    size, trained = shard.numel * shard.ranks, shard.parameter.requires_grad
    own = shard.parameter.dtype
    return Gathered(
        whole=size * shard.compute.itemsize,
        cast=shard.numel * shard.compute.itemsize if shard.copied else 0,
        sent=size * shard.reduce.itemsize if trained else 0,
        converted=size * shard.reduce.itemsize if trained and shard.reduce != shard.compute else 0,
        kept=shard.numel * own.itemsize if trained and shard.on_device else 0,
        summed=shard.numel * shard.reduce.itemsize if trained and shard.reduce != own else 0,
    )


def _optimizer_bytes(model: nn.Module, parameters: Iterable[nn.Parameter]) -> int:
    """Of the state that optimizers keep, or will keep, for what this rank has of parameters."""
    optimizers = compat.optimizers_of(model)
    known = sum(map(state_bytes, optimizers))
    mine = (
        (compat.local(parameter).numel(), parameter.element_size(), parameter.requires_grad) for parameter in parameters
    )
    return known or optimizer_state(Weights(tuple(mine)), optimizer_name(optimizers[0]) if optimizers else "adamw")


def this_device() -> Device:
    """The row of the device that models train on; that of the CPU where there is none for it."""
    if compat.accelerator_type() is None:
        return DEVICES["cpu"]
    found = device_like(device_name())
    if found is None:
        log.warning(
            "hf_ckpt has no figures for %s and takes those of an A100; see hf-ckpt plan --measure.", device_name()
        )
        return DEVICES["a100-80"]
    return found


def _trace(
    model: nn.Module,
    head: int | str,
    host_limit: int | None,
    situation: Situation,
    device: Device,
    apply: Apply,
    layout: Layout | None = None,
) -> tuple[Costs, ...]:
    blueprint = blueprint_of(model)
    name, known = "adamw", None
    optimizers = compat.optimizers_of(model)
    if optimizers:
        name = optimizer_name(optimizers[0])
        known = sum(map(state_bytes, optimizers)) or None
    step = Step(
        batch=batch_for(blueprint.base, situation.sizes),
        padded=situation.padded,
        autocast=situation.autocast,
        accumulation=situation.accumulation,
        optimizer=name,
        optimizer_bytes=known,
        loss=loss_for(blueprint.base),
    )
    costs = trace_costs(blueprint, step, device, apply)
    variants = functools.partial(all_variants, blueprint=blueprint, step=step, device=device, apply=apply)
    if layout is not None:  # a sharded head is run as a whole
        found = variants(costs, head="full", host_limit=host_limit)
        return tuple(with_shards(each, dataclasses.replace(layout, held_back=situation.held_back)) for each in found)
    if compat.is_distributed():
        # DistributedDataParallel keeps a second copy of all gradients, in its buckets.
        static = dataclasses.replace(costs.static, buffers=costs.static.buffers + costs.static.gradients)
        costs = dataclasses.replace(costs, static=static)
    return variants(costs, head=head, host_limit=host_limit)


def _in_clean_thread(work: Callable[[], tuple[Costs, ...]]) -> tuple[Costs, ...]:
    """Do it without the autocast, saved-tensor hooks and dispatch modes of the training, and with random state kept."""
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


def _tell(spec: Spec, situation: Situation, plan: Plan, limit: int) -> None:
    prediction = plan.prediction
    assert prediction is not None
    log.info(
        "hf_ckpt: planned for %s within %s (`%s`): peak %s, step %s predicted.\n%s",
        situation,
        format_bytes(limit),
        spec.policy,
        format_bytes(prediction.peak_bytes),
        format_seconds(prediction.step_seconds),
        plan,
    )
