"""One way to run a step, on one model with an optimizer, alone in its process: its gradients, peaks and times."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from machine import CpuAllocations, keep_freed_memory
from torch import nn
from turns import seconds_of
from ways import COMPILED, OURS_COMPILED, Way

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.measure.memory import peak_meter, release_freed_memory
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.prediction.batches import real_inputs, step_of_model
from hf_ckpt.prediction.optimizers import optimizer_for
from hf_ckpt.prediction.workload import Workload, real_model


class Session:
    """Holds the model, with the way turned on, until `close`."""

    def __init__(self, workload: Workload, way: Way, seed: int = 0) -> None:
        keep_freed_memory()
        if way.group in (COMPILED, OURS_COMPILED):
            _begin_to_compile()
        torch.manual_seed(seed)
        self.workload, self.seed = workload, seed
        self.device = compat.accelerator_type() or "cpu"
        with torch.device(self.device):
            self.model = real_model(workload).to(self.device).train()
        with torch.no_grad():
            for parameter in self.model.parameters():  # adapters begin at zero: half of all gradients would be, too
                if parameter.requires_grad and parameter.dim() > 1 and not parameter.any():
                    parameter.normal_(std=0.02)
        self.inputs = real_inputs(workload, self.model, self.device, seed)
        self.step_of = step_of_model(workload, self.model)
        self.optimizer = _optimizer(workload, self.model)
        self._turned_on = contextlib.ExitStack()
        self.running = self._turned_on.enter_context(way.turned_on(self.model))
        self.meter = peak_meter()

    def close(self) -> None:
        """Turn the way off again."""
        self._turned_on.close()

    def facts(self) -> dict[str, int]:
        """What is the same for all ways."""
        tokens = self.step_of.tokens * self.workload.accumulation
        return {"blocks": len(find_blocks(self.model).blocks), "tokens": tokens}

    def backward(self) -> None:
        """Gradients of all micro-steps of one step."""
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
        """One optimizer step."""
        self.backward()
        self.optimizer.step()

    def compare(self, path: Path, is_reference: bool) -> dict[str, Any]:
        """Gradients of the first step against those in `path`, or into it; then what warms up."""
        first = seconds_of(self.backward)
        gradients = gradients_of(self.model)
        found: dict[str, Any] = {}
        if is_reference:
            torch.save({name: value.cpu() for name, value in gradients.items()}, path)
            self.backward()
            again = gradients_of(self.model)
            found["repeatable"] = compared(again, torch.load(path, mmap=True))["first_difference"] is None
            del again
        else:
            reference = torch.load(path, mmap=True)
            if gradients.keys() != reference.keys():
                raise HfCkptError(f"gives {len(gradients)} gradients against {len(reference)}")
            found = compared(gradients, reference)
            del reference
        del gradients  # or a step would hold two sets of them
        found["first_seconds"] = first
        for _ in range(2):
            self.step()
        return found

    def first_steps(self) -> tuple[float, float]:
        """Seconds of forward and backward in the first step, in which graphs are compiled, and in the third."""
        first = seconds_of(self.backward)
        self.backward()
        return first, seconds_of(self.backward)

    def peaks(self) -> dict[str, int | None]:
        """Peaks of one step, and how much was run again in it."""
        found: dict[str, int | None] = {}
        if self.device == "cpu":
            self.model.zero_grad(set_to_none=True)
            release_freed_memory()  # of what came before
            self.meter.reset()
            self.step()
            found["reserved_bytes"] = self.meter.peak_bytes()
        before = self._recomputed()
        found["allocated_bytes"] = self._allocated()
        after = self._recomputed()
        found["recomputed"] = None if after is None or before is None else after - before
        if self.device != "cpu":
            found["reserved_bytes"] = self.meter.reserved_bytes()
        return found

    def _recomputed(self) -> int | None:
        counts = self.running.counts()
        return None if counts is None else sum(counts.values())

    def _allocated(self) -> int | None:
        """Peak of the allocator in one step."""
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
        """Peak of the second step, when the optimizer has its state."""
        self.step()
        peak = self._allocated()
        if peak is None:
            raise HfCkptError("this accelerator's allocator tells no peak")
        return peak

    def live_peak(self) -> int:
        """Peak of one step, counted tensor by tensor."""
        self.model.zero_grad(set_to_none=True)
        with LiveBytes(self.model, self.optimizer, self.inputs, device=self.device) as live:
            self.step()
        return int(live.peak_bytes)

    def timed(self) -> float:
        """Seconds of one step."""
        return seconds_of(self.step)


def _begin_to_compile() -> None:
    """Let the compiler start with empty caches, and do what it does once on a machine, such as compiling headers."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="hf_ckpt_")
    torch.compile(lambda x: (x.sin() + 1).sum(-1))(torch.ones(8, 64))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> gradient of every parameter that has one."""
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def compared(gradients: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The first of the gradients that is not bit-equal to the reference's, and how far all are from it."""
    first, apart, size = None, 0.0, 0.0
    for name, value in gradients.items():
        right = reference[name].to(value.device)
        if not torch.equal(value, right):
            first = first or name
            apart += float((value.double() - right.double()).square().sum())
        size += float(right.double().square().sum())
    return {"first_difference": first, "difference": (apart / size) ** 0.5 if size else 0.0}


def _optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    found = optimizer_for(workload, model)
    if found is None:
        raise HfCkptError(f"a benchmark trains with an optimizer of PyTorch's own, but not with {workload.optimizer}.")
    return found
