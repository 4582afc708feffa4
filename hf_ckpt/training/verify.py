"""`hf_ckpt.verify`: compare the loss, every gradient and every buffer with and without a plan, from the same seed.

It also counts recomputations, since equal gradients prove nothing where the plan was not carried out.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import describe, paused
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import base_model
from hf_ckpt.planner.install import trial
from hf_ckpt.spec.actions import ACTIONS, KEEP
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import SpecLike

Gradients = dict[str, torch.Tensor | None]
"""Name of a trainable parameter -> its gradient, or None where it has none."""
ROUNDING, ROUNDING_16 = 1e-5, 5e-2
"""What a gradient may differ by where head or feed-forward run in chunks, or because of a cache, in float32 and in
16-bit types.

It is the norm of the difference over the norm of the gradient. The same sums are taken in another order, and a 16-bit
gradient is as far from the exact one as that of the plain head is."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How the gradient of one parameter differs between the run without the plan and the run with it."""

    parameter: str
    """Name of the parameter."""
    max_abs: float | None
    """Largest absolute difference of an element; None if one of the two runs had no gradient at all."""
    max_rel: float | None
    """`max_abs` over the largest absolute value in the gradient without the plan."""

    def __str__(self) -> str:
        if self.max_abs is None:
            return f"{self.parameter} has a gradient in one run only"
        return f"{self.parameter} differs by {self.max_abs:.3g} ({self.max_rel:.3g} of its largest value)"


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found. As a condition it is true if everything is equal and the plan was really carried out."""

    plan: Plan
    """The plan that was verified."""
    loss: float
    """The loss without the plan."""
    loss_difference: float
    """Absolute difference of the two losses; 0.0 if they are bit-equal."""
    parameters: int
    """How many parameters had a gradient without the plan, and were compared."""
    different: int
    """How many parameters have gradients that are not bit-equal."""
    first_difference: Difference | None
    """The first of these parameters, in the model's order; None if there is none."""
    recomputed: dict[str, int]
    """Planned block -> how often it, or operations inside it, were recomputed."""
    not_recomputed: tuple[str, ...]
    """Planned blocks above the first trainable parameter that were not recomputed."""
    largest_difference: float = 0.0
    """The largest difference of a gradient or the loss: the norm of the difference over the norm without the plan, or
    over 1 % of the largest gradient's norm where that is more."""
    allowed_difference: float = 0.0
    """What `largest_difference` may be: 0 (bit-equal) unless head or feed-forward run in chunks, or blocks are
    compiled."""
    chunked_heads: int = 0
    """Calls of the head that ran in chunks."""
    chunked_mlps: int = 0
    """Calls of feed-forwards that ran in chunks, those in recomputations included."""
    draws_with_chunks: bool = False
    """Whether the step without the plan ran its feed-forwards in chunks, too, because the model draws random numbers:
    each chunk draws its own, so that the draws are others than those for all tokens at once."""
    in_graphs: tuple[str, ...] = ()
    """Planned blocks that were called from a graph of torch.compile, where no recomputation is counted."""
    different_buffers: tuple[str, ...] = ()
    """Buffers, such as running statistics, that are not bit-equal after the two steps."""
    compiled: tuple[str, ...] = ()
    """Planned blocks that are compiled. The step is compared with one of the same blocks, compiled, at share 1;
    inductor may fuse each share in another way, so that gradients may differ by rounding."""
    from_float64: tuple[float, float] | None = None
    """Where blocks are compiled: how far all gradients of the model in eager mode, and those with the plan, are from
    the model's in float64 (norm over norm). None where none are, or where the model draws random numbers."""
    cache_difference: float = 0.0
    """What a key/value cache changes without any plan: the largest difference, measured as `largest_difference`. It is
    above 0 where the step with the plan, in which no cache is built, equals the step without plan and cache only."""

    @property
    def ok(self) -> bool:
        """Whether the plan holds what it promises.

        That is, gradients were compared, they, the loss and the buffers are equal (with head or feed-forward in chunks:
        up to rounding), every planned block was recomputed, and head and feed-forward ran in chunks if the plan says
        so.
        """
        if self.not_recomputed or not self.parameters or self.different_buffers:
            return False
        if not (_in_chunks(self.plan) or self.compiled):
            return not (self.loss_difference or self.different)
        headed = self.plan.head == "full" or self.chunked_heads > 0
        tiled = self.plan.mlp == "full" or self.chunked_mlps > 0
        return headed and tiled and self.largest_difference <= self.allowed_difference

    def __bool__(self) -> bool:
        return self.ok

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return {"ok": self.ok, **dataclasses.asdict(self), "plan": self.plan.to_dict()}

    def __str__(self) -> str:
        lines = [
            f"loss {self.loss:.6f}, "
            + ("equal" if not self.loss_difference else f"differs by {self.loss_difference:.3g}"),
            f"{self.parameters - self.different} of {self.parameters} gradients bit-equal"
            + (f"; first difference: {self.first_difference}" if self.first_difference else ""),
            *([f"buffers that differ: {', '.join(self.different_buffers)}"] if self.different_buffers else []),
            f"{sum(self.recomputed.values())} recomputations of {len(self.plan.active())} planned blocks",
        ]
        if self.plan.head != "full":
            lines.append(
                f"head: {self.chunked_heads} calls in chunks; largest difference {self.largest_difference:.2g} of a "
                f"gradient's norm, allowed {self.allowed_difference:g}"
            )
        if self.plan.mlp != "full":
            lines.append(
                f"feed-forwards: {self.chunked_mlps} calls in chunks; largest difference {self.largest_difference:.2g} "
                f"of a gradient's norm, allowed {self.allowed_difference:g}"
            )
        if self.draws_with_chunks:
            lines.append("the model draws random numbers: compared with its feed-forwards in chunks and no other plan")
        if self.cache_difference:
            lines.append(
                f"a key/value cache alone changes gradients by {self.cache_difference:.2g} of their norm here; "
                "compared without a cache"
            )
        if self.compiled:
            lines.append(
                f"{len(self.compiled)} blocks compiled, compared with the same blocks at share 1; largest difference "
                f"{self.largest_difference:.2g} of a gradient's norm, allowed {self.allowed_difference:g}"
            )
        if self.from_float64 is not None:
            eager, compiled = self.from_float64
            lines.append(f"from gradients in float64: {eager:.2g} in eager mode, {compiled:.2g} with the plan")
        if self.not_recomputed:
            lines.append(f"planned but not recomputed: {', '.join(self.not_recomputed)}")
        if set(self.in_graphs) - set(self.compiled):
            lines.append(
                "torch.compile hides what is recomputed in its graphs: verify the model before it is compiled, or in "
                "`with torch.compiler.set_stance('force_eager')`"
            )
        if not self.parameters:
            lines.append("no parameter got a gradient: nothing was compared")
        return "\n".join(lines)


