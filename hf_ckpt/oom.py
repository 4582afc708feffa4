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
import json
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.autoplan import Situation, prediction_of
from hf_ckpt.errors import HfCkptError, OutOfPlansError
from hf_ckpt.install import installation, paused, step_down, trial, watching
from hf_ckpt.plan import Prediction
from hf_ckpt.units import format_bytes

log = logging.getLogger(__name__)

REPORT_FILE = "hf_ckpt_oom.json"
SNAPSHOT_FILE = "hf_ckpt_oom.pickle"
AGAIN = "the same plan, after giving cached memory back"
BUCKET_BYTES = 25 << 20
"""As torch's DistributedDataParallel reduces gradients."""

_again: contextvars.ContextVar[bool] = contextvars.ContextVar("hf_ckpt_again", default=False)


def runs_again() -> bool:
    """Whether the step that runs now has been begun before."""
    return _again.get()


_State = tuple[tuple[int, int], ...]


@dataclasses.dataclass
class _MicroStep:
    """What it takes to run one again."""

    run: Callable[[], Any]
    put_random_state_back: Callable[[], None]
    meets_others: bool = False
    """Whether it took part in collective operations of its own."""


@dataclasses.dataclass(frozen=True)
class _Failure:
    error: BaseException
    trace: str
    """Where it was raised."""
    touched: bool
    """Whether gradients were changed by then."""
    hopeless: str | None = None
    """Why the step cannot be run again, if so."""


