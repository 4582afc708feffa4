"""`hf_ckpt.verify`: compare loss, gradients and buffers of a step with and without a plan.

It also counts recomputations: equal gradients prove nothing if no block was recomputed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.described import describe
from hf_ckpt.attach.for_a_while import paused, without_cache
from hf_ckpt.engines.check import share_of_difference
from hf_ckpt.engines.step_state import StepState
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import base_model
from hf_ckpt.spec.actions import ACTIONS, KEEP
from hf_ckpt.spec.description import Description
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import SpecLike
from hf_ckpt.training.install import installed_temporarily
from hf_ckpt.units import counted

ROUNDING = 1e-5
"""Largest allowed difference of a gradient if sums are computed in another order: the head runs in chunks, or blocks
are compiled, or feed-forwards run in tiles. It is the norm of the difference over the norm of the gradient."""
ROUNDING_16 = 5e-2
"""The same in 16-bit types, where both gradients are equally far from the exact one."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`. It is truthy if the plan does what it promises.

    Gradients were compared. Buffers are bit-equal; gradients and the loss are, too, or differ by rounding if the head
    runs in chunks, feed-forwards run in tiles, or blocks are compiled. Every planned block was recomputed. The head ran
    in chunks, if the plan says so; with `auto`, it may also have run as a whole, because chunks would save nothing.
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
    head: str = ""
    """How the head ran, in words; empty if it was not asked to run in chunks."""

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        recomputed = f"{sum(self.recomputed.values())} recomputations of {counted(len(self.recomputed), 'block')}"
        plan = f"plan: {self.plan.summary()}; {recomputed}"
        head = [f"head: {self.head}"] if self.head else []
        return "\n".join([plan, f"loss: {self.loss}", f"gradients: {self.gradients}", *head, *self.problems])


def verify(
    model: nn.Module,
    batch: Mapping[str, Any],
    spec: SpecLike | Plan = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
) -> Verification:
    """Run forward and backward without and with a plan, from the same random state, and compare the gradients.

        result = hf_ckpt.verify(model, batch, {"policy": "full"})
        assert result, result  # prints which gradients differ, and by how much

    The model, its gradients, its plan with all counts and measurements, and the random state are restored at the end.

    Gradients must be bit-equal. They may differ by rounding if the head runs in chunks, feed-forwards run in tiles, or
    blocks are compiled. Compiled blocks are compared with the same blocks at share 1.

    Args:
        model: a model in train mode, plain or wrapped.
        batch: keyword arguments of the forward, on the model's device, with labels unless `loss_fn` is given. Without
            `use_cache`, neither run builds a key/value cache, except with packed rows, where a cache changes more than
            the last bits.
        spec: the plan to verify, in any form that `install` accepts. None verifies the installed plan, or `full` if
            there is none. While an installed `budget` or `auto` measures, that is the plan of its last step.
        loss_fn: returns a scalar loss from the model's outputs. None uses `outputs.loss`, or `outputs["loss"]` of a
            dict.

    Raises `HfCkptError` if the model is in eval mode, returns no loss or has nothing to train, or if the spec is a
    `budget` or `auto`, which has no plan before a run, and the errors of `install`.
    """
    if not model.training:
        raise HfCkptError("the model is in eval mode, where nothing is checkpointed; call model.train() first.")
    base = base_model(model)
    # With a cache, keys and values have another layout in memory, and products of them round in another way.
    builds_cache = "use_cache" not in batch and "use_cache" in compat.transformers.forward_parameters(base)
    if not builds_cache or compat.transformers.cache_hides_packing(base, batch):
        return _verified(model, batch, spec, loss_fn)
    if compat.transformers.takes(model, "use_cache"):
        return _verified(model, {**batch, "use_cache": False}, spec, loss_fn)
    with without_cache(base):  # within a module whose forward takes only what it names
        return _verified(model, batch, spec, loss_fn)


def _verified(
    model: nn.Module,
    batch: Mapping[str, Any],
    spec: SpecLike | Plan,
    loss_fn: Callable[[Any], torch.Tensor] | None,
) -> Verification:
    """Run both steps, restore what they changed, and compare them."""
    before = StepState(model, compat.process_state.all_devices())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}

    try:
        with installed_temporarily(model, spec) as record:
            if record.spec.is_planned:
                raise HfCkptError(
                    f"`{record.spec.policy}` has no plan before a run. Install it and train some steps; then verify "
                    "without a spec, or verify the plan `hf_ckpt.describe(model).plan`."
                )
            compiled = {name for name, action in record.plan.active().items() if ACTIONS[action.kind].compiles}
            # Kernels that inductor fuses round in another way than eager ones, so compiled blocks are compared with
            # compiled ones.
            with installed_temporarily(model, _with_share_1(record.plan)) if compiled else paused(model):
                plain = _step(model, batch, loss_fn)
            before.restore()
            planned = _step(model, batch, loss_fn)
            after = describe(model)
            may_be_whole = record.heads.is_whole_by_choice
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        before.restore()
    return _compared(plain, planned, after, compiled, may_be_whole)