def verify(
    model: nn.Module,
    batch: Mapping[str, Any],
    spec: SpecLike | Plan = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    seed: int = 0,
) -> Verification:
    """Run one forward and backward without the plan and one with it, from the same seed, and compare their gradients.

        result = hf_ckpt.verify(model, batch, {"policy": "full"})
        assert result, result

    Args:
        model: a model in train mode. Its gradients, the random state, its plan and its installation are the same
            afterwards as before.
        batch: keyword arguments of the model's forward, on its device; with labels, unless `loss_fn` is given.
        spec: what to verify, in any form that `install` takes. None is the plan that is installed, or else `full`.
        loss_fn: returns a scalar loss from the model's outputs; by default their `loss`.
        seed: seed of both runs.

    The batch is run as it is given, so that the model builds its key/value cache by default. With a plan it builds
    none, and kernels may round otherwise then. If so, the step with the plan is compared with one that has neither plan
    nor cache, and `cache_difference` says what the cache alone has changed.
    Raises `HfCkptError` when the model is in eval mode or returns no loss, and whatever `install` raises.
    """
    if not model.training:
        raise HfCkptError("the model is in eval mode, where nothing is checkpointed; call model.train() first.")
    with _all_kept(model) as buffers, trial(model, spec):
        step = functools.partial(_run, model, loss_fn, seed, buffers)
        with paused(model):
            plain = cached = step(batch)
        before = describe(model)
        planned = step(batch)
        after = describe(model)
        if _unequal(plain, planned) and "use_cache" not in batch and compat.wants_use_cache(base_model(model)):
            with paused(model):
                uncached = step({**batch, "use_cache": False})
            if _largest(cached, uncached) <= _rounding(cached.gradients.values()):
                plain = uncached
        draws = after.plan.mlp != "full" and _draws(model, loss_fn, seed, buffers, batch)
        if draws:
            with trial(model, _keeping(after.plan)):
                plain = cached = step(batch)
        compiled = tuple(name for name, action in after.plan.active().items() if ACTIONS[action.kind].compiles)
        distances = None
        if compiled:
            distances = _distances(model, loss_fn, seed, buffers, batch, plain, planned)
            with trial(model, _keeping(after.plan)):
                plain = cached = step(batch)
    # `budget` makes its plan in the second run, and blocks may have had no function before.
    recomputed = {name: count - before.recomputed.get(name, 0) for name, count in after.recomputed.items()}
    unequal = _unequal(plain, planned)
    return Verification(
        plan=after.plan,
        loss=float(plain.loss),
        loss_difference=0.0 if torch.equal(plain.loss, planned.loss) else abs(float(plain.loss) - float(planned.loss)),
        parameters=sum(gradient is not None for gradient in plain.gradients.values()),
        different=len(unequal),
        first_difference=_difference(unequal[0], plain.gradients, planned.gradients) if unequal else None,
        recomputed=recomputed,
        not_recomputed=tuple(
            name
            for name, count in recomputed.items()
            if not count and name not in after.frozen and not (name in compiled and name in after.in_graphs)
        ),
        largest_difference=_largest(plain, planned),
        allowed_difference=_rounding(plain.gradients.values()) if _in_chunks(after.plan) or compiled else 0.0,
        chunked_heads=after.chunked_heads - before.chunked_heads,
        chunked_mlps=after.chunked_mlps - before.chunked_mlps,
        draws_with_chunks=draws,
        in_graphs=after.in_graphs,
        different_buffers=tuple(
            name for name, buffer in plain.buffers.items() if not _equal(buffer, planned.buffers.get(name))
        ),
        compiled=compiled,
        from_float64=distances,
        cache_difference=_largest(cached, plain),
    )


