"""`hf_ckpt.verify`: compare loss, gradients and buffers of a step with and without a plan, from the same seed.

It also counts recomputations: equal gradients prove nothing if no block was recomputed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import describe, paused
from hf_ckpt.attach.record import Installation, installation
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
"""Largest allowed difference of a gradient, in float32 and in 16-bit types, if sums are computed in another order: head
or feed-forwards run in chunks, or blocks are compiled. It is the norm of the difference over the norm of the gradient.
In 16 bits, both gradients are equally far from the exact one."""


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
    first_difference: str | None
    """The first of these parameters, in the model's order, and its difference; None if there is none."""
    recomputed: dict[str, int]
    """Planned block -> number of recomputations of it or of operations inside it."""
    not_recomputed: tuple[str, ...]
    """Planned blocks above the first trainable parameter that were not recomputed."""
    largest_difference: float
    """The largest difference of a gradient or the loss: the norm of the difference over the norm without the plan. The
    norm of a gradient counts as at least 1 % of the largest gradient's norm."""
    allowed_difference: float
    """The limit of `largest_difference`: 0 (bit-equal) unless the head runs in chunks, or blocks are compiled."""
    chunked_heads: int
    """Calls of the head that ran in chunks."""
    head_ran: str
    """How the last call of a head in chunks ran, as in `Description`."""
    in_graphs: tuple[str, ...]
    """Planned blocks inside a graph of torch.compile, where recomputations are not counted."""
    different_buffers: tuple[str, ...]
    """Buffers, such as running statistics, that are not bit-equal after the two steps."""
    not_moved: tuple[str, ...]
    """Planned blocks that should have moved tensors to host memory, if none of them did. Empty on a device that uses
    the host's memory itself."""
    compiled: tuple[str, ...]
    """Planned blocks that are compiled. The step is compared with a step of the same compiled blocks at share 1.
    Inductor may fuse each share differently, so gradients may differ by rounding."""

    @property
    def ok(self) -> bool:
        """Whether the plan does what it promises.

        Gradients were compared. Buffers are bit-equal; gradients and the loss are equal up to `allowed_difference`.
        Every planned block was recomputed. Tensors were moved to host memory, and the head ran in chunks, if the plan
        says so.
        """
        if self.not_recomputed or self.not_moved or not self.parameters or self.different_buffers:
            return False
        if not self.allowed_difference:
            return not (self.loss_difference or self.different)
        headed = self.plan.head == "full" or self.chunked_heads > 0
        return headed and self.largest_difference <= self.allowed_difference

    def __bool__(self) -> bool:
        return self.ok

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return {"ok": self.ok, **dataclasses.asdict(self), "plan": self.plan.to_dict()}

    def __str__(self) -> str:
        plan, equal = self.plan, self.parameters - self.different
        early = f"; not yet the plan of the run: {self.measuring}" if self.measuring else ""
        loss = f"differs by {self.loss_difference:.3g}" if self.loss_difference else "equal"
        first = f"; first difference: {self.first_difference}" if self.first_difference else ""
        lines: list[tuple[Any, str]] = [
            (True, f"plan: {plan.summary()}{early}"),
            (True, f"loss {self.loss:.6f}, {loss}"),
            (True, f"{equal} of {self.parameters} gradients bit-equal{first}"),
            (True, f"{sum(self.recomputed.values())} recomputations of {len(plan.active())} planned blocks"),
            (self.different_buffers, f"buffers that differ: {', '.join(self.different_buffers)}"),
            (
                plan.head != "full",
                f"head: {self.chunked_heads} calls in chunks; last call: {self.head_ran or 'none'}",
            ),
            (self.compiled, f"{len(self.compiled)} blocks compiled, compared with the same blocks at share 1"),
            (
                self.allowed_difference,
                f"largest difference {self.largest_difference:.2g} of a gradient's norm, allowed "
                f"{self.allowed_difference:g}",
            ),
            (self.not_recomputed, f"planned but not recomputed: {', '.join(self.not_recomputed)}"),
            (
                self.not_moved,
                f"planned, but moved nothing to host memory: {', '.join(self.not_moved)} (the device has no streams, "
                "`host_budget` is too small, or all tensors are small)",
            ),
            (
                set(self.in_graphs) - set(self.compiled),
                "torch.compile hides what is recomputed in its graphs: verify the model before it is compiled, or in "
                "`with torch.compiler.set_stance('force_eager')`",
            ),
            (not self.parameters, "no parameter got a gradient: nothing was compared"),
        ]
        return "\n".join(line for is_shown, line in lines if is_shown)