class OomGuard:
    """Run micro-steps; where one runs out of memory, tighten the plan and run it again.

    The plan is that of `hf_ckpt.install`, and it stays tight. On a model without one, nothing is installed until memory
    runs out for the first time. The order is: a smaller budget for a planned policy; `selective`, `full`, hidden states
    in host memory, and the head in chunks, which comes before offloading where logits weigh more.

    Under DistributedDataParallel every rank runs its own micro-steps again, so that none waits for another; gradients
    are averaged by the guard, after all ranks are through with the step, and ranks adopt each other's tighter plans.
    Reduction no longer overlaps with backward, and buffers are not broadcast.

    Args:
        model: what the training calls: a PreTrainedModel, plain or wrapped by PEFT or DistributedDataParallel.
        exact: leave out the chunked head, whose gradients agree to rounding only.
        folder: where the report is written when no plan is left; None for nowhere.

    Raises:
        HfCkptError: for FSDP and DeepSpeed, whose ranks wait for each other inside a forward, and for communication
            hooks of DistributedDataParallel.
    """

    def __init__(self, model: nn.Module, *, exact: bool = False, folder: str | Path | None = ".") -> None:
        if compat.steps_in_lockstep(model):
            raise HfCkptError(
                "OomGuard cannot work with FSDP or DeepSpeed: their ranks wait for each other inside every forward and "
                "backward, so that one that runs out of memory cannot run a step again. Plan for the largest batch "
                "instead (`policy: budget`)."
            )
        self.model, self.exact = model, exact
        self.folder = None if folder is None else Path(folder)
        self.taken: list[str] = []
        """What was changed so far, in order."""
        self.attempts = 0
        """Attempts at micro-steps that ran out of memory."""
        self._wrapped: Any = compat.data_parallel(model)
        own = None if self._wrapped is None else compat.own_reduction(self._wrapped)
        if own is not None:
            raise HfCkptError(f"OomGuard averages the gradients of all ranks itself, which {own} does not allow.")
        self._trained: list[nn.Parameter] = []
        self._devices: set[torch.device] = set()
        self._steps: list[_MicroStep] = []
        """Since the last optimizer step."""
        self._left: _State | None = None
        """How the last micro-step left the gradients."""
        self._zeroed = False
        self._earlier = False
        self._seen: Situation | None = None
        """What the last attempt's forward was given, once a step is run again."""

    def __call__(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`step(*args, **kwargs)`: forward, loss and backward of one micro-step, and nothing of the optimizer's.

        What it does outside the model (a list it appends to) is done again with it.

        Raises `OutOfPlansError` when memory runs out under the tightest plan, too. Other errors pass.
        """
        if self._left is None or self._left != self._gradients():
            self._begin()
        self._left = self._seen = None
        run = functools.partial(step, *args, **kwargs)
        self._steps.append(_MicroStep(run, compat.random_state(self._devices)))
        wrapped = self._wrapped
        if wrapped is None:
            result = self._run(self._steps[-1:])
        else:
            meets = wrapped.require_backward_grad_sync
            wrapped.require_forward_param_sync = False  # ranks would meet to exchange buffers, one of them twice
            with wrapped.no_sync():
                result = self._run(self._steps[-1:])
            if meets:
                self._meet(failed=False)
        self._left = self._gradients()
        return result

    # --- running ---

    def _begin(self) -> None:
        """A new optimizer step begins."""
        self._steps.clear()
        parameters = list(self.model.parameters())
        self._devices = {parameter.device for parameter in parameters}
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        self._zeroed = bool(gradients)
        self._earlier = any(bool(gradient.any()) for gradient in gradients)

    def _run(self, pending: list[_MicroStep]) -> Any:
        """Run micro-steps, as often as it takes. Returns the result of the last one."""
        result, again = None, False
        while pending:
            step = pending[0]
            if again:
                step.put_random_state_back()
            result, failure = self._attempt(step, again)
            if failure is None:
                pending = pending[1:]
                continue
            self.attempts += 1
            if failure.hopeless is not None:
                log.error("hf_ckpt: out of memory:\n%s", failure.trace)
                raise OutOfPlansError(f"{_first_line(failure.error)} hf_ckpt: {failure.hopeless}") from failure.error
            self._tighten(failure)
            again = True
            if failure.touched:
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
            if not compat.is_out_of_memory(raised):
                raise
            trace = "".join(traceback.format_exception(raised))
            error = _without_frames(raised)
        finally:
            step.meets_others |= self._collectives() != met
        touched = gradients != self._gradients()
        hopeless = self._hopeless(step, touched, weights != self._weights())
        compat.release_memory()
        return None, _Failure(error, trace, touched, hopeless)

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

    def _hopeless(self, step: _MicroStep, touched: bool, trained: bool) -> str | None:
        """Why a failed step cannot be run again; None if it can."""
        if trained:
            return "Weights were changed in the backward already (an optimizer inside it), so it cannot be run again."
        if touched and self._earlier:
            return "There were gradients before the guarded steps began, which cannot be made again."
        if step.meets_others or (touched and any(other.meets_others for other in self._steps)):
            return "Ranks met in the step itself (metrics that are gathered), so one alone cannot run it again."
        return None

    def _drop_gradients(self) -> None:
        for parameter in self._trained:
            if not self._zeroed:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _gradients(self) -> _State:
        """Of which gradients there are, and how often each was changed."""
        found = (parameter.grad for parameter in self._trained)
        return tuple((0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in found)

    def _weights(self) -> _State:
        return tuple((id(parameter), parameter._version) for parameter in self._trained)

    def _collectives(self) -> int:
        return 0 if self._wrapped is None else compat.collectives(self._wrapped)

    # --- plans ---

    def _tighten(self, failure: _Failure) -> None:
        """Take the next plan. Raises `OutOfPlansError` when there is none."""
        taken = step_down(self.model, exact=self.exact)
        if taken is None and self._seen is None:  # one more try tells the sizes of the batch, if nothing else
            self._seen = Situation({})
            taken = AGAIN
        if taken is None:
            self._give_up(failure)
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

    def _give_up(self, failure: _Failure) -> None:
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
        lines += [f"Written: {path}." for path in self._write_report(failure, prediction)]
        lines.append("What is left to do: fewer sequences or tokens in a micro-step, or training fewer weights.")
        log.error("hf_ckpt: out of memory for the last time:\n%s", failure.trace)
        if failure.touched:
            self._drop_gradients()
        if self._wrapped is not None:
            with contextlib.suppress(OutOfPlansError):
                self._meet(failed=True)  # others must not wait for this rank
        found = dict(prediction.parts) if prediction is not None else None
        raise OutOfPlansError(" ".join(lines), parts=found, tried=self.taken) from failure.error

    def _predicted(self) -> tuple[Prediction | None, str]:
        record = installation(self.model)
        if record is None or self._seen is None or not self._seen.sizes:
            return None, "no forward of the model was seen"
        try:
            with paused(self.model):
                return prediction_of(self.model, record.plan, self._seen, trial), ""
        except (HfCkptError, RuntimeError) as error:  # it must not hide what went wrong first
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

    def _meet(self, *, failed: bool) -> None:
        """All ranks are through with a step: average the gradients, and take the tightest plan of all.

        Raises `OutOfPlansError` when a rank has no plan left.
        """
        parameters = self._reduced()
        there = [parameter.grad is not None for parameter in parameters]
        device = parameters[0].device
        group = self._wrapped.process_group
        state = torch.tensor([failed, len(self.taken), *there], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(state, torch.distributed.ReduceOp.MAX, group)
        somewhere, most, *used = state.tolist()
        if somewhere:
            raise OutOfPlansError(
                "another rank is out of memory. It has no tighter plan left; its own error says more."
            )
        _average([parameter for parameter, used_now in zip(parameters, used, strict=True) if used_now], group)
        while len(self.taken) < most:
            taken = step_down(self.model, exact=self.exact)
            self.taken.append("nothing is tighter" if taken is None else taken)
            log.info("hf_ckpt: another rank ran out of memory, so this one goes on with: %s.", self.taken[-1])

    def _reduced(self) -> list[nn.Parameter]:
        ignored = getattr(self._wrapped, "parameters_to_ignore", ())
        named = self._wrapped.module.named_parameters()
        return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]


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
        guard = trainer.oom_guard = OomGuard(model, folder=trainer.args.output_dir)
    # A Trainer that takes labels out of its inputs must find them again.
    return guard(lambda: training_step(model, copy.copy(inputs), *args, **kwargs))


def _average(parameters: Sequence[nn.Parameter], group: Any) -> None:
    """Average gradients over ranks, bucket by bucket, as DistributedDataParallel does. One that is missing is zero."""
    share = 1.0 / torch.distributed.get_world_size(group)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([parameter.grad for parameter in parameters]):  # type: ignore[misc]
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).mul_(share)
        torch.distributed.all_reduce(flat, group=group)
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type and device, about `BUCKET_BYTES` together."""
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        if bucket and (
            (gradient.dtype, gradient.device) != (bucket[0].dtype, bucket[0].device)
            or sum(other.nbytes for other in bucket) + gradient.nbytes > BUCKET_BYTES
        ):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _without_frames(error: BaseException) -> BaseException:
    """The error without its tracebacks, whose frames hold the activations of the step."""
    chain: list[BaseException] = [error]
    for seen in chain:
        seen.__traceback__ = None
        chain += [other for other in (seen.__cause__, seen.__context__) if other is not None and other not in chain]
    return error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip()
