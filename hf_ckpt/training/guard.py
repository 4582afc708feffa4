"""`OomGuard`: run a step that has run out of memory again under a tighter plan, so that the training goes on.

    guard = hf_ckpt.OomGuard(model)
    for batch in loader:
        loss = guard(forward_and_backward, batch)       # a micro-step: everything up to the gradients
        optimizer.step(); optimizer.zero_grad()

    class Trainer(hf_ckpt.OomGuardMixin, transformers.Trainer): ...       # or TRL's; or `-m hf_ckpt --oom-guard`

A failed attempt has drawn random numbers, and may have changed gradients. If it has, the gradients are dropped, and
every micro-step since the last optimizer step is run again from the random state that it began with; otherwise only the
micro-step that failed is run again. A plan changes no gradients, so the training goes on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import functools
import itertools
import json
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import paused
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import HfCkptError, OutOfPlansError
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.planner.escalate import step_down
from hf_ckpt.planner.live import prediction_of, watching
from hf_ckpt.planner.shapes import BatchShape
from hf_ckpt.spec.files import replacing, write_text
from hf_ckpt.spec.plan import Prediction
from hf_ckpt.training.ranks import FAILED, FINE, GAVE_UP, Ranks
from hf_ckpt.units import format_bytes

log = logging.getLogger(__name__)


REPORT_FILE = "hf_ckpt_oom.json"
SNAPSHOT_FILE = "hf_ckpt_oom_snapshot.pickle"
AGAIN = "the same plan, after giving cached memory back"
"""What messages say of an attempt under the plan that is on already."""

_again: contextvars.ContextVar[bool] = contextvars.ContextVar("hf_ckpt_again", default=False)


def runs_again() -> bool:
    """Return whether the step that runs now is a repeated attempt."""
    return _again.get()


_State = tuple[tuple[int, int], ...]
"""For each of some tensors, which object it is and how often it was changed; equal states mean that none changed."""


@dataclasses.dataclass
class _MicroStep:
    """What is needed to run a micro-step again."""

    run: Callable[[], Any]
    """The user's function with its arguments."""
    put_state_back: Callable[[], None]
    """Restores the random state and the buffers that the micro-step began with."""
    met: int = 0
    """Collective operations that the step itself took part in, at the last attempt."""


@dataclasses.dataclass(frozen=True)
class _Failure:
    """How an attempt at a micro-step ran out of memory."""

    error: BaseException
    """The error, without its tracebacks."""
    trace: str
    """The text of its traceback."""
    touched: bool
    """Whether gradients had been changed by then."""
    trained: bool
    """Whether weights had been changed by then."""


