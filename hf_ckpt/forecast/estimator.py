"""What trainings cost on a device. Each is measured once, on a shallow model with fake tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from hf_ckpt.costs.costs import ON_DEVICE, Costs, timeline, with_offloading, with_segments
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.devices import Device
from hf_ckpt.forecast.model import ShallowModel, nbytes, shallow_model
from hf_ckpt.forecast.optimizers import optimizer_bytes
from hf_ckpt.forecast.question import MODEL, Question
from hf_ckpt.forecast.run import Inputs, costs_of_model, inputs_of, least_bytes
from hf_ckpt.planner.planner import Planner, in_segments_of
from hf_ckpt.planner.policies import make_plan
from hf_ckpt.spec.actions import FULL, Action
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import format_bytes

MOST_BYTES = 2**56
"""Peaks above this are refused: a planner's sums of them might exceed 64 bits."""


class CostEstimator:
    """Estimates what trainings cost, as questions on its device describe them: see `Question.on`.

    Args:
        device: where they run.
        config: of the model; None for that of the model that a question names.
        tell: called with a short message before each measurement.
    """

    def __init__(self, device: Device, config: Any, tell: Callable[[str], None]) -> None:
        self._device = device
        self._config = config
        self._tell = tell
        self._models: dict[Question, ShallowModel] = {}
        self.measured: dict[Inputs, Costs] = {}
        """What was measured so far."""

    def model_of(self, training: Question) -> ShallowModel:
        """Return the shallow model of a question."""
        of_model = training.only(MODEL)
        if of_model not in self._models:
            self._models[of_model] = shallow_model(of_model, self._config)
        return self._models[of_model]

    def costs_of(self, training: Question, further: frozenset[Action] = frozenset()) -> Costs:
        """Return what each action of each block costs in a step, on one rank.

        `further` are actions beside those that a plan chooses from. Raises `HfCkptError` for a model that does not run
        on fake tensors.
        """
        inputs = inputs_of(training, self._device, further)
        if inputs not in self.measured:
            model = self.model_of(training)
            self._tell(f"measuring steps with {training.batch} x {training.tokens} tokens, on fake tensors")
            costs = costs_of_model(model, inputs)
            peak = timeline(costs, costs.uniform(FULL)).peak_bytes
            if peak > MOST_BYTES:
                size = f"{training.batch} x {training.tokens} tokens needs {format_bytes(peak)}"
                raise HfCkptError(f"a step of {size}, which is more than any device has: ask for fewer.")
            # transformers 5 stacks the weights of experts in one parameter. bitsandbytes replaces `nn.Linear` only, so
            # that "4 bits" of such a model may be far larger than its users expect.
            experts = nbytes(tensor for tensor in model.tensors if len(tensor.shape) > 2)
            if training.bits and experts > costs.static.parameters / 2:
                note = f"{format_bytes(experts)} of weights are stacked experts, which bitsandbytes does not quantise"
                costs = dataclasses.replace(costs, notes=(note,))
            self.measured[inputs] = costs
        return self.measured[inputs]

    def planner_of(self, training: Question) -> Planner:
        """Return the planner for a question, with host memory and segments as it has them."""
        costs = self.costs_of(training)
        divided = [] if training.segments is None else in_segments_of(costs, training.segments)
        return Planner([*self._with_offloading(costs, training.host_budget), *divided])

    def planner_of_spec(self, spec: Spec, training: Question) -> Planner:
        """Return the planner for the actions that a spec gives; stacks that it leaves to the planner have all actions.

        Raises `HfCkptError` for a spec that does not fit the model, or that cannot be predicted.
        """
        plain = self.costs_of(training)
        plan = make_plan(spec, plain.blocks, plain.family, plain.model)
        actions = {block: action for block, action in plan.actions if not spec.is_planned or spec.is_fixed(block.stack)}
        held = {block: dataclasses.replace(action, made=False) for block, action in actions.items()}
        moved = ON_DEVICE.keys() & held.values()
        is_divided = any(action.made for action in actions.values())
        if moved and is_divided:
            raise HfCkptError("segments whose inputs are offloaded cannot be predicted: leave one of the two out.")
        if len(moved) > 1:
            raise HfCkptError("two ways of offloading in one spec cannot be predicted: leave one of them out.")
        costs = self.costs_of(training, frozenset(ON_DEVICE.get(action, action) for action in held.values()))
        if is_divided:
            return Planner([with_segments(costs, actions)])
        host_budget = training.host_budget or (2**60 if moved else None)
        ways = self._with_offloading(costs, host_budget)
        # On a CPU nothing moves, and blocks keep on the device what they would move.
        restricted = [way.restricted(actions) for way in ways if moved <= set(way.actions)]
        return Planner(restricted or [costs.restricted(actions)])

    def _with_offloading(self, costs: Costs, host_budget: int | None) -> list[Costs]:
        return with_offloading(costs, self._device.host_bandwidth, self._device.launch_nanoseconds, host_budget)

    def least_bytes(self, training: Question, budget: int) -> int:
        """Return bytes that every plan of a training needs: weights and optimizer, what follows from larger steps that
        were measured, or, if these fit, what its head needs, for which only one step is measured."""
        needed = [0]
        if not training.sharded:
            tensors = self.model_of(training).tensors
            states = 0 if training.way.states else optimizer_bytes(tensors, training.optimizer)[0]
            needed.append(nbytes(tensors) + states)
        needed += [self._bytes_by(measured.training, costs, training) for measured, costs in self.measured.items()]
        if max(needed) <= budget:
            needed.append(least_bytes(self.model_of(training), inputs_of(training, self._device)))
        return max(needed)

    def _bytes_by(self, measured: Question, costs: Costs, training: Question) -> int:
        """Return bytes that a training needs at least, by a larger step that was measured; 0 if that says nothing."""
        larger = dataclasses.replace(measured, host_budget=training.host_budget, segments=training.segments)
        batch = training.batch / larger.batch
        length = training.tokens / larger.tokens
        sizes: Any = {"batch": training.batch, "tokens": training.tokens, "accumulation": training.accumulation}
        same_size = dataclasses.replace(larger, **sizes)
        # In a step of one micro-step, no gradients of earlier ones are alive.
        has_fewer = training.accumulation == 1 < larger.accumulation
        if max(batch, length) > 1 or has_fewer:
            return 0
        if inputs_of(same_size, self._device) != inputs_of(training, self._device):
            return 0
        # What is alive at the peak is a polynomial of batch and length, whose constant part holds at least what is
        # always alive. No part grows with more than the square of the length, or that of a packed row.
        share = (batch * length) ** 2 if training.packing else batch * length**2
        always = costs.static.always - costs.static.buffers
        return always + math.floor(share * (self.planner_of(larger).lowest_peak - always))
