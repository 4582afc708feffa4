"""Measures one way to run a step, on one model with an optimizer in its own process: gradients, peaks and times."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from comparison import first_difference, gradients_of
from harness import seconds_of
from inputs import optimizer_for, random_inputs
from machine import CpuAllocations, keep_freed_memory
from ways import COMPILED, OURS_COMPILED, Way

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.measure.memory import peak_meter, release_freed_memory
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.prediction.batches import step_of_model
from hf_ckpt.prediction.workload import Workload, real_model


class Session:
    """Holds the model with the way turned on, until `close`."""

    def __init__(self, workload: Workload, way: Way, seed: int = 0) -> None:
        keep_freed_memory()
        if way.group in (COMPILED, OURS_COMPILED):  # empty caches, but with what torch compiles once per machine
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="hf_ckpt_")
            torch.compile(lambda x: (x.sin() + 1).sum(-1))(torch.ones(8, 64))
        torch.manual_seed(seed)
        self.workload, self.seed = workload, seed
        self.device = compat.accelerator_type() or "cpu"
        with torch.device(self.device):
            self.model = real_model(workload).to(self.device).train()
        with torch.no_grad():
            for parameter in self.model.parameters():  # adapters start at zero, and so would half of all gradients
                if parameter.requires_grad and parameter.dim() > 1 and not parameter.any():
                    parameter.normal_(std=0.02)
        self.inputs = random_inputs(workload, self.model, self.device, seed)
        self.step_of = step_of_model(workload, self.model)
        self.optimizer = optimizer_for(workload.optimizer, self.model)
        self._turned_on = contextlib.ExitStack()
        self.running = self._turned_on.enter_context(way.turned_on(self.model))
        self.meter = peak_meter([torch.device(self.device)])

    def close(self) -> None:
        """Turn the way off."""
        self._turned_on.close()

    def facts(self) -> dict[str, int]:
        """Figures that are the same for all ways."""
        tokens = self.step_of.tokens * self.workload.accumulation
        return {"blocks": len(find_blocks(self.model).blocks), "tokens": tokens}

    def backward(self) -> None:
        """Compute the gradients of all micro-steps of one step."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(self.seed)
        dtype, enabled = self.step_of.autocast or torch.bfloat16, self.step_of.autocast is not None
        for _ in range(self.workload.accumulation):
            with self.running.around():
                with torch.autocast(self.device, dtype=dtype, enabled=enabled):
                    outputs = self.running.forward(**self.inputs)
                    loss = outputs.loss if self.step_of.loss is None else self.step_of.loss(outputs)
                del outputs
                (loss / self.workload.accumulation).backward()

    def step(self) -> None:
        """Run one optimizer step."""
        self.backward()
        self.optimizer.step()

    def compare(self, path: Path, is_reference: bool) -> dict[str, Any]:
        """Compare the first step's gradients with those in `path`, or write them there; then run two warm-up steps.

        `first_seconds` is the time of the first forward and backward, which compile graphs. `repeatable` says whether
        the reference gives the same bits twice: if not, no way can be bit-equal.
        """
        found: dict[str, Any] = {"first_seconds": seconds_of(self.backward)}
        if is_reference:
            torch.save({name: value.cpu() for name, value in gradients_of(self.model).items()}, path)
            self.backward()
            reference = torch.load(path, mmap=True)
            found["repeatable"] = first_difference(gradients_of(self.model), reference) is None
        else:
            reference = torch.load(path, mmap=True)
            gradients = gradients_of(self.model)
            found["first_difference"] = first_difference(gradients, reference)
            found["difference"] = _distance(gradients, reference) if found["first_difference"] else 0.0
            del gradients  # otherwise a step would hold two sets of them
        del reference
        for _ in range(2):
            self.step()
        return found

    def peaks(self) -> dict[str, int | None]:
        """Peaks of one step by the allocator and by the process's memory, and how often blocks were recomputed."""
        found: dict[str, int | None] = {}
        if self.device == "cpu":
            self.model.zero_grad(set_to_none=True)
            release_freed_memory()  # of what came before
            self.meter.reset()
            self.step()
            found["reserved_bytes"] = self.meter.peak_bytes()
        before = self.running.counts()
        found["allocated_bytes"] = self._allocated()
        after = self.running.counts()
        known = before is not None and after is not None
        found["recomputed"] = sum(after.values()) - sum(before.values()) if known else None
        if self.device != "cpu":
            found["reserved_bytes"] = self.meter.reserved_bytes()
        return found

    def _allocated(self) -> int | None:
        """The allocator's peak in one step."""
        self.model.zero_grad(set_to_none=True)
        if self.device == "cpu":
            held = LiveBytes(self.model, self.optimizer, self.inputs).start_bytes
            with CpuAllocations() as allocations:
                self.step()
            return held + allocations.peak_bytes
        compat.release_memory()
        self.meter.reset()
        self.step()
        return self.meter.peak_bytes()

    def largest_peak(self) -> int:
        """The peak of the second step, when the optimizer has its state."""
        self.step()
        peak = self._allocated()
        if peak is None:
            raise HfCkptError("this accelerator's allocator does not report a peak")
        return peak

    def live_peak(self) -> int:
        """The peak of one step, counted tensor by tensor."""
        self.model.zero_grad(set_to_none=True)
        with LiveBytes(self.model, self.optimizer, self.inputs, device=self.device) as live:
            self.step()
        return int(live.peak_bytes)

    def timed(self) -> float:
        """Seconds of one step."""
        return seconds_of(self.step)


def _distance(gradients: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Relative norm of the difference. Raises `HfCkptError` if other parameters have gradients."""
    if gradients.keys() != reference.keys():
        raise HfCkptError(f"gives {len(gradients)} gradients against {len(reference)}")
    apart = size = 0.0
    for name, value in gradients.items():
        right = reference[name].to(value.device).double()
        apart += float((value.double() - right).square().sum())
        size += float(right.square().sum())
    return (apart / size) ** 0.5 if size else 0.0
