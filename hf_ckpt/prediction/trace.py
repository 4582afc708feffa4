"""Traces on fake tensors what every action costs each kind of block, in bytes and time.

For each action, a short model runs forward and backward with all of its blocks under this action. `tracer` records each
block of this run by itself, and `timeline` combines the records for any depth and any mixture of actions: the memory
that a block needs does not depend on the action of the block before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import trial
from hf_ckpt.costs.costs import Costs, Phase, StackCosts, Static
from hf_ckpt.engines.tiles import standing_for
from hf_ckpt.errors import HfCkptError, InPlaceError
from hf_ckpt.forecast.devices import Device
from hf_ckpt.models.blocks import FoundBlocks, find_blocks
from hf_ckpt.prediction.optimizers import OptimizerBytes, optimizer_bytes
from hf_ckpt.prediction.runs import Row, Run, short_row, stack_costs
from hf_ckpt.prediction.skeleton import Skeleton, own_forward
from hf_ckpt.prediction.tracer import Answers, Tracer
from hf_ckpt.spec.actions import KEEP, Action, candidates
from hf_ckpt.spec.plan import Plan


class CannotTraceError(HfCkptError):
    """The model does not run on fake tensors."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One micro-step, and what a prediction must know about the step around it."""

    batch: Mapping[str, Any]
    """Keyword arguments of the model's forward. Only the shapes and types of tensors matter."""
    padded: bool = False
    """Whether an attention mask masks anything."""
    autocast: torch.dtype | None = None
    """The type that autocast computes in; None without autocast."""
    accumulation: int = 1
    """Micro-steps of one optimizer step."""
    optimizer: str = "adamw"
    """Its name, one of `optimizer_names.NAMES`."""
    optimizer_bytes: OptimizerBytes | None = None
    """What the optimizer needs, if known; otherwise it follows from the name."""
    loss: Callable[[Any], torch.Tensor] | None = None
    """Computes the loss from the outputs of a model that does not compute its own."""
    forward: types.MethodType | None = None
    """A forward that replaces the class's own on the model; None if the class's own runs."""
    reference: str | None = None
    """How the loss gets its reference: `adapters-off` and `model` run a pass without gradients after the forward;
    `precomputed` and None run no such pass."""

    @property
    def tokens(self) -> int:
        """Tokens of the micro-step: sequences times tokens of the largest integer input of [sequences, tokens]."""
        sizes = [value.numel() for value in self.batch.values() if _is_ids(value)]
        return max(sizes, default=0)

    @property
    def looks(self) -> tuple[object, ...]:
        """What its trace depends on: equal for two micro-steps whose traces are the same."""
        batch = tuple(
            (name, (value.shape, value.dtype) if isinstance(value, torch.Tensor) else repr(value))
            for name, value in self.batch.items()
        )
        return batch, self.padded, self.autocast, self.loss, self.forward, self.reference


def trace_costs(
    skeleton: Skeleton,
    step: Step,
    device: Device,
    *,
    actions: Sequence[Action] | None = None,
    mlp: int | str = "full",
    on_progress: Callable[[str], None] | None = None,
) -> Costs:
    """Trace what a model costs under every action, for one batch shape.

    Args:
        skeleton: of the model.
        step: the micro-step to run.
        device: its row gives the time of operations.
        actions: the actions to trace; all candidates by default. Blocks before the first trainable parameter,
            which save nothing, get the first one.
        mlp: how the feed-forward of each block runs, as in `Plan.mlp`.
        on_progress: called with a short message before each short model runs.

    Raises `HfCkptError` if the model cannot run on fake tensors.
    """
    actions = candidates() if actions is None else actions
    stacks = skeleton.stacks
    choices = [tuple((0,) if kind.frozen else tuple(range(len(actions))) for kind in stack.kinds) for stack in stacks]
    trace = functools.partial(trace_rows, skeleton, step=step, device=device, actions=actions, mlp=mlp)
    runs = _runs(skeleton, choices, trace, on_progress)
    for number in range(len(stacks)):  # bytes that no block keeps are freed under every plan
        always = min(run.released[number] for run in runs)
        for run in runs:
            run.released[number] -= always
    made = [
        StackCosts(
            name=stack.name,
            blocks=stack.blocks,
            kinds=stack.row,
            choices=choices[number],
            gradients=tuple(kind.weights.gradients for kind in stack.kinds),
            **stack_costs(number, runs, len(stack.kinds)),
        )
        for number, stack in enumerate(stacks)
    ]
    forward = runs[0].behind("head", len(stacks) - 1)
    lent = made[-1].last[runs[0].rows[-1][-1]].forward_only_bytes
    if lent:
        forward = dataclasses.replace(forward, points=(*forward.points, (forward.net + lent, forward.gradients)))
    if step.reference in ("adapters-off", "model"):
        forward = _behind_a_reference(made, forward)
    static = _static(skeleton, step, device)
    moved = 2 * (static.optimizer + static.gradients) + static.gradients
    return Costs(
        family=skeleton.family,
        model=skeleton.model,
        actions=tuple(actions),
        stacks=tuple(made),
        head=(forward, runs[0].phase("head back", 0, 0)),
        static=static,
        tokens=step.tokens,
        accumulation=step.accumulation,
        optimizer_nanoseconds=device.nanoseconds(0, moved, 4),
        mlp_tokens=mlp,
    )