@dataclasses.dataclass(frozen=True)
class _Step:
    """What a step computed."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def _step(model: nn.Module, batch: Mapping[str, Any], loss_fn: Callable[[Any], torch.Tensor] | None) -> _Step:
    """Run forward and backward."""
    model.zero_grad(set_to_none=True)
    outputs = model(**batch)
    loss_fn = loss_fn or _loss_of
    loss = loss_fn(outputs)
    if loss is None:
        raise HfCkptError("the model returned no loss; put `labels` into the batch or pass loss_fn=.")
    if not loss.requires_grad:
        raise HfCkptError("the loss needs no gradient: it depends on no trainable parameter.")
    loss.backward()
    return _Step(
        loss.detach(),
        {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None},
        {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)},
    )


def _loss_of(outputs: Any) -> Any:
    """The loss in a model's outputs, which may be a plain dict; None without one."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)


def _compared(plain: _Step, planned: _Step, after: Description, compiled: set[str], may_be_whole: bool) -> Verification:
    """Compare a step under a plan, whose description this is, with one without it.

    `may_be_whole` is whether a head that is planned to run in chunks ran as a whole for a good reason.
    """
    norms = [float(gradient.double().norm()) for gradient in plain.gradients.values()]
    # A gradient that is 0 except for rounding, such as that of a key bias, shares no digit with that of another run.
    gradients = _gaps(plain.gradients, planned.gradients, least=0.01 * max(norms, default=0.0))
    loss = _gaps({"": plain.loss}, {"": planned.loss})[""]
    buffers = _gaps(plain.buffers, planned.buffers)
    allowed = _allowed_gap(plain, after.plan)
    loss_in_words = f"differs by {loss:.2g} of its value" if loss else "equal"
    equal = f"{[*gradients.values()].count(0.0)} of {len(gradients)} bit-equal"
    if allowed:
        most = max(gradients.values(), default=0.0)
        equal += f", the others up to {most:.2g} of their norm (allowed {allowed:g})"
    problems = _not_carried_out(after, compiled)
    if _asks_for_chunks(after) and not after.chunked_heads and not may_be_whole:
        problems.append(f"the head did not run in chunks; last call: {after.head_ran or 'none'}")
    checks = [(f"gradient of {name}", gap, allowed) for name, gap in gradients.items()]
    checks.append(("loss", loss, allowed))
    checks += [(f"buffer {name}", gap, 0.0) for name, gap in buffers.items()]
    # Not `gap > most`, which is false for NaN. What differs first is enough: all behind it differ as well.
    wrong = [f"{name} differs by {gap:.2g} of its norm" for name, gap, most in checks if not gap <= most]
    problems += wrong[:1]
    if not gradients:
        problems.append("no parameter got a gradient: nothing was compared")
    return Verification(
        plan=after.plan,
        loss=loss_in_words,
        gradients=equal,
        recomputed=after.recomputed,
        problems=tuple(problems),
        head=after.head_ran if _asks_for_chunks(after) else "",
    )


def _asks_for_chunks(after: Description) -> bool:
    """Whether the head was asked to run in chunks."""
    return after.plan.head != "whole" or after.spec.get("head", "whole") != "whole"


def _allowed_gap(plain: _Step, plan: Plan) -> float:
    """How far gradients may differ under a plan: 0 unless it adds numbers in another order."""
    is_exact = all(ACTIONS[action.kind].is_exact for _, action in plan.actions)
    if is_exact and plan.head == "whole":
        return 0.0
    is_16_bit = any(gradient.dtype.itemsize < 4 for gradient in plain.gradients.values())
    return ROUNDING_16 if is_16_bit or compat.devices.autocast_is_on() else ROUNDING


def _gaps(plain: dict[str, torch.Tensor], planned: dict[str, torch.Tensor], least: float = 0.0) -> dict[str, float]:
    """Return the norm of the difference of each tensor, over its norm without the plan, or over `least` if larger.

    That is 0 if they are bit-equal, and infinite if one of them is missing.
    """
    gaps = dict.fromkeys(plain | planned, float("inf"))
    for name in plain.keys() & planned.keys():
        is_equal = torch.equal(plain[name], planned[name])
        gaps[name] = 0.0 if is_equal else share_of_difference(plain[name], planned[name], least)
    return gaps


def _not_carried_out(after: Description, compiled: set[str]) -> list[str]:
    """Return what the plan promises, and its last step did not do."""
    problems = []
    # Below the first trained parameter there is no backward; what a graph recomputes is not counted.
    hidden = {*after.frozen, *compiled.intersection(after.in_graphs)}
    missing = [name for name, count in after.recomputed.items() if not count and name not in hidden]
    if missing:
        graphs = " (torch.compile hides them in graphs: verify the model before you compile it)"
        problems.append(f"planned but not recomputed: {', '.join(missing)}{graphs if after.in_graphs else ''}")
    return problems


def _with_share_1(plan: Plan) -> Plan:
    """Return the plan with `keep` for plain blocks and share 1 for compiled blocks; the head runs as before."""
    actions = (
        (block, dataclasses.replace(action, share=1.0) if ACTIONS[action.kind].compiles else KEEP)
        for block, action in plan.actions
    )
    return dataclasses.replace(plan, actions=tuple(actions), prediction=None)
