"""`hf_ckpt.verify`: compare loss, gradients and buffers of a step with and without a plan, from the same seed.

It also counts recomputations: equal gradients prove nothing if no block was recomputed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import describe, paused
from hf_ckpt.attach.record import Installation
from hf_ckpt.engines.check import share_of_difference
from hf_ckpt.engines.state import StepState
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import base_model
from hf_ckpt.spec.actions import ACTIONS, KEEP
from hf_ckpt.spec.description import Description
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import SpecLike
from hf_ckpt.training.install import trial

ROUNDING, ROUNDING_16 = 1e-5, 5e-2
"""Largest allowed difference of a gradient, in float32 and in 16-bit types, if sums are computed in another order: the
head runs in chunks, or blocks are compiled. It is the norm of the difference over the norm of the gradient. In 16 bits,
both gradients are equally far from the exact one."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`. It is truthy if the plan does what it promises.

    Gradients were compared. Buffers are bit-equal; gradients and the loss are, too, or differ by rounding if the head
    runs in chunks, or blocks are compiled. Every planned block was recomputed. Tensors were moved to host memory, and
    the head ran in chunks, if the plan says so.
    """

    plan: Plan
    """The plan that was verified."""
    loss: str
    """How far the loss differs from that without the plan, in words."""
    gradients: str
    """How many gradients are bit-equal to those without the plan, and how far the others differ, in words."""
    recomputed: dict[str, int]
    """Planned block -> number of recomputations of it or of operations inside it."""
    problems: tuple[str, ...]
    """What is wrong, in words; empty if the plan does what it promises."""

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        return "\n".join(
            [
                f"plan: {self.plan.summary()}",
                f"loss: {self.loss}",
                f"gradients: {self.gradients}",
                f"{len(self.plan.active())} planned blocks: {sum(self.recomputed.values())} recomputations",
                *self.problems,
            ]
        )


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
            `use_cache`, neither run builds a key/value cache, except with packed rows, where a cache changes more than
            the last bits.
        spec: the plan to verify, in any form that `install` accepts. None verifies the installed plan, or `full` if
            there is none. While an installed `budget` or `auto` measures, that is the plan of its last step.
        loss_fn: returns a scalar loss from the model's outputs. None uses `outputs.loss`.
        seed: the seed of both runs.

    Raises `HfCkptError` if the model is in eval mode or returns no loss, or if the spec is a `budget` or `auto`, which
    has no plan before a run, and the errors of `install`.
    """
    if not model.training:
        raise HfCkptError("the model is in eval mode, where nothing is checkpointed; call model.train() first.")
    is_packed = compat.transformers.cache_hides_packing(base_model(model), batch)
    if "use_cache" not in batch and compat.transformers.wants_use_cache(base_model(model)) and not is_packed:
        batch = {**batch, "use_cache": False}
    before = StepState(model, compat.random_state.all_devices())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}

    def step() -> dict[str, torch.Tensor | None]:
        before.restore()
        torch.manual_seed(seed)
        model.zero_grad(set_to_none=True)
        outputs = model(**batch)
        loss = loss_fn(outputs) if loss_fn else getattr(outputs, "loss", None)
        if loss is None:
            raise HfCkptError("the model returned no loss; put `labels` into the batch or pass loss_fn=.")
        loss.backward()
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        return {
            **{f"gradient of {name}": parameter.grad for name, parameter in trained},
            "loss": loss.detach(),
            **{f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)},
        }

    try:
        with trial(model, spec) as tried:
            if tried.spec.is_planned:
                raise HfCkptError(
                    f"`{tried.spec.policy}` has no plan before a run. Install it and train some steps; then verify "
                    "without a spec, or verify the plan `hf_ckpt.describe(model).plan`."
                )
            compiled = {name for name, action in tried.plan.active().items() if ACTIONS[action.kind].compiles}
            with trial(model, _with_share_1(tried.plan)) if compiled else paused(model):
                plain = step()
            planned = step()
            after = describe(model)
            problems = _not_carried_out(tried, after, compiled, compat.distributed.devices_of_model(model))
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        before.restore()

    there = {name: one for name, one in plain.items() if one is not None and name.startswith("gradient of ")}
    # A gradient that is 0 except for rounding, such as that of a key bias, shares no digit with that of another run.
    least = 0.01 * max((float(gradient.double().norm()) for gradient in there.values()), default=0.0)
    gaps = {name: _gap(one, planned.get(name), least if name in there else 0.0) for name, one in plain.items()}
    allowed = 0.0
    if compiled or after.plan.head != "full":
        small = any(gradient.dtype.itemsize < 4 for gradient in there.values())
        allowed = ROUNDING_16 if small or compat.devices.autocast_is_on() else ROUNDING
    for name, gap in gaps.items():
        if not gap <= (0.0 if name.startswith("buffer ") else allowed):  # or NaN
            problems.append(f"{name} differs by {gap:.2g} of its norm")
            break
    if not there:
        problems.append("no parameter got a gradient: nothing was compared")
    equal = f"{sum(gaps[name] == 0 for name in there)} of {len(there)} bit-equal"
    largest = max((gaps[name] for name in there), default=0.0)
    return Verification(
        plan=after.plan,
        loss="equal" if gaps["loss"] == 0 else f"differs by {gaps['loss']:.2g} of its value",
        gradients=f"{equal}, the others up to {largest:.2g} of their norm (allowed {allowed:g})" if allowed else equal,
        recomputed=after.recomputed,
        problems=tuple(problems),
    )


def _not_carried_out(
    record: Installation, after: Description, compiled: set[str], devices: Iterable[torch.device]
) -> list[str]:
    """Return what the plan of a model on these devices promises, and its last step did not do."""
    problems = []
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