def _runs(
    skeleton: Skeleton,
    choices: Sequence[Sequence[Sequence[int]]],
    trace: Callable[[Sequence[Row]], Run],
    on_progress: Callable[[str], None] | None = None,
) -> list[Run]:
    """Trace a short model under each action. If the short model fails, trace the whole one.

    Some models look up a block's type by its number, or have blocks whose results only the next block accepts.
    Raises `HfCkptError` if neither model runs on fake tensors, or if the short one fails and the whole one is too deep.

    Args:
        skeleton: of the model.
        choices: for each stack and kind, its actions.
        trace: runs the model with the given blocks.
        on_progress: called with a short message before each run.
    """
    most = max(len(found) for of_stack in choices for found in of_stack)
    whole = [stack.row for stack in skeleton.stacks]
    for rows in ([short_row(row) for row in whole], whole):
        runs: list[Run] = []
        try:
            for number in range(most):
                if on_progress is not None:
                    on_progress(f"tracing {number + 1} of {most}")
                keys = [
                    tuple((kind, of_kind[kind][min(number, len(of_kind[kind]) - 1)]) for kind in row)
                    for row, of_kind in zip(rows, choices, strict=True)
                ]
                runs.append(trace(keys))
            return runs
        except CannotTraceError:
            if rows is whole or sum(map(len, whole)) > _MOST_BLOCKS:
                raise
    raise AssertionError("one of the two was returned or raised")


_MOST_BLOCKS = 128
"""Most blocks that a model traced as a whole may have."""


def chunked_head(costs: Costs, skeleton: Skeleton, step: Step, device: Device, head: int | str) -> Costs:
    """`costs` with the head and its loss in chunks.

    The blocks hardly affect the head, so it is traced on one short model under `keep`.

    Args:
        costs: traced from `skeleton` and `step`, with the head as a whole.
        skeleton: of the model.
        step: the micro-step to run.
        device: its row gives the time of operations.
        head: `auto`, or how many tokens a chunk has.

    Raises `HfCkptError` if the model cannot run on fake tensors.
    """
    trace = functools.partial(trace_rows, skeleton, step=step, device=device, actions=[KEEP], mlp=costs.mlp_tokens)
    choices = [[(0,)] * len(stack.kinds) for stack in skeleton.stacks]
    ((plain,), (chunked,)) = (_runs(skeleton, choices, functools.partial(trace, head=how)) for how in ("full", head))
    forward, backward = chunked.phase("head", 0, 0), chunked.phase("head back", 0, 0)
    # Bytes freed after the last stack belong to the blocks in `costs`, and to the head in this trace.
    less = plain.phase("head", 0, 0).net - costs.head[0].net
    forward = dataclasses.replace(forward, points=tuple((other - less, done) for other, done in forward.points))
    return dataclasses.replace(costs, head=(forward, backward), head_tokens=head)


def trace_rows(
    skeleton: Skeleton,
    rows: Sequence[Row],
    step: Step,
    device: Device,
    actions: Sequence[Action],
    *,
    head: int | str = "full",
    mlp: int | str = "full",
) -> Run:
    """Run a model with these blocks, forward and backward. Results are cached in the skeleton.

    Args:
        skeleton: of the model.
        rows: the blocks of each stack.
        step: the micro-step to run.
        device: its row gives the time of operations.
        actions: the actions to which positions in `rows` refer.
        head: how the head runs, as in `Plan.head`.
        mlp: how the feed-forward of each block runs, as in `Plan.mlp`.

    Raises `CannotTraceError` if the model does not run on fake tensors.
    """
    asked = tuple(map(tuple, rows)), step.looks, device, tuple(actions), head, mlp
    if asked not in skeleton.runs:
        skeleton.runs[asked] = _trace_rows(skeleton, rows, step, device, actions, head, mlp)
    found: Run = skeleton.runs[asked]
    return found.copy()