def _in_chunks(plan: Plan) -> bool:
    """Whether head or feed-forward run in chunks, so that gradients agree up to rounding."""
    return plan.head != "full" or plan.mlp != "full"


def _keeping(plan: Plan) -> Plan:
    """Return a plan whose blocks keep everything, or where they are compiled, what makes the step fastest.

    Head and feed-forwards run in chunks as before.
    """
    actions = (
        (block, dataclasses.replace(action, share=1.0) if ACTIONS[action.kind].compiles else KEEP)
        for block, action in plan.actions
    )
    return dataclasses.replace(plan, actions=tuple(actions), prediction=None)


class _Step(NamedTuple):
    """What a step leaves behind."""

    loss: torch.Tensor
    gradients: Gradients
    buffers: dict[str, torch.Tensor]


def _distances(
    model: nn.Module,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    seed: int,
    buffers: Mapping[str, torch.Tensor],
    batch: Mapping[str, Any],
    *steps: _Step,
) -> tuple[float, float] | None:
    """Return how far the gradients of two steps are from those of the model in float64 without a plan.

    None where the model draws random numbers, which are others in float64.
    """
    if _draws(model, loss_fn, seed, buffers, batch):
        return None
    with paused(model):
        exact_model = copy.deepcopy(model).double()
    with paused(exact_model):
        inputs = {name: _in_float64(value) for name, value in batch.items()}
        wide = {name: _in_float64(buffer) for name, buffer in buffers.items()}
        exact = _run(exact_model, loss_fn, seed, wide, inputs).gradients
    names = [name for name, gradient in exact.items() if gradient is not None]
    size = sum(float(found.square().sum()) for name in names if (found := exact[name]) is not None) ** 0.5
    far = []
    for step in steps:
        pairs = ((exact[name], step.gradients[name]) for name in names)
        gaps = (float((one - other).square().sum()) for one, other in pairs if one is not None and other is not None)
        far.append(sum(gaps) ** 0.5 / size if size else 0.0)
    return far[0], far[1]


