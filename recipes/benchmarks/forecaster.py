"""Plans and predictions for the rows of a comparison, made in a process of their own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from machine import keep_freed_memory
from ways import NONE, SELECTIVE

from hf_ckpt.attach.around import own_trial
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.models.blocks import vocabulary_head
from hf_ckpt.planner.alternatives import further_options, usual_options
from hf_ckpt.planner.budgets import costs_behind, peak_of_least, plan_of, plan_within
from hf_ckpt.planner.options import transformers_costs
from hf_ckpt.prediction.batches import step_of_workload
from hf_ckpt.prediction.costs import Costs
from hf_ckpt.prediction.machine import this_device
from hf_ckpt.prediction.timeline import worst_timeline
from hf_ckpt.prediction.timings import ShallowModels, Timings, depths_of
from hf_ckpt.prediction.trace import actions_for, chunked_head, trace_costs
from hf_ckpt.prediction.workload import Workload, skeleton_of_workload
from hf_ckpt.spec.actions import FULL, Action
from hf_ckpt.spec.plan import Plan

BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of the way from the lowest peak there is to that of no checkpointing."""
UNSEEN = 0.02
"""Share of a budget that plans leave to what no tensor shows: kernels' scratch memory."""
STEPS = 5
"""Steps of a shallow model in one turn, of which the fastest counts."""
DEPTHS = (1, 5)
"""Blocks a stack of the models that are timed."""
LINEAR = Action("selective", SELECTIVE["selective, save linear"])


class Forecaster:
    """Predicts all rows of a workload, from blocks traced on fake tensors and shallow models timed on this machine."""

    def __init__(self, workload: Workload, compiled: bool = False) -> None:
        keep_freed_memory()
        self.skeleton, self.device = skeleton_of_workload(workload), this_device()
        self.step = step_of_workload(workload, self.skeleton)
        known = actions_for(self.skeleton, self.step, self.device)
        self.actions = known
        """The actions that plans choose from."""
        actions = known if LINEAR in known else (*known[:-1], LINEAR, known[-1])
        costs = trace_costs(self.skeleton, self.step, self.device, actions=actions)
        own = transformers_costs(costs, self.skeleton, self.step, self.device)
        models, depths = ShallowModels(workload), depths_of(costs, DEPTHS)
        seconds = functools.partial(models.step_seconds, steps=STEPS)
        self.timings = Timings(costs, seconds, models.optimizer_seconds, depths=depths)
        own_seconds = functools.partial(seconds, put_on=own_trial)
        self.own_timings = None if own is costs else Timings(own, own_seconds, models.optimizer_seconds, depths=depths)
        self.compiled_timings = None
        if compiled:
            actions = actions_for(self.skeleton, self.step, self.device, compiled=True)
            costs = trace_costs(self.skeleton, self.step, self.device, actions=actions)
            self.compiled_timings = Timings(costs, seconds, models.optimizer_seconds, depths=depths)
        self.planned: dict[str, Plan] = {}
        self.planned_compiled: dict[str, Plan] = {}

    def take(self) -> None:
        """Time shallow models once."""
        self.timings.take()
        if self.compiled_timings is not None:
            self.compiled_timings.take()
        if self.own_timings is not None:
            self.own_timings.take()

    def plans(self) -> list[tuple[str, float, int, Plan]]:
        """(name, share, bytes, the fastest plan) of each of `BUDGETS`, by the times taken so far."""
        costs = restricted(self.timings.costs(), self.actions)
        low, high = peak_of_least(costs), worst_timeline(costs, costs.uniform(0)).peak_bytes
        found = []
        for share in BUDGETS:
            limit = low + round(share * (high - low))
            name = f"planned for {share:.0%}"
            self.planned[name] = plan_within(costs, max(low, round((1 - UNSEEN) * limit)), self.device.name)
            found.append((name, share, limit, self.planned[name]))
        return found

    def compiled_plans(self) -> list[tuple[str, float, int, Plan]]:
        """As `plans`, with blocks compiled, for the same budgets; those that none fits into are left out."""
        if self.compiled_timings is None:
            return []
        costs, found = self.compiled_timings.costs(), []
        for name, share, limit, _ in self.plans():
            name = f"compiled blocks, {name}"
            try:
                plan = plan_within(costs, round((1 - UNSEEN) * limit), self.device.name)
            except InfeasibleError:
                continue
            self.planned_compiled[name] = plan
            found.append((name, share, limit, plan))
        return found

    def predictions(self) -> dict[str, tuple[int, float]]:
        """Name of a row -> bytes and seconds that it should need and take, by the times taken so far."""
        costs = self.timings.costs()
        predicted = self._of_alternatives(costs)
        for name, plan in {**self._plans(costs), **self._plans_compiled()}.items():
            assert plan.prediction is not None
            predicted[name] = plan.prediction.peak_bytes, plan.prediction.step_seconds
        return predicted

    def _of_alternatives(self, costs: Costs) -> dict[str, tuple[int, float]]:
        """Of the rows of transformers, and of those of hf_ckpt that move tensors to the host."""
        own = None if self.own_timings is None else self.own_timings.costs()
        found = {}
        for option in usual_options(costs, self.device.host_bandwidth, own):
            name = option.name.removesuffix(" (transformers)")
            found[name if name == NONE.name else f"{name} (HF)"] = option.peak_bytes, option.step_seconds
        if self.device.name == "cpu":
            del found["offload (HF)"]
            return found
        for option in further_options(costs, None, self.device.host_bandwidth, self.device.launch_nanoseconds):
            found[option.name] = option.peak_bytes, option.step_seconds
        return found

    def _plans(self, costs: Costs) -> Mapping[str, Plan]:
        """Of the rows of hf_ckpt: fixed specs, the head in chunks, and what was planned for budgets."""
        full = costs.actions.index(FULL)
        plans = {
            name: plan_of(costs, costs.uniform(costs.actions.index(Action("selective", save))))
            for name, save in SELECTIVE.items()
        }
        plans["full"] = plan_of(costs, costs.uniform(full))
        if vocabulary_head(self.skeleton.base) is not None:
            chunked = chunked_head(costs, self.skeleton, self.step, self.device, "auto")
            plans["head in chunks"] = plan_of(chunked, chunked.uniform(0))
            plans["full, head in chunks"] = plan_of(chunked, chunked.uniform(full))
        for name, plan in self.planned.items():
            plans[name] = plan_of(costs, costs_behind([costs], plan)[1])
        return plans

    def _plans_compiled(self) -> Mapping[str, Plan]:
        """Of the rows of compiled blocks: the ends of the ladder of shares, and what was planned for budgets."""
        if self.compiled_timings is None:
            return {}
        costs = self.compiled_timings.costs()
        ends = {1: 0, 0: len(costs.actions) - 1}
        plans = {f"compiled blocks, share {share}": plan_of(costs, costs.uniform(end)) for share, end in ends.items()}
        return plans | {
            name: plan_of(costs, costs_behind([costs], plan)[1]) for name, plan in self.planned_compiled.items()
        }


def restricted(costs: Costs, actions: Sequence[Action]) -> Costs:
    """What a plan may choose from: those of `costs` that `actions` name."""
    allowed = {number for number, action in enumerate(costs.actions) if action in actions}
    stacks = (
        dataclasses.replace(
            stack, choices=tuple(tuple(number for number in here if number in allowed) for here in stack.choices)
        )
        for stack in costs.stacks
    )
    return dataclasses.replace(costs, stacks=tuple(stacks))