def _trace_rows(
    skeleton: Skeleton,
    rows: Sequence[Row],
    step: Step,
    device: Device,
    actions: Sequence[Action],
    head: int | str,
    mlp: int | str,
) -> Run:
    kinds = [[kind for kind, _ in row] for row in rows]
    with skeleton.assembled(kinds) as model, contextlib.ExitStack() as stack:
        found = find_blocks(model)
        numbers = [action for row in rows for _, action in row]
        pairs = zip(found.blocks, (actions[number] for number in numbers), strict=True)
        plan = Plan(found.family, found.model, tuple(pairs), head=head, mlp=mlp)
        stack.enter_context(trial(model, plan))
        for module in compat.switched_inside(model) if skeleton.switched else ():
            module.gradient_checkpointing = True
        if device.name != "cpu":
            stack.enter_context(compat.accelerator_kernels())
        try:
            with skeleton.fake, compat.fake_values_count(), compat.any_type_in_grouped_products():
                return _run(model, found, rows, step, device)
        except InPlaceError as error:
            raise HfCkptError(
                f"{skeleton.model} cannot be planned for, because its blocks work in place on their hidden states. "
                "`full` and `selective` need no plan."
            ) from error
        except HfCkptError:
            raise
        except Exception as error:
            raise CannotTraceError(_unplannable(skeleton.model, error)) from error
        finally:
            for parameter in model.parameters():
                parameter.grad = None


def _run(model: nn.Module, found: FoundBlocks, rows: Sequence[Row], step: Step, device: Device) -> Run:
    inputs = {name: _fake(value) for name, value in step.batch.items()}
    if compat.wants_use_cache(model):
        inputs["use_cache"] = False
    answers = Answers(padded=step.padded, casts=device.name == "cpu")
    tracer = Tracer(device, found.blocks, found.modules, model, inputs, answers)
    with contextlib.ExitStack() as around:
        around.callback(standing_for.reset, standing_for.set(tracer.one_for_many))
        around.enter_context(tracer)
        autocast = functools.partial(torch.autocast, "cpu", dtype=step.autocast)
        with autocast() if step.autocast is not None else contextlib.nullcontext():
            loss = _loss(model, inputs, step, tracer)
        tracer.begin("head back", 0, 0, backward=True)
        loss.backward()  # type: ignore[no-untyped-call]
        tracer.finish()
    return Run(rows, tracer)


def _behind_a_reference(stacks: Sequence[StackCosts], forward: Phase) -> Phase:
    """The forward of the head, plus the time of a pass of the whole model without gradients.

    The trace already contains the bytes of that pass, which do not depend on the depth. Its time is that of the forward
    under the first action.
    """
    nanoseconds = sum(stack.before.nanoseconds for stack in stacks)
    for stack in stacks:
        nanoseconds += sum(stack.cost_at(place, 0).forward.nanoseconds for place in range(len(stack.kinds)))
    return dataclasses.replace(forward, nanoseconds=2 * forward.nanoseconds + nanoseconds)


def _static(skeleton: Skeleton, step: Step, device: Device) -> Static:
    everything = skeleton.weights
    found = step.optimizer_bytes
    if found is None:
        found = optimizer_bytes(everything, step.optimizer, "cpu" if device.name == "cpu" else "cuda")
    # A second model as large as the first, with a copy in autocast's type that is alive during the forward.
    reference = everything.nbytes if step.reference == "model" else 0
    if reference and step.autocast is not None:
        reference += sum(math.prod(shape) * step.autocast.itemsize for shape, size, _ in everything.tensors if size > 2)
    return Static(
        parameters=everything.nbytes + reference,
        buffers=skeleton.buffers,
        optimizer=found.state,
        gradients=everything.gradients,
        batch=sum(value.nbytes for value in step.batch.values() if isinstance(value, torch.Tensor)),
        step_bytes=found.step,
    )


def _unplannable(model: str, error: Exception) -> str:
    """The error message for a model that failed on fake tensors."""
    reason = f"it does not run without its weights: {type(error).__name__}: {error}"
    if compat.depends_on_values(error):  # experts called one by one
        reason = (
            f"how large its tensors are depends on their values ({error}). If that is how tokens find their experts, "
            'load the model with experts_implementation="grouped_mm" or "batched_mm"'
        )
    return f"{model} cannot be planned for, because {reason}. `selective`, `full` and other policies need no plan."


def _loss(model: nn.Module, inputs: Mapping[str, Any], step: Step, tracer: Tracer) -> torch.Tensor:
    """Run the forward. A separate function frees its outputs before the backward, as in a Trainer."""
    outputs, held = _outputs(model, inputs, step), None
    if step.reference in ("adapters-off", "model"):
        off = compat.adapters_off(model) if step.reference == "adapters-off" else contextlib.nullcontext()
        with tracer.beside_the_step(), torch.no_grad(), off:
            held = _outputs(model, inputs, step)
    loss: torch.Tensor = step.loss(outputs) if step.loss is not None else outputs.loss
    del held
    return loss


def _outputs(model: nn.Module, inputs: Mapping[str, Any], step: Step) -> Any:
    """Run the step's forward."""
    if step.forward is None:
        return model(**inputs)
    with own_forward(model, compat.rebound(step.forward, model)):
        return model(**inputs)


def _fake(value: Any) -> Any:
    """A tensor of the same shape and type, fake inside a `FakeTensorMode`; other values unchanged."""
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _is_ids(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()