def _draws(
    model: nn.Module,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    seed: int,
    buffers: Mapping[str, torch.Tensor],
    batch: Mapping[str, Any],
) -> bool:
    """Whether a model draws random numbers, so that its loss depends on the seed."""
    with paused(model):
        first, second = (_run(model, loss_fn, seed + more, buffers, batch) for more in (0, 1))
    return not torch.equal(first.loss, second.loss)


def _in_float64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _unequal(one: _Step, other: _Step) -> list[str]:
    """Return the names of the gradients that are not bit-equal."""
    return [name for name, gradient in one.gradients.items() if not _equal(gradient, other.gradients[name])]


def _largest(one: _Step, other: _Step) -> float:
    """Return the largest difference of the loss or a gradient, as `_gap` measures it."""
    # A gradient that is 0 but for rounding (as that of a bias of keys) shares no digit with that of another run.
    norms = [float(found.double().norm()) for found in one.gradients.values() if found is not None]
    least = 0.01 * max(norms, default=0.0)
    gaps = [_gap(one.gradients[name], other.gradients[name], least) for name in _unequal(one, other)]
    return max([_gap(one.loss, other.loss), *gaps])


def _gap(one: torch.Tensor | None, other: torch.Tensor | None, least: float = 0.0) -> float:
    """Return the norm of the difference over the norm of `one`, or over `least` where that norm is smaller."""
    if one is None or other is None:
        return float("inf")
    gap, norm = float((one.double() - other.double()).norm()), max(least, float(one.double().norm()))
    return gap / norm if norm else (float("inf") if gap else 0.0)


def _rounding(gradients: Iterable[torch.Tensor | None]) -> float:
    """Return what gradients of these types may differ by where they are only rounded otherwise."""
    small = any(gradient.dtype.itemsize < 4 for gradient in gradients if gradient is not None)
    return ROUNDING_16 if small or compat.autocast_is_on() else ROUNDING


def _run(
    model: nn.Module,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    seed: int,
    before: Mapping[str, torch.Tensor],
    inputs: Mapping[str, Any],
) -> _Step:
    """Run a forward and backward, with the buffers as they were `before`.

    Raises `HfCkptError` where there is no loss.
    """
    _put_back(model, before)
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    outputs = model(**inputs)
    loss = loss_fn(outputs) if loss_fn else getattr(outputs, "loss", None)
    if loss is None:
        raise HfCkptError("the model returned no loss; put `labels` into the batch or pass loss_fn=.")
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return _Step(loss.detach(), gradients, {name: buffer.clone() for name, buffer in model.named_buffers()})


def _put_back(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Give the buffers of a model the values that they had before."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in before and not _equal(buffer, before[name]):
                buffer.copy_(before[name])


@contextlib.contextmanager
def _all_kept(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Give a model its gradients and buffers back, and the process its random state, after the `with` block.

    Yields copies of the buffers.
    """
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with compat.forked_random_state():
            yield buffers
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = kept[name]
        _put_back(model, buffers)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _difference(name: str, gradients: Gradients, planned: Gradients) -> Difference:
    """Measure how a parameter's gradient with the plan differs from that without it."""
    one, other = gradients[name], planned[name]
    if one is None or other is None:
        return Difference(name, None, None)
    gap = (one.double() - other.double()).abs().max().item()
    largest = one.double().abs().max().item()
    return Difference(name, gap, gap / largest if largest else float("inf"))
