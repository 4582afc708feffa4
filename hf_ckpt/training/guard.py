"""`OomGuard`: if a step runs out of memory, retry it under a tighter plan.

    guard = hf_ckpt.OomGuard(model)
    for batch in loader:
        loss = guard(forward_and_backward, batch)       # a micro-step: everything up to the gradients
        optimizer.step(); optimizer.zero_grad()

    class Trainer(hf_ckpt.OomGuardMixin, transformers.Trainer): ...       # or TRL's; or `-m hf_ckpt --oom-guard`

A failed attempt has drawn random numbers, and may have changed gradients. So the guard drops the gradients and reruns
every micro-step since the last optimizer step, each from the random state that it began with. A plan changes no
gradients, so training goes on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import spec_of
from hf_ckpt.attach.described import describe
from hf_ckpt.attach.enable import put_on
from hf_ckpt.attach.process import Replaced
from hf_ckpt.attach.record import installation, record_on
from hf_ckpt.attach.switches import is_on
from hf_ckpt.compat.process_state import RandomState
from hf_ckpt.engines.host_memory import lane_of
from hf_ckpt.engines.step_state import StepState
from hf_ckpt.errors import HfCkptError, NoBlocksError, OutOfPlansError
from hf_ckpt.logs import warn_once
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.planner.policies import tighter_plan
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec
from hf_ckpt.training.install import install_on
from hf_ckpt.training.out_of_memory import place_of, report

log = logging.getLogger(__name__)

_without_blocks: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models of Trainers for which there is no plan, so that their steps run without a guard."""
_State = tuple[tuple[int, int], ...]
"""(id, version) of each of some tensors. If two states are equal, no tensor has changed."""