class _Step(NamedTuple):
    """The results of a step."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    """Name of a trainable parameter -> its gradient, or None if it has none."""
    buffers: dict[str, torch.Tensor]
    draws: bool
    """Whether the forward drew random numbers."""


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

    Gradients must be bit-equal. They may differ by rounding if head or feed-forwards run in chunks, or blocks are
    compiled. In two cases, the plain model is not the reference. Compiled blocks are compared with the same blocks at
    share 1. If the model has active dropout, feed-forwards in chunks are compared with the same chunks, because each
    chunk draws its own mask.

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
    with _kept(model) as before, trial(model, spec), contextlib.ExitStack() as stack:
        step = functools.partial(_run, model, batch, loss_fn, seed, before)
        tried = installation(model)
        assert tried is not None
        if tried.spec.is_planned:
            _measure(tried, step)
            stack.enter_context(trial(model))  # exactly this plan, and no more measuring
        with paused(model):
            plain = step()
        planned = step()
        after = describe(model)
        plan = after.plan
        own_memory = not all(
            compat.devices.shares_host_memory(device.type) for device in compat.distributed.devices_of_model(model)
        )
        # The last block of a stack moves nothing, nor do blocks below the first trainable parameter.
        now = installation(model)
        assert now is not None
        moving = [name for name, region in now.regions.items() if getattr(region, "mover", None) is not None]
        compiled = tuple(name for name, action in plan.active().items() if ACTIONS[action.kind].compiles)
        if compiled:
            with trial(model, _keeping(plan)):
                plain = step()
    rounded = plan.head != "full" or bool(compiled)
    small = any(gradient.dtype.itemsize < 4 for gradient in plain.gradients.values() if gradient is not None)
    hidden = {*after.frozen, *(set(compiled) & set(after.in_graphs))}
    # A gradient that is 0 except for rounding, such as that of a key bias, shares no digit with that of another run.
    least = 0.01 * max((float(g.double().norm()) for g in plain.gradients.values() if g is not None), default=0.0)
    gaps = {
        name: gap
        for name, gradient in plain.gradients.items()
        if (gap := _gap(gradient, planned.gradients[name], least)) is not None
    }
    loss_gap = _gap(plain.loss, planned.loss) or 0.0
    return Verification(
        plan=plan,
        measuring=measuring,
        loss=float(plain.loss),
        loss_difference=abs(float(plain.loss) - float(planned.loss)) if loss_gap else 0.0,
        parameters=sum(gradient is not None for gradient in plain.gradients.values()),
        different=len(gaps),
        first_difference=next((f"{name} by {gap:.2g} of its norm" for name, gap in gaps.items()), None),
        recomputed=after.recomputed,
        not_recomputed=tuple(name for name, count in after.recomputed.items() if not count and name not in hidden),
        largest_difference=max([loss_gap, *gaps.values()]),
        allowed_difference=(ROUNDING_16 if small or compat.devices.autocast_is_on() else ROUNDING) if rounded else 0.0,
        chunked_heads=after.chunked_heads,
        head_ran=after.head_ran,
        in_graphs=after.in_graphs,
        different_buffers=tuple(
            name for name, buffer in plain.buffers.items() if _gap(buffer, planned.buffers[name]) is not None
        ),
        not_moved=tuple(name for name in moving if name not in after.frozen) if own_memory and not after.moved else (),
        compiled=compiled,
    )


def _measure(record: Installation, step: Callable[[], _Step]) -> None:
    """Run steps until `budget` or `auto` has a plan. Raises `HfCkptError` after `MOST_STEPS` of them."""
    for _ in range(MOST_STEPS):
        if record.measuring is None:
            return
        step()
    if record.measuring is not None:
        raise HfCkptError(
            f"`{record.spec.policy}` has no plan after {MOST_STEPS} steps of this batch ({record.measuring}); verify a "
            "plan by passing it as `spec`, for example `hf_ckpt.describe(model).plan` of a run."
        )


def _keeping(plan: Plan) -> Plan:
    """Return the plan with `keep` for plain blocks and share 1 for compiled blocks.

    Head and feed-forwards run in chunks as before.
    """
    actions = (
        (block, dataclasses.replace(action, share=1.0) if ACTIONS[action.kind].compiles else KEEP)
        for block, action in plan.actions
    )
    return dataclasses.replace(plan, actions=tuple(actions), prediction=None)


def _gap(one: torch.Tensor | None, other: torch.Tensor | None, least: float = 0.0) -> float | None:
    """Return the norm of the difference over the norm of `one`, or over `least` if larger; None if they are equal."""
    if one is None or other is None:
        return None if one is other else float("inf")
    return None if torch.equal(one, other) else share_of_difference(one, other, least)


def _run(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[[Any], torch.Tensor] | None,
    seed: int,
    before: StepState,
) -> _Step:
    """Run a forward and backward from the buffers in `before`. Raises `HfCkptError` if there is no loss."""
    before.restore()
    torch.manual_seed(seed)
    random = compat.random_state.RandomState(compat.random_state.all_devices())
    model.zero_grad(set_to_none=True)
    outputs = model(**batch)
    loss = loss_fn(outputs) if loss_fn else getattr(outputs, "loss", None)
    if loss is None:
        raise HfCkptError("the model returned no loss; put `labels` into the batch or pass loss_fn=.")
    draws = random.of_torch_has_moved()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return _Step(loss.detach(), gradients, {name: buffer.clone() for name, buffer in model.named_buffers()}, draws)


@contextlib.contextmanager
def _kept(model: nn.Module) -> Iterator[StepState]:
    """Restore a model's gradients and buffers, and the random state, after the `with` block."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    before = StepState(model, compat.random_state.all_devices())
    try:
        yield before
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        before.restore()
