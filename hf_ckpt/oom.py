"""`OomGuard`: a step that runs out of memory is run again under a tighter plan, and nothing is lost.

    guard = hf_ckpt.OomGuard(model)
    for batch in loader:
        loss = guard(forward_and_backward, batch)       # a micro-step: everything up to the gradients
        optimizer.step(); optimizer.zero_grad()

    class Trainer(hf_ckpt.OomGuardMixin, transformers.Trainer): ...       # or TRL's; or `-m hf_ckpt --oom-guard`

What a failed attempt leaves behind is the gradients it got to, and random numbers drawn. Where gradients were touched,
they are dropped, and every micro-step since the last optimizer step is run again from the random state it began with;
else only the one that failed. A plan changes no gradients, so the training goes on as if nothing had happened.
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
from hf_ckpt.autoplan import Situation, prediction_of
from hf_ckpt.errors import HfCkptError, OutOfPlansError
from hf_ckpt.families import find_blocks
from hf_ckpt.install import installation, paused, step_down, trial, watching
from hf_ckpt.plan import Prediction
from hf_ckpt.ranks import FAILED, FINE, GAVE_UP, Ranks
from hf_ckpt.units import format_bytes

log = logging.getLogger(__name__)

REPORT_FILE = "hf_ckpt_oom.json"
SNAPSHOT_FILE = "hf_ckpt_oom.pickle"
AGAIN = "the same plan, after giving cached memory back"

_again: contextvars.ContextVar[bool] = contextvars.ContextVar("hf_ckpt_again", default=False)


def runs_again() -> bool:
    """Whether the step that runs now has been begun before."""
    return _again.get()


_State = tuple[tuple[int, int], ...]


@dataclasses.dataclass
class _MicroStep:
    """What it takes to run one again."""

    run: Callable[[], Any]
    put_state_back: Callable[[], None]
    met: int = 0
    """Collective operations of its own that the last attempt took part in."""


@dataclasses.dataclass(frozen=True)
class _Failure:
    error: BaseException
    trace: str
    """Where it was raised."""
    touched: bool
    """Whether gradients were changed by then."""
    trained: bool
    """Whether weights were."""


class OomGuard:
    """Run micro-steps; where one runs out of memory, tighten the plan and run it again.

    The plan is that of `hf_ckpt.install`, and it stays tight. On a model without one, nothing is installed until memory
    runs out for the first time. The order is: a smaller budget for a planned policy; `selective`, `full`, hidden states
    in host memory, and the head in chunks, which comes before offloading where logits weigh more.

    Under DistributedDataParallel every rank runs its own micro-steps again, so that none waits for another; gradients
    are averaged by the guard, after all ranks are through with the step, and ranks adopt each other's tighter plans.
    Reduction no longer overlaps with backward, and buffers are not broadcast. Where ranks meet in a micro-step itself
    (metrics that are gathered), and one fails after that, all of them run the step again.

    Args:
        model: what the training calls: a PreTrainedModel, plain or wrapped by PEFT or DistributedDataParallel.
        also: trained parameters outside `model`, of a loss for example. A Trainer's are known from its optimizer.
        exact: leave out the chunked head, whose gradients agree to rounding only.
        folder: where the report is written when no plan is left; None for nowhere.

    Raises:
        NoBlocksError: for a model that nothing can be installed on.
        HfCkptError: for FSDP and DeepSpeed, whose ranks wait for each other inside a forward, for communication hooks
            of DistributedDataParallel, and where there are several ranks and `model` is not what connects them; some
            of it at the first step.
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
        """What was changed so far, in order."""
        self.attempts = 0
        """Attempts at micro-steps that ran out of memory."""
        wrapped = compat.data_parallel(model)
        self._ranks = None if wrapped is None else Ranks(wrapped, next(self._guards))
        self._refuse_lockstep()
        self._meetings: set[bool] = set()
        """Whether there have been micro-steps with collective operations of their own, and without."""
        self._trained: list[nn.Parameter] = []
        self._devices: set[torch.device] = set()
        self._steps: list[_MicroStep] = []
        """Since the last optimizer step."""
        self._running = False
        self._left: _State | None = None
        """How the last micro-step left the gradients; None where the next one begins anew."""
        self._zeroed = False
        self._earlier = False
        self._seen: Situation | None = None
        """What the last attempt's forward was given, once a step is run again."""

    def __call__(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`step(*args, **kwargs)`: forward, loss and backward of one micro-step, and nothing of the optimizer's.

        What it does outside the model (a list it appends to) is done again with it.

        Raises `OutOfPlansError` when memory runs out under the tightest plan, too. Other errors pass.
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
        # Whoever drops gradients inside the step has ended an optimizer step there.
        if not any(old and old != new for (old, _), (new, _) in zip(gradients, after, strict=True)):
            self._left = after
        return result

    def _guarded(self, run: Callable[[], Any]) -> Any:
        self._steps.append(_MicroStep(run, self._state()))
        if self._ranks is None:
            return self._run(self._steps[-1:])
        wrapped = self._ranks.wrapped
        last = wrapped.require_backward_grad_sync
        wrapped.require_forward_param_sync = False  # ranks would meet to exchange buffers, one of them twice
        with wrapped.no_sync():
            result = self._run(self._steps[-1:])
        if last:
            self._exchange(FINE)
            self._ranks.average()
        return result

    # --- running ---

    def _begin(self) -> None:
        """A new optimizer step begins."""
        self._steps.clear()
        self._refuse_lockstep()  # the model may have been wrapped or sharded since
        parameters = list(dict.fromkeys((*self.model.parameters(), *self.also)))
        self._devices = {parameter.device for parameter in parameters}
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        self._zeroed = bool(gradients)
        self._earlier = any(bool(gradient.any()) for gradient in gradients)

    def _refuse_lockstep(self) -> None:
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
        """Run micro-steps, as often as it takes. Returns the result of the last one."""
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
                everything = True  # for another rank's sake
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
        if failure.trained or compat.has_gradient_hooks(self._trained):  # fused optimizers leave no trace on weights
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
        for parameter in self._trained:
            if not self._zeroed:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _state(self) -> Callable[[], None]:
        """Read what a micro-step changes beside gradients: random state, and buffers (running averages)."""
        put_random_state_back = compat.random_state(self._devices)
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]

        def put_back() -> None:
            put_random_state_back()
            with torch.no_grad():
                for buffer, value in buffers:  # not by version: batch norms do not count theirs
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)

        return put_back

    def _gradients(self) -> _State:
        """Of which gradients there are, and how often each was changed."""
        found = (parameter.grad for parameter in self._trained)
        return tuple((0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in found)

    def _weights(self) -> _State:
        return tuple((id(parameter), parameter._version) for parameter in self._trained)

    def _collectives(self) -> int:
        return 0 if self._ranks is None else self._ranks.collectives()

    # --- plans ---

    def _tighten(self, step: _MicroStep, failure: _Failure) -> None:
        """Take the next plan. Raises `OutOfPlansError` when there is none."""
        try:
            taken = step_down(self.model, exact=self.exact)
        except HfCkptError as error:
            raise OutOfPlansError(f"{_first_line(failure.error)} hf_ckpt: {error}") from failure.error
        if taken is None and self._seen is None:  # one more try tells the sizes of the batch, if nothing else
            self._seen = Situation({})
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
        # Others must not wait for this rank; but where ranks meet inside steps they may wait for something else.
        if self._ranks is not None and (step.met or self._meetings == {False}):
            self._ranks.exchange(GAVE_UP, len(self.taken))
        found = dict(prediction.parts) if prediction is not None else None
        raise OutOfPlansError(" ".join(lines), parts=found, tried=self.taken) from failure.error

    def _predicted(self) -> tuple[Prediction | None, str]:
        record = installation(self.model)
        if record is None or self._seen is None or not self._seen.sizes:
            return None, "no forward of the model was seen"
        try:
            with paused(self.model):
                return prediction_of(self.model, record.plan, self._seen, trial), ""
        except Exception as error:  # it must not hide what went wrong first
            return None, str(error)

    def _write_report(self, failure: _Failure, prediction: Prediction | None) -> Sequence[Path]:
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
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if compat.accelerator_type() != "cuda":
            return (path,)
        snapshot = self.folder / (whose + SNAPSHOT_FILE)
        compat.dump_memory_snapshot(str(snapshot))
        return path, snapshot

    # --- ranks ---

    def _exchange(self, come_to: int) -> int:
        """The worst that a rank has come to; ranks adopt the tightest plan of all.

        Raises `OutOfPlansError` when a rank has no plan left.
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
    """In front of a Trainer: `class GuardedTrainer(hf_ckpt.OomGuardMixin, Trainer)`. Its `training_step` is guarded.

    `oom_guard` is the `OomGuard`, once training has begun; reports go to the output folder.
    """

    oom_guard: OomGuard | None = None

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        return guarded_training_step(self, super().training_step, model, inputs, *args, **kwargs)  # type: ignore[misc]


def guarded_training_step(
    trainer: Any, training_step: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """`training_step(model, inputs, ...)` of a Trainer under its guard, which it gets here."""
    guard = getattr(trainer, "oom_guard", None)
    if guard is None or guard.model is not model:
        groups = getattr(trainer.optimizer, "param_groups", ())
        also = [parameter for group in groups for parameter in group["params"]]
        guard = trainer.oom_guard = OomGuard(model, folder=trainer.args.output_dir, also=also)
    # A Trainer that takes labels out of its inputs must find them again.
    return guard(lambda: training_step(model, copy.copy(inputs), *args, **kwargs))


def _without_frames(error: BaseException) -> BaseException:
    """The error without its tracebacks, whose frames hold the activations of the step."""
    chain: list[BaseException] = [error]
    for seen in chain:
        seen.__traceback__ = None
        chain += [other for other in (seen.__cause__, seen.__context__) if other is not None and other not in chain]
    return error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip()