class OomGuard:
    """Run micro-steps. If one runs out of memory, retry it with a plan that needs less.

        guard = hf_ckpt.OomGuard(model)
        loss = guard(forward_and_backward, batch)  # runs forward_and_backward(batch), with retries

    The guard starts with the plan of `hf_ckpt.install`, or without one. After each failure, it makes the next of these
    changes, for the rest of the training: `selective`, `full`, the head in chunks, and hidden states in host memory.
    Under `budget` and `auto`, the run is first planned again, each time for less. If no plan is left, the changes begin
    with the plan that ran, and the run no longer measures.

    It works in a single process. With several ranks, or under FSDP or DeepSpeed, use `policy: budget`.

    Args:
        model: the module that the training calls: a `PreTrainedModel`, plain or wrapped.
        exact: never run the head in chunks, because its gradients are equal only up to rounding.
        also: trained parameters outside `model`, such as those of a loss.

    Raises:
        NoBlocksError: the model has no blocks.
        HfCkptError: in the first step, if there are several ranks, or the model is wrapped by FSDP or DeepSpeed.
    """

    def __init__(self, model: nn.Module, *, exact: bool = False, also: Iterable[nn.Parameter] = ()) -> None:
        find_blocks(model)
        self.model = model
        self.exact = exact
        self.also = tuple(also)
        self.taken: list[str] = []
        """The changes that the guard has made so far, in words and in order."""
        self.attempts = 0
        """Number of attempts at micro-steps that ran out of memory."""
        self._trained: list[nn.Parameter] = []
        """The parameters that are trained."""
        self._steps: list[tuple[Callable[[], Any], StepState]] = []
        """The micro-steps since the last optimizer step, each with the state that it began with."""
        self._before: StepState | None = None
        """The state before the last micro-step."""
        self._tried: list[tuple[str, Plan]] = []
        """The changes for the current micro-step, with the plan that each one led to."""
        self._running = threading.Lock()
        """Held while a micro-step runs."""
        self._thread: int | None = None
        """The thread that runs it."""
        self._gradients_left: _State | None = None
        """State of the gradients after the last micro-step; None if the next one begins a new optimizer step."""
        self._gradients_before: _State = ()
        """State of the gradients before the last attempt at the last micro-step."""
        self._weights: _State = ()
        """State of the weights before the last micro-step."""
        self._was_optimized = False
        """Whether an optimizer has stepped since then. Fused ones do not count their changes of weights."""
        self._lost: list[nn.Parameter] = []
        """Parameters with gradients from before the first micro-step, which cannot be computed again. They are needed
        no more if a micro-step drops them by itself."""
        self._reason = ""
        """Text of the last error."""
        self._foreign: dict[nn.Parameter, weakref.ref[torch.Tensor]] = {}
        """The gradients that the guard found before the first micro-step, until it has failed once."""
        weakref.finalize(self, compat.optimizers.call_after(self._after_optimizer).remove).atexit = False
        record = installation(model)
        if record is not None and record.waits:  # on purpose, until memory runs out
            record.undo_puts()

    def __call__(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `step(*args, **kwargs)`, retry it if it runs out of memory, and return its result.

        Args:
            step: runs the forward, the loss and the backward of one micro-step, without the optimizer. Other effects
                of it, such as appending to a list, happen once per attempt.
            args: positional arguments of `step`.
            kwargs: keyword arguments of `step`.

        Raises `OutOfPlansError` if memory runs out under the tightest plan, or if the step cannot be retried;
        `HfCkptError` if there are several ranks, or another thread runs a step of this guard; and every other error of
        `step`.
        """
        thread = threading.get_ident()
        if self._thread == thread:  # a call inside a call of the same guard: the outer one retries
            return step(*args, **kwargs)
        if not self._running.acquire(blocking=False):
            raise HfCkptError("Another thread runs a step of this OomGuard. Only one thread at a time can use a guard.")
        self._thread = thread
        try:
            return self._guarded(functools.partial(step, *args, **kwargs))
        finally:
            self._thread = None
            self._running.release()

    def _guarded(self, run: Callable[[], Any]) -> Any:
        """Run a micro-step with retries, and return its result."""
        gradients = _state_of(parameter.grad for parameter in self._trained)
        # If something else has changed gradients, or there are none, an optimizer has stepped in between.
        if gradients != self._gradients_left or not any(number for number, _ in gradients):
            gradients = self._begin()
        weights = _state_of(self._trained)
        if self._steps and (weights != self._weights or self._was_optimized):
            self._steps.clear()
            self._lost = [parameter for parameter in self._trained if parameter.grad is not None]
        self._weights = weights
        self._was_optimized = False
        # With buffers and attributes, which a forward that fails may have changed, such as those of a batch norm.
        devices = compat.distributed.devices_of_model(self.model)
        before = self._before = StepState(self.model, devices, copies_codes=False, earlier=self._before)
        self._steps.append((run, before))
        self._gradients_left = None
        self._gradients_before = gradients
        result = self._run()
        after = _state_of(parameter.grad for parameter in self._trained)
        # If the step itself dropped gradients, an optimizer step has ended in it.
        if not any(old and old != new for (old, _), (new, _) in zip(self._gradients_before, after, strict=True)):
            self._gradients_left = after
        return result

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._was_optimized:
            trained = set(map(id, self._trained))
            self._was_optimized = any(id(p) in trained for group in optimizer.param_groups for p in group["params"])

    def _begin(self) -> _State:
        """Begin a new optimizer step: forget earlier micro-steps, and find the parameters that are trained now.

        Returns the state of their gradients. Raises `HfCkptError` if other ranks would wait for a rank that retries.
        """
        if compat.distributed.ranks() > 1 or compat.distributed.steps_in_lockstep(self.model):
            raise HfCkptError(
                "OomGuard works in a single process only, without FSDP and DeepSpeed: ranks wait for each "
                "other inside a step, so a rank that runs out of memory cannot retry it. Use `policy: "
                "budget`, which plans "
                "before memory runs out."
            )
        self._steps.clear()
        self._lost = []
        parameters = dict.fromkeys((*self.model.parameters(), *self.also))
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        gradients = [(parameter, parameter.grad) for parameter in self._trained]
        self._foreign = {parameter: weakref.ref(grad) for parameter, grad in gradients if grad is not None}
        return _state_of(parameter.grad for parameter in self._trained)

    def _run(self) -> Any:
        """Run the last micro-step until it succeeds. After a failure, all since the last optimizer step run again."""
        # After a failure its gradients are dropped, and with them those of the micro-steps before it. So all run again.
        pending = self._steps[-1:]
        is_retry = False
        self._tried.clear()
        while True:
            weights = _state_of(self._trained)
            try:
                for run, before in pending:
                    if is_retry:
                        before.restore()
                        self._gradients_before = _state_of(parameter.grad for parameter in self._trained)
                    result = run()
                if is_retry and self._lost:
                    self._check_dropped()
                return result
            except Exception as error:
                # A guard inside the step has already tried all plans if it raises `OutOfPlansError`.
                if isinstance(error, OutOfPlansError) or not compat.devices.is_out_of_memory(error):
                    raise
                if place_of(error) == "generation":  # no gradients are on, so that no plan needs less
                    report(error, self.model)
                    raise
                self._prepare_retry(error, weights)
            compat.devices.release_memory()  # the frames of the error, which hold what the step saved, are gone now
            for parameter in self._lost:  # a retry that drops these does not need them; `_check_dropped` refuses others
                parameter.grad = torch.full_like(parameter, math.nan)
            pending = self._steps
            is_retry = True

    def _prepare_retry(self, error: Exception, weights: _State) -> None:
        """Remove the gradients of a failed attempt, and enable the next plan that needs less memory.

        Raises `OutOfPlansError` if there is none, or if the step cannot be retried; see `_drop_gradients`.
        """
        self.attempts += 1
        report(error, self.model)
        reason = self._reason = str(error).partition("\n")[0].strip()
        try:
            self._drop_gradients(weights)
            change = tighten(self.model, exact=self.exact)
            plan = describe(self.model).plan
            # A step that installs or enables another plan by itself would run out of memory for ever.
            if change is None or (change, plan) in self._tried:
                tried = ", ".join(self.taken) or "no plan is tighter than the one installed"
                raise HfCkptError(f"no tighter plan is left (tried: {tried}). Train on fewer tokens, or fewer weights.")
        except HfCkptError as refused:
            self._steps.clear()
            raise OutOfPlansError(f"{reason} hf_ckpt: {refused}") from error
        self.taken.append(change)
        self._tried.append((change, plan))
        record = installation(self.model)
        assert record is not None
        shown = "" if record.session is not None else f"\n{plan}"  # a session plans when the retry begins
        log.warning("hf_ckpt: retrying the step with: %s.%s", change, shown)

    def _drop_gradients(self, weights: _State) -> None:
        """Remove the gradients of the micro-steps of this optimizer step.

        Raises `HfCkptError` if there were others before, or if the weights may differ from the state `weights`.
        """
        # A fused optimizer does not count its changes of weights.
        changed = weights != _state_of(self._trained) or self._was_optimized
        if changed or compat.hooks.has_gradient_hooks(self._trained):
            raise HfCkptError("The backward may have changed weights (an optimizer runs inside it): no retry.")
        if self._foreign and self._finds_left():
            raise HfCkptError(
                "Gradients from before the guarded steps cannot be computed again. Call "
                "`zero_grad(set_to_none=True)` before them, outside of the guard or first in the step."
            )
        self._lost += self._foreign  # the step drops them by itself, but it may use them before
        self._foreign.clear()
        for parameter in self._trained:
            parameter.grad = None

    def _finds_left(self) -> bool:
        """Whether gradients from before the micro-steps are left, alone or in sums."""
        foreign = {id(reference()) for reference in self._foreign.values()}
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        # Under `create_graph`, a sum is a new tensor.
        return any(id(gradient) in foreign or gradient.requires_grad for gradient in gradients)

    def _check_dropped(self) -> None:
        """Raise `OutOfPlansError` if a retry has used gradients of micro-steps that did not run again."""
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        if any(bool(gradient.detach().sum().isnan()) for gradient in gradients):
            for parameter in self._trained:
                parameter.grad = None
            self._steps.clear()
            raise OutOfPlansError(
                f"{self._reason} hf_ckpt: The retry needs gradients from before it, which cannot be computed again: "
                "the weights have changed since, or they are none of the guard's. Call `zero_grad()` after each "
                "optimizer step."
            )
        self._lost = []


def _state_of(tensors: Iterable[torch.Tensor | None]) -> _State:
    """The state of tensors; (0, 0) for a missing gradient. Versions count changes in place."""
    return tuple((0, 0) if tensor is None else (id(tensor), tensor._version) for tensor in tensors)


class OomGuardMixin:
    """Mixin for a Trainer: runs each `training_step` under an `OomGuard`, and evaluations that run out again."""

    oom_guard: OomGuard | None = None
    """The guard; None until the first training step."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's own `training_step` under the guard, and return its loss."""
        return guarded_training_step(self, super().training_step, model, inputs, *args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's own `evaluate`, if need be with smaller batches, and return its metrics."""
        return guarded_evaluation(self, super().evaluate, *args, **kwargs)  # type: ignore[misc]


def guarded_training_step(
    trainer: Any, training_step: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run `training_step(model, inputs, ...)` of a Trainer under its guard, which the first call creates."""
    guard = getattr(trainer, "oom_guard", None)
    if model in _without_blocks:
        return training_step(model, inputs, *args, **kwargs)
    if guard is None or guard.model is not model:
        groups = getattr(trainer.optimizer, "param_groups", ())
        also = [parameter for group in groups for parameter in group["params"]]
        try:
            guard = trainer.oom_guard = OomGuard(model, also=also)
        except NoBlocksError as error:  # no reason to end a training that may have enough memory
            warn_once(log, "hf_ckpt: the guard is off in this training: %s", error)
            _without_blocks.add(model)
            return training_step(model, inputs, *args, **kwargs)
    counters = compat.transformers.counters_of(trainer)

    def step() -> Any:
        vars(trainer).update(counters)  # a micro-step that runs again must get the same completions
        # A copy, because some Trainers remove labels from their inputs, and a retry needs them.
        return training_step(model, copy.copy(inputs), *args, **kwargs)

    return guard(step)


def guarded_evaluation(trainer: Any, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `evaluate(...)` of a Trainer. As often as it runs out of memory, halve its batch and run it again.

    Evaluations of several ranks, and of TRL's trainers that generate, whose batches are groups of completions, are not
    run again.
    """
    random_state = RandomState(compat.distributed.devices_of_model(trainer.model))
    while True:
        try:
            return evaluate(*args, **kwargs)
        except Exception as error:
            rows = trainer.args.per_device_eval_batch_size
            has_fixed_rows = compat.distributed.ranks() > 1 or compat.transformers.counters_of(trainer)
            if rows < 2 or has_fixed_rows or not compat.devices.is_out_of_memory(error):
                raise
            report(error)
        trainer.args.per_device_eval_batch_size = rows // 2
        compat.transformers.forget_evaluation_loaders(trainer)
        text = "hf_ckpt: retrying the evaluation, from now on with `per_device_eval_batch_size=%d`."
        log.warning(text, rows // 2)
        compat.devices.release_memory()  # the frames of the error are gone now
        random_state.restore()  # each evaluation draws a seed for its data


@contextlib.contextmanager
def guard_trainers() -> Iterator[set[str]]:
    """Context manager in which every Trainer of the process trains under a guard.

    `with` returns the classes of the Trainers whose steps were guarded so far.
    """
    from transformers import Trainer  # slow to import, and most of hf_ckpt works without it

    guarded: set[str] = set()

    def train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        def training_step(*step: Any, **options: Any) -> Any:
            guarded.add(type(trainer).__name__)
            return guarded_training_step(trainer, *step, **options)

        with Replaced() as methods:
            # On the Trainer itself: some classes have a method of their own that never calls that of `Trainer`.
            methods.replace(trainer, "training_step", training_step)
            methods.replace(trainer, "evaluate", functools.partial(guarded_evaluation, trainer))
            return original(trainer, *args, **kwargs)

    with Replaced() as methods:
        methods.replace(Trainer, "train", train)
        yield guarded


# --- tighter plans ----------------------------------------------------------------------------------------------------


def tighten(model: nn.Module, *, exact: bool = False) -> str | None:
    """Enable the next plan that needs less memory, between two attempts at a step.

    A plan that is installed but not enabled comes first, then plans for a smaller budget, then those of `tighter_plan`.
    On a model without a plan, `selective` comes first, or what follows `full` if transformers' own checkpointing is
    enabled. From then on the watch checks nothing, because there is no room. Enable calls with the options of the
    user's plan keep the new one.

    Args:
        model: a PreTrainedModel, plain or wrapped.
        exact: do not run the head in chunks, because its gradients are not bit-equal.

    Returns the change in words; None if no plan needs less.
    """
    blocks = find_blocks(model)
    base = blocks.base
    record = record_on(base)
    if record is None:
        spec = Spec(policy="none")
        on = [block.index for block in blocks.blocks if is_on(blocks.modules[block.name])]
        if on:  # transformers' own checkpointing keeps what `full` keeps
            every = on[1] - on[0] if len(on) > 1 else len(blocks.blocks)
            spec = Spec(every_n_layers=max(1, every))  # 0 between blocks of two stacks
        record = install_on(blocks, spec)
    record.end_watch()
    user_spec = record.tightened or record.spec
    # Whoever disables a plan that is tightened, such as TRL around a generation that fails, does not go back by that.
    if record.tightened is None and not record.enabled and (record.plan.active() or record.plan.head != "whole"):
        record.tightened = user_spec
        put_on(blocks, record)
        return f"the installed plan ({record.plan.summary()})"
    limit = None if record.session is None else record.session.lower_limit()
    if limit is not None:
        return limit
    head = None if exact else blocks.head
    # As `attach` refuses it: a replaced `forward` may compute more. FSDP frees the head's weight between calls.
    chunks = head is not None and "forward" not in vars(head) and compat.distributed.parameters_stay(base)
    has_host_memory = lane_of(next(base.parameters()).device) is not None
    tighter = tighter_plan(record.plan, chunks=chunks, offload=has_host_memory)
    if tighter is None:
        return None
    plan, change = tighter
    record.adopt(spec_of(plan, record.spec), plan)
    record.tightened = user_spec
    put_on(blocks, record)
    return change
