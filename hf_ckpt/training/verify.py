"""`hf_ckpt.verify`: compare loss, gradients and buffers of a step with and without a plan, from the same seed.

It also counts recomputations: equal gradients prove nothing if no block was recomputed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import describe, paused
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.check import share_of_difference
from hf_ckpt.engines.state import StepState
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import base_model
from hf_ckpt.spec.actions import ACTIONS, KEEP
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import SpecLike
from hf_ckpt.training.install import trial

MOST_STEPS = 64
"""The most steps in which `budget` or `auto` may measure before there is a plan to verify."""
ROUNDING, ROUNDING_16 = 1e-5, 5e-2
"""Largest allowed difference of a gradient, in float32 and in 16-bit types, if sums are computed in another order: the
head runs in chunks, or blocks are compiled. It is the norm of the difference over the norm of the gradient. In 16 bits,
both gradients are equally far from the exact one."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`. It is truthy if the gradients are equal and the plan was carried out."""

    plan: Plan
    """The plan that was verified."""
    measuring: str | None
    """Why this is not the plan of the run yet, under an installed `budget` or `auto`; None if it is."""
    loss: float
    """The loss without the plan."""
    loss_difference: float
    """Absolute difference of the two losses; 0.0 if they are bit-equal."""
    parameters: int
    """Number of parameters that had a gradient without the plan, and were compared."""
    different: int
    """Number of parameters whose gradients are not bit-equal."""
    recomputed: dict[str, int]
    """Planned block -> number of recomputations of it or of operations inside it."""
    largest_difference: float
    """The largest difference of a gradient or the loss: the norm of the difference over the norm without the plan. The
    norm of a gradient counts as at least 1 % of the largest gradient's norm."""
    allowed_difference: float
    """The limit of `largest_difference`: 0 (bit-equal) unless the head runs in chunks, or blocks are compiled."""
    problems: tuple[str, ...]
    """What is wrong, in words; empty if the plan does what it promises."""

    @property
    def ok(self) -> bool:
        """Whether the plan does what it promises.

        Gradients were compared. Buffers are bit-equal; gradients and the loss are equal up to `allowed_difference`.
        Every planned block was recomputed. Tensors were moved to host memory, and the head ran in chunks, if the plan
        says so.
        """
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return {"ok": self.ok, **dataclasses.asdict(self), "plan": self.plan.to_dict()}

    def __str__(self) -> str:
        early = f"; not yet the plan of the run: {self.measuring}" if self.measuring else ""
        loss = f"differs by {self.loss_difference:.3g}" if self.loss_difference else "equal"
        rounded = (
            f", the others up to {self.largest_difference:.2g} of their norm (allowed {self.allowed_difference:g})"
        )
        return "\n".join(
            [
                f"plan: {self.plan.summary()}{early}",
                f"loss {self.loss:.6f}, {loss}",
                f"{self.parameters - self.different} of {self.parameters} gradients bit-equal"
                + (rounded if self.allowed_difference else ""),
                f"{sum(self.recomputed.values())} recomputations of {len(self.plan.active())} planned blocks",
                *self.problems,
            ]
        )