class OomGuard:
    """Run micro-steps; where one runs out of memory, tighten the plan and run it again.

        guard = hf_ckpt.OomGuard(model)
        loss = guard(forward_and_backward, batch)

    The plan is the one of `hf_ckpt.install`, and a tighter plan stays. On a model without a plan, nothing is installed
    until memory runs out for the first time. The guard tries, in this order: a smaller budget under `budget` or `auto`;
    `selective`; `full`; hidden states in host memory; and the head in chunks, which comes before host memory where
    logits weigh more.

    Under DistributedDataParallel every rank runs its own micro-steps again, so that none waits for another. The guard
    averages the gradients after all ranks are through with the step, and ranks adopt each other's tighter plans. So
    reduction no longer overlaps with backward, and buffers are not broadcast. Where ranks communicate in a micro-step
    itself (to gather metrics, for example), and one fails after that, all of them run the step again.

    Args:
        model: what the training calls: a PreTrainedModel, plain or wrapped by PEFT or DistributedDataParallel.
        also: trained parameters outside `model`, of a loss for example. A Trainer's are known from its optimizer.
        exact: leave out the head in chunks, whose gradients agree only up to rounding.
        folder: folder that a report is written to when no tighter plan is left; None to write none.

    Raises:
        NoBlocksError: for a model that has no blocks.
        HfCkptError: for FSDP and DeepSpeed, whose ranks wait for each other inside a forward; for communication hooks
            and `static_graph` of DistributedDataParallel; and where there are several ranks and `model` is not what
            connects them. Some of this can be seen, and is raised, only at the first step.
    """

    _guards = itertools.count()

    def __init__(
        self,
        model: nn.Module,
        *,
        exact: bool = False,
        folder: str | Path | None = ".",
        also: Iterable[nn.Parameter] = (),
    ) -> None:
        find_blocks(model)
        self.model, self.exact, self.also = model, exact, tuple(also)
        self.folder = None if folder is None else Path(folder)
        self.taken: list[str] = []
        """What was tightened so far, in words, in the order of trying."""
        self.attempts = 0
        """How many attempts at micro-steps have run out of memory."""
        wrapped = compat.data_parallel(model)
        self._ranks = None if wrapped is None else Ranks(wrapped, next(self._guards))
        self._refuse_lockstep()
        self._meetings: set[bool] = set()
        """Holds True once a micro-step had collective operations of its own, and False once one had none."""
        self._trained: list[nn.Parameter] = []
        """The parameters that are trained."""
        self._devices: set[torch.device] = set()
        """The devices of all parameters, whose random state is kept."""
        self._steps: list[_MicroStep] = []
        """The micro-steps since the last optimizer step."""
        self._running = False
        """Whether a micro-step runs now."""
        self._left: _State | None = None
        """The gradients as the last micro-step left them; None where the next one begins a new optimizer step."""
        self._zeroed = False
        """Whether there were gradient tensors before the first micro-step, so that dropping means setting to zero."""
        self._earlier = False
        """Whether these gradients were not zero: they come from outside the guard and cannot be made again."""
        self._seen: BatchShape | None = None
        """The shape of the batch that the last repeated attempt was given."""

    def __call__(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `step(*args, **kwargs)`, as often as memory runs out in it, and return its result.

        A step is the forward, loss and backward of one micro-step, and nothing of the optimizer. What it does outside
        the model (appending to a list, for example) is done again when it is run again.

        Raises `OutOfPlansError` when memory runs out under the tightest plan, or when the step cannot be run again.
        Other errors pass.
        """
        if self._running:  # a guard inside the same one: the outer one runs the step again
            return step(*args, **kwargs)
        gradients = self._gradients()
        if self._left is None or self._left != gradients or not any(found for found, _ in gradients):
            self._begin()
            gradients = self._gradients()
        self._left = self._seen = None
        self._running = True
        try:
            result = self._guarded(functools.partial(step, *args, **kwargs))
        finally:
            self._running = False
        after = self._gradients()
        # Where the step itself dropped gradients, an optimizer step has ended in it.
        if not any(old and old != new for (old, _), (new, _) in zip(gradients, after, strict=True)):
            self._left = after
        return result

    def _guarded(self, run: Callable[[], Any]) -> Any:
        """Run a micro-step; under DistributedDataParallel, average the gradients after the last one of a step."""
        self._steps.append(_MicroStep(run, self._state()))
        if self._ranks is None:
            return self._run(self._steps[-1:])
        wrapped = self._ranks.wrapped
        last = wrapped.require_backward_grad_sync
        wrapped.require_forward_param_sync = False  # ranks would meet to broadcast buffers, and one of them twice
        with wrapped.no_sync():
            result = self._run(self._steps[-1:])
        if last:
            self._exchange(FINE)
            self._ranks.average()
        return result

    # --- running micro-steps ---

    def _begin(self) -> None:
        """Begin a new optimizer step: forget earlier micro-steps, and look at what is trained now."""
        self._steps.clear()
        self._refuse_lockstep()  # the model may have been wrapped or sharded since
        parameters = list(dict.fromkeys((*self.model.parameters(), *self.also)))
        self._devices = {parameter.device for parameter in parameters}
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        self._zeroed = bool(gradients)
        self._earlier = any(bool(gradient.any()) for gradient in gradients)

    def _refuse_lockstep(self) -> None:
        """Raise `HfCkptError` where other ranks would wait for one that runs a step again."""
        if compat.steps_in_lockstep(self.model):
            raise HfCkptError(
                "OomGuard cannot work with FSDP or DeepSpeed: their ranks wait for each other inside every forward and "
                "backward, so that one that runs out of memory cannot run a step again. Plan for the largest batch "
                "instead (`policy: budget`)."
            )
        if self._ranks is None and compat.ranks() > 1:
            raise HfCkptError(
                f"OomGuard was given a model that is not wrapped, but there are {compat.ranks()} ranks, and one that "
                "runs a step again must not leave the others waiting. Give it the DistributedDataParallel module (what "
                "`Accelerator.prepare` returns), and make it after that."
            )

    def _run(self, pending: list[_MicroStep]) -> Any:
        """Run these micro-steps, each as often as it takes, and return the result of the last one."""
        result, again = None, False
        while pending:
            step = pending[0]
            if again:
                step.put_state_back()
            result, failure = self._attempt(step, again)
            if failure is None:
                self._meetings.add(bool(step.met))
                if self._ranks is None or not step.met:
                    pending = pending[1:]
                    continue
                self._ranks.note(step.met)
                if self._exchange(FINE) == FINE:
                    pending = pending[1:]
                    continue
                everything = True  # another rank has failed in this step, and needs this one there again
            else:
                self.attempts += 1
                self._refuse(step, failure)
                self._tighten(step, failure)
                if self._ranks is not None and step.met:
                    self._exchange(FAILED)
                everything = failure.touched or bool(step.met)
            again = True
            if everything:
                self._drop_gradients()
                pending = list(self._steps)
        return result

    def _attempt(self, step: _MicroStep, again: bool) -> tuple[Any, _Failure | None]:
        """Run a micro-step once, and return its result, or how it ran out of memory. Other errors pass."""
        gradients, weights, met = self._gradients(), self._weights(), self._collectives()
        error, trace = None, ""
        try:
            with self._watched() if again else contextlib.nullcontext():
                return step.run(), None
        except Exception as raised:
            if isinstance(raised, OutOfPlansError) or not compat.is_out_of_memory(raised):
                raise
            trace = "".join(traceback.format_exception(raised))
            error = _without_frames(raised)
        finally:
            step.met = self._collectives() - met
        touched, trained = gradients != self._gradients(), weights != self._weights()
        compat.release_memory()
        return None, _Failure(error, trace, touched, trained)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Note the shape of the batch in a repeated attempt, and let `runs_again` say that it is one."""
        token = _again.set(True)
        try:
            with watching(self.model) as seen:
                yield
        finally:
            _again.reset(token)
            if seen:
                self._seen = seen[-1]

    def _refuse(self, step: _MicroStep, failure: _Failure) -> None:
        """Raise `OutOfPlansError` when a failed step cannot be run again."""
        reason = None
        if failure.trained or compat.has_gradient_hooks(self._trained):  # a fused optimizer counts no change of weights
            reason = "Weights may have been changed in the backward (an optimizer inside it), so it cannot run again."
        elif self._earlier and (failure.touched or step.met):
            reason = "There were gradients before the guarded steps began, which cannot be made again."
        elif self._ranks is None:
            pass
        elif step.met:
            self._ranks.note(step.met)
            if not self._ranks.all_came_as_far(step.met):
                reason = "Other ranks wait inside the step for this one, which cannot come to the same place again."
        elif failure.touched and any(other.met for other in self._steps):
            reason = "Ranks met in earlier micro-steps, which this rank alone cannot run again."
        if reason is not None:
            log.error("hf_ckpt: out of memory:\n%s", failure.trace)
            self._steps.clear()
            if self._ranks is not None and not step.met and self._meetings == {False}:
                self._ranks.exchange(GAVE_UP, len(self.taken))
            raise OutOfPlansError(f"{_first_line(failure.error)} hf_ckpt: {reason}") from failure.error

    def _drop_gradients(self) -> None:
        """Make the gradients what they were before the first micro-step of this optimizer step."""
        for parameter in self._trained:
            if not self._zeroed:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _state(self) -> Callable[[], None]:
        """Read what a micro-step changes beside gradients, and return a function that restores it.

        That is the random state, and the model's buffers (running averages, for example).
        """
        put_random_state_back = compat.random_state(self._devices)
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]

        def put_back() -> None:
            put_random_state_back()
            with torch.no_grad():
                for buffer, value in buffers:  # compared by value: batch norms do not count their changes
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)

        return put_back

    def _gradients(self) -> _State:
        """Return which gradients there are, and how often each was changed."""
        found = (parameter.grad for parameter in self._trained)
        return tuple((0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in found)

    def _weights(self) -> _State:
        """Return which weights are trained, and how often each was changed."""
        return tuple((id(parameter), parameter._version) for parameter in self._trained)

    def _collectives(self) -> int:
        return 0 if self._ranks is None else self._ranks.collectives()

    # --- taking tighter plans, and giving up ---

    def _tighten(self, step: _MicroStep, failure: _Failure) -> None:
        """Put the next plan on that needs less memory. Raises `OutOfPlansError` when there is none."""
        try:
            taken = step_down(self.model, exact=self.exact)
        except HfCkptError as error:
            raise OutOfPlansError(f"{_first_line(failure.error)} hf_ckpt: {error}") from failure.error
        if taken is None and self._seen is None:  # one more attempt shows the shape of the batch, if nothing else
            self._seen = BatchShape({})
            taken = AGAIN
        if taken is None:
            self._give_up(step, failure)
        assert taken is not None
        if taken != AGAIN:
            self.taken.append(taken)
        record = installation(self.model)
        log.warning(
            "hf_ckpt: out of memory (%s). The step is run again with: %s.\n%s",
            _first_line(failure.error),
            taken,
            "" if record is None else record.plan,
        )

    def _give_up(self, step: _MicroStep, failure: _Failure) -> None:
        """Write the report, and raise `OutOfPlansError` with what fills the predicted peak."""
        prediction, unknown = self._predicted()
        tried = ", ".join(self.taken) or "no plan is tighter than the one installed"
        lines = [f"{_first_line(failure.error)} hf_ckpt: no tighter plan is left (tried: {tried})."]
        if prediction is not None:
            parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in prediction.parts if size)
            lines.append(
                f"The peak is predicted to be {format_bytes(prediction.peak_bytes)} for {self._seen}: {parts}."
            )
        else:
            lines.append(f"What fills the peak could not be predicted: {unknown}.")
        try:
            lines += [f"Written: {path}." for path in self._write_report(failure, prediction)]
        except (OSError, RuntimeError) as error:
            lines.append(f"The report could not be written: {error}.")
        lines.append("What is left to do: fewer sequences or tokens in a micro-step, or training fewer weights.")
        log.error("hf_ckpt: out of memory for the last time:\n%s", failure.trace)
        if failure.touched:
            self._drop_gradients()
        self._steps.clear()
        # Tell the other ranks, so that they do not wait. Where ranks communicate inside steps and this one has not got
        # that far, they may be waiting for something else.
        if self._ranks is not None and (step.met or self._meetings == {False}):
            self._ranks.exchange(GAVE_UP, len(self.taken))
        found = dict(prediction.parts) if prediction is not None else None
        raise OutOfPlansError(" ".join(lines), parts=found, tried=self.taken) from failure.error

    def _predicted(self) -> tuple[Prediction | None, str]:
        """Predict what the plan that is on costs for the batch that failed; else None, and the reason in words."""
        record = installation(self.model)
        if record is None or self._seen is None or not self._seen.sizes:
            return None, "no forward of the model was seen"
        try:
            with paused(self.model):
                return prediction_of(self.model, record.plan, self._seen), ""
        except Exception as error:  # no error of the prediction may hide that memory ran out
            return None, str(error)

    def _write_report(self, failure: _Failure, prediction: Prediction | None) -> Sequence[Path]:
        """Write the report (and on CUDA the allocator's snapshot) to the folder, and return the files' paths."""
        if self.folder is None:
            return ()
        record = installation(self.model)
        report = {
            "error": str(failure.error),
            "traceback": failure.trace.splitlines(),
            "rank": compat.rank(),
            "attempts": self.attempts,
            "tried": self.taken,
            "batch": None if self._seen is None else str(self._seen),
            "plan": None if record is None else record.plan.to_dict(),
            "prediction": None if prediction is None else prediction.to_dict(),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        whose = f"rank{compat.rank()}_" if compat.rank() else ""
        path = self.folder / (whose + REPORT_FILE)
        write_text(path, json.dumps(report, indent=1) + "\n")
        if compat.accelerator_type() != "cuda":
            return (path,)
        snapshot = self.folder / (whose + SNAPSHOT_FILE)
        with replacing(snapshot) as beside:
            compat.dump_memory_snapshot(str(beside))
        return path, snapshot

    # --- agreeing with other ranks ---

    def _exchange(self, come_to: int) -> int:
        """Tell all ranks how the step has ended here, and return the worst end on any of them.

        All ranks take the tightest plan of them. Raises `OutOfPlansError` when a rank has no plan left.
        """
        assert self._ranks is not None
        worst, most = self._ranks.exchange(come_to, len(self.taken))
        if worst == GAVE_UP:
            raise OutOfPlansError("another rank is out of memory. It has no tighter plan left, as its own error says.")
        while len(self.taken) < most:
            taken = step_down(self.model, exact=self.exact)
            self.taken.append("nothing is tighter" if taken is None else taken)
            log.info("hf_ckpt: another rank ran out of memory, so this one goes on with: %s.", self.taken[-1])
        return worst


class OomGuardMixin:
    """Put in front of a Trainer, this guards its `training_step` with an `OomGuard`.

        class GuardedTrainer(hf_ckpt.OomGuardMixin, Trainer):
            pass

    Reports go to the Trainer's output folder.
    """

    oom_guard: OomGuard | None = None
    """The guard; None until the first training step."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's own `training_step` under the guard, and return its loss."""
        return guarded_training_step(self, super().training_step, model, inputs, *args, **kwargs)  # type: ignore[misc]


def guarded_training_step(
    trainer: Any, training_step: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run `training_step(model, inputs, ...)` of a Trainer under its guard, which is made at the first call."""
    guard = getattr(trainer, "oom_guard", None)
    if guard is None or guard.model is not model:
        groups = getattr(trainer.optimizer, "param_groups", ())
        also = [parameter for group in groups for parameter in group["params"]]
        guard = trainer.oom_guard = OomGuard(model, folder=trainer.args.output_dir, also=also)
    # A copy, because a Trainer that takes labels out of its inputs must find them there again.
    return guard(lambda: training_step(model, copy.copy(inputs), *args, **kwargs))


def _without_frames(error: BaseException) -> BaseException:
    """Return the error without its tracebacks, whose frames hold the activations of the step."""
    chain: list[BaseException] = [error]
    for seen in chain:
        seen.__traceback__ = None
        chain += [other for other in (seen.__cause__, seen.__context__) if other is not None and other not in chain]
    return error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip()
