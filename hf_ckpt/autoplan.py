"""`budget` and `auto`: the plan for the batch that is really trained on, made when it is first seen."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
from collections.abc import Callable

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.blueprint import blueprint_of
from hf_ckpt.budgets import costs_behind, plan_of, plan_of_least, plan_within
from hf_ckpt.cost import Apply, Step, optimizer_name, trace_costs
from hf_ckpt.devices import DEVICES, Device, device_like
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.measure import DeviceMemory, device_memory, device_name, of_all_ranks
from hf_ckpt.plan import Action, Plan, Prediction
from hf_ckpt.setups import batch_for, loss_for
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

    def covers(self, other: Situation) -> bool:
        """Whether a plan for this one fits the other, too."""
        return (
            all(
                stack in self.sizes and size[0] <= self.sizes[stack][0] and size[1] <= self.sizes[stack][1]
                for stack, size in other.sizes.items()
            )
            and self.padded >= other.padded
            and (self.accumulation > 1) >= (other.accumulation > 1)
        )

    def with_room_for(self, other: Situation) -> Situation:
        """The least that covers both."""
        sizes = {
            stack: (max(mine[0], yours[0]), max(mine[1], yours[1]))
            for stack in self.sizes | other.sizes
            for mine, yours in [(self.sizes.get(stack, (0, 0)), other.sizes.get(stack, (0, 0)))]
        }
        accumulation = max(self.accumulation, other.accumulation)
        return Situation(sizes, self.padded or other.padded, accumulation, self.autocast)

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

    The first plan (`before` is None) is agreed on by all ranks, which must all come here: the largest sizes, the
    smallest limit, and the plan of rank 0. Later ones are each rank's own: ranks of DDP may recompute differently.

    Raises `InfeasibleError` when nothing fits, and `HfCkptError` where parameters are split over ranks, or the model
    cannot be traced.
    """
    if compat.is_sharded(model):
        raise HfCkptError(
            f"`policy: {spec.policy}` cannot plan for parameters that are split over ranks (FSDP, ZeRO-3) yet. Use "
            "`selective` or `full`, or a plan of `hf-ckpt plan`."
        )
    held = held_bytes(model)
    memory = device_memory(held)
    first = before is None
    limit = before.limit_bytes if before is not None else limit_bytes(spec, memory)
    if first:
        ranks = of_all_ranks((situation, limit))
        for theirs, their_limit in ranks:
            situation, limit = situation.with_room_for(theirs), min(limit, their_limit)
    device = this_device()
    wanted = situation
    host_limit = None if spec.host_budget is None else parse_bytes(spec.host_budget)
    costs = _in_clean_thread(lambda: _trace(model, spec.head, host_limit, wanted, device, apply))
    plan = plan_within(costs, limit, device.name)
    if first:
        plan = Plan.from_dict(of_all_ranks(plan.to_dict())[0])
    _tell(spec, situation, plan, limit)
    return Planned(situation, limit, costs, plan, memory)


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
    """Bytes of a model's parameters, their gradients, its buffers, and the state of its optimizers, as they are now."""
    total = sum(buffer.nbytes for buffer in model.buffers())
    for parameter in model.parameters():
        total += parameter.nbytes + (0 if parameter.grad is None else parameter.grad.nbytes)
    return total + sum(state_bytes(optimizer) for optimizer in compat.optimizers_of(model))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state, as it is now."""
    values = (value for state in list(optimizer.state.values()) for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


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
    model: nn.Module, head: int | str, host_limit: int | None, situation: Situation, device: Device, apply: Apply
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
    if compat.is_distributed():
        # DistributedDataParallel keeps a second copy of all gradients, in its buckets.
        static = dataclasses.replace(costs.static, buffers=costs.static.buffers + costs.static.gradients)
        costs = dataclasses.replace(costs, static=static)
    return all_variants(costs, blueprint, step, device, apply, head=head, host_limit=host_limit)


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