class _Step(NamedTuple):
    """The results of a step."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    """Name of a trainable parameter -> its gradient, or None if it has none."""
    buffers: dict[str, torch.Tensor]


def verify(
    model: nn.Module,
    batch: Mapping[str, Any],
    spec: SpecLike | Plan = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    seed: int = 0,
) -> Verification:
    """Run forward and backward without and with a plan, from the same seed, and compare the gradients.

        result = hf_ckpt.verify(model, batch, {"policy": "full"})
        assert result, result  # prints which gradients differ, and by how much

    The model, its gradients, its plan with all counts and measurements, and the random state are restored at the end.

    Gradients must be bit-equal. They may differ by rounding if the head runs in chunks, or blocks are compiled.
    Compiled blocks are compared with the same blocks at share 1.

    Args:
        model: a model in train mode, plain or wrapped.
        batch: keyword arguments of the forward, on the model's device, with labels unless `loss_fn` is given. Without
            `use_cache`, neither run builds a key/value cache.
        spec: the plan to verify, in any form that `install` accepts. None verifies the installed plan, or `full` if
            there is none; while an installed `budget` or `auto` still measures, `measuring` of the result says so.
            A spec with `budget` or `auto` first measures steps of this batch, until there is a plan.
        loss_fn: returns a scalar loss from the model's outputs. None uses `outputs.loss`.
        seed: the seed of both runs.

    Raises `HfCkptError` if the model is in eval mode or returns no loss, or if `budget` or `auto` has no plan after
    `MOST_STEPS` steps, and the errors of `install`.
    """
    if not model.training:
        raise HfCkptError("the model is in eval mode, where nothing is checkpointed; call model.train() first.")
    if "use_cache" not in batch and compat.transformers.wants_use_cache(base_model(model)):
        batch = {**batch, "use_cache": False}
    record = installation(model)
    measuring = record.measuring if record is not None and spec is None else None
    before = StepState(model, compat.random_state.all_devices())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}

    def step() -> _Step:
        before.restore()
        torch.manual_seed(seed)
        model.zero_grad(set_to_none=True)
        outputs = model(**batch)
        loss = loss_fn(outputs) if loss_fn else getattr(outputs, "loss", None)
        if loss is None:
            raise HfCkptError("the model returned no loss; put `labels` into the batch or pass loss_fn=.")
        loss.backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        return _Step(loss.detach(), found, {name: buffer.clone() for name, buffer in model.named_buffers()})

    try:
        with trial(model, spec), contextlib.ExitStack() as stack:
            tried = installation(model)
            assert tried is not None
            for _ in range(MOST_STEPS):
                if tried.measuring is None:
                    break
                step()
            if tried.measuring is not None:
                raise HfCkptError(
                    f"`{tried.spec.policy}` has no plan after {MOST_STEPS} steps of this batch ({tried.measuring}); "
                    "verify a plan by passing it as `spec`, for example `hf_ckpt.describe(model).plan` of a run."
                )
            if tried.spec.is_planned:
                stack.enter_context(trial(model))  # exactly this plan, and no more measuring
            with paused(model):
                plain = step()
            planned = step()
            after = describe(model)
            problems = _not_carried_out(model)
            compiled = [name for name, action in after.plan.active().items() if ACTIONS[action.kind].compiles]
            if compiled:
                with trial(model, _with_share_1(after.plan)):
                    plain = step()
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        before.restore()

    there = [gradient for gradient in plain.gradients.values() if gradient is not None]
    # A gradient that is 0 except for rounding, such as that of a key bias, shares no digit with that of another run.
    least = 0.01 * max((float(gradient.double().norm()) for gradient in there), default=0.0)
    gaps = {f"gradient of {name}": _gap(one, planned.gradients[name], least) for name, one in plain.gradients.items()}
    gaps = {name: gap for name, gap in gaps.items() if gap != 0}
    different, loss_gap = len(gaps), _gap(plain.loss, planned.loss)
    if loss_gap != 0:
        gaps["loss"] = loss_gap
    allowed = 0.0
    if compiled or after.plan.head != "full":
        small = any(gradient.dtype.itemsize < 4 for gradient in there)
        allowed = ROUNDING_16 if small or compat.devices.autocast_is_on() else ROUNDING
    beyond = [f"{name} differs by {gap:.2g} of its norm" for name, gap in gaps.items() if not gap <= allowed]  # or NaN
    problems += beyond[:1]
    if not there:
        problems.append("no parameter got a gradient: nothing was compared")
    buffers = [name for name, buffer in plain.buffers.items() if _gap(buffer, planned.buffers[name]) != 0]
    if buffers:
        problems.append(f"buffers that differ: {', '.join(buffers)}")
    return Verification(
        plan=after.plan,
        measuring=measuring,
        loss=float(plain.loss),
        loss_difference=abs(float(plain.loss) - float(planned.loss)) if "loss" in gaps else 0.0,
        parameters=len(there),
        different=different,
        recomputed=after.recomputed,
        largest_difference=max(gaps.values(), default=0.0),
        allowed_difference=allowed,
        problems=tuple(problems),
    )


def _not_carried_out(model: nn.Module) -> list[str]:
    """Return what the plan of a model promises, and its last step did not do."""
    after, record = describe(model), installation(model)
    assert record is not None
    problems = []
    compiled = {name for name, action in after.plan.active().items() if ACTIONS[action.kind].compiles}
    hidden = {*after.frozen, *compiled.intersection(after.in_graphs)}
    missing = [name for name, count in after.recomputed.items() if not count and name not in hidden]
    if missing:
        graphs = " (torch.compile hides it in graphs: verify the model before it is compiled)"
        problems.append(f"planned but not recomputed: {', '.join(missing)}{graphs if after.in_graphs else ''}")
    if after.plan.head != "full" and not after.chunked_heads:
        problems.append(f"the head did not run in chunks; last call: {after.head_ran or 'none'}")
    # The last block of a stack moves nothing, nor do blocks below the first trainable parameter.
    moving = [name for name, region in record.regions.items() if getattr(region, "mover", None) is not None]
    moving = [name for name in moving if name not in after.frozen]
    devices = compat.distributed.devices_of_model(model)
    if moving and not after.moved and not all(compat.devices.shares_host_memory(device.type) for device in devices):
        problems.append(
            f"planned, but moved nothing to host memory: {', '.join(moving)} (the device has no streams, "
            "`host_budget` is too small, or all tensors are small)"
        )
    return problems


def _with_share_1(plan: Plan) -> Plan:
    """Return the plan with `keep` for plain blocks and share 1 for compiled blocks; the head runs as before."""
    actions = (
        (block, dataclasses.replace(action, share=1.0) if ACTIONS[action.kind].compiles else KEEP)
        for block, action in plan.actions
    )
    return dataclasses.replace(plan, actions=tuple(actions), prediction=None)


def _gap(one: torch.Tensor | None, other: torch.Tensor | None, least: float = 0.0) -> float:
    """Return the norm of the difference over the norm of `one`, or over `least` if larger; 0 if they are bit-equal."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return 0.0 if torch.equal(one, other) else share_of_difference(one, other, least)
