"""Meters of the peak of one training step that begin and end in hooks, where no `with` block can be put around it."""

from __future__ import annotations

from typing import Any, Protocol

from hf_ckpt import compat
from hf_ckpt.measure.live import Holder, LiveBytes
from hf_ckpt.measure.memory import PeakMeter, peak_meter


class StepMeter(Protocol):
    """A meter that runs from when it was made until `stop`."""

    def stop(self) -> int | None:
        """End the measurement, and return the peak in bytes; None where it is unknown."""


def step_meter(limit_bytes: int, *holders: Holder) -> StepMeter | None:
    """Begin to measure a step by the accelerator's allocator, or by a count of live bytes on a CPU.

    Args:
        limit_bytes: the peak that matters: see `AllocatedStep`.
        holders: what holds tensors that are alive already; see `LiveBytes`.

    Returns None for an accelerator without an allocator's figures.
    """
    if compat.accelerator_type() is not None:
        meter = peak_meter()
        return AllocatedStep(meter, limit_bytes) if meter.exact else None
    return CountedStep(*holders)


class AllocatedStep:
    """The peak of the accelerator's allocator.

    The allocator has one peak for all who read it. It is reset only where what came before lies above `limit_bytes`, so
    that it would hide the step's; a lower one does not matter.
    """

    def __init__(self, meter: PeakMeter, limit_bytes: int) -> None:
        self._meter = meter
        if (meter.peak_bytes() or 0) > limit_bytes:
            meter.reset()

    def stop(self) -> int | None:
        """Return the largest bytes allocated since the allocator's figures were reset last."""
        return self._meter.peak_bytes()


class CountedStep(LiveBytes):  # type: ignore[no-untyped-call]
    """A count of the bytes of live tensors that is on from the beginning. It slows the step down.

    What else sees every operation, such as torch's counter of operations, goes on as before.
    """

    supports_higher_order_operators = True

    def __init__(self, *holders: Holder) -> None:
        super().__init__(*holders)
        self._stopped = False
        compat.enter_dispatch_mode_below(self)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch that what is compiled stays compiled; it is counted by what it returns."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._stopped:  # in the middle of an operation, when it could not be left
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.timeline.clear()
        return result

    def stop(self) -> int | None:
        """Return the most bytes that were alive at once."""
        self._stopped = True
        compat.leave_dispatch_mode(self)
        return self.peak_bytes
