"""What `hf_ckpt_out_of_memory.txt` says: where memory ran out, what filled it, and what needs less."""

from __future__ import annotations

import contextlib
import logging
import traceback
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import NoBlocksError, OutOfPlansError, reason_of
from hf_ckpt.spec.files import append_line
from hf_ckpt.units import format_bytes

log = logging.getLogger(__name__)


REPORT_FILE = "hf_ckpt_out_of_memory.txt"
"""Name of the file in the Trainer's output folder to which reports are appended."""
REPORTED = "_hf_ckpt_reported"
"""Attribute of an error that was reported."""
LARGEST = 10
"""Number of tensors that a report lists."""
ADVICE = {
    "evaluation": "a smaller `per_device_eval_batch_size`, or a `preprocess_logits_for_metrics`",
    "optimizer": 'an optimizer with a smaller state, such as `optim="adamw_8bit"`, or LoRA',
}
"""What ran -> what needs less memory there."""
LESS = 'a policy that keeps less, `"head": "auto"`, or fewer tokens; `hf-ckpt plan` compares them'
"""What needs less in a forward or backward."""


def report(error: BaseException, model: nn.Module | None = None) -> None:
    """Log where memory ran out, what filled it and what needs less. With a Trainer, append this to `REPORT_FILE`, too.

    Everything is read from the error's traceback, the model and the allocator. Nothing is recorded in training.

    Args:
        error: the error, caught outside of what ran out of memory. Another kind of error, and one that was reported
            before, are ignored. An `OutOfPlansError` was, because the guard reports each attempt.
        model: the model that ran; not needed with a Trainer.
    """
    if isinstance(error, OutOfPlansError) or hasattr(error, REPORTED) or not compat.devices.is_out_of_memory(error):
        return
    vars(error)[REPORTED] = True
    # Without the caller's frame, which still runs: until it ends, Python would keep a copy of its variables.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    objects = [frame.f_locals.get("self") for frame in frames]
    trainer: Any = next((value for value in objects if hasattr(value, "callback_handler")), None)
    model = getattr(trainer, "model", model)
    if model is None:
        return
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    what = _what_ran(frames)
    running = [names[id(value)] for value in objects if id(value) in names]
    place = f"{what} of {running[-1]}" if running else what  # what autograd has saved runs without Python
    lines = [f"hf_ckpt: out of memory in the {place}: {reason_of(error)}"]
    for device in compat.devices.accelerators(compat.distributed.devices_of_model(model)):
        with contextlib.suppress(RuntimeError):  # an allocator without statistics
            memory = compat.devices.allocator_bytes(device)
            lines.append(f"{device}: {format_bytes(memory.current)} used, {format_bytes(memory.reserved)} reserved")
    lines += _largest_variables(frames, names)
    with contextlib.suppress(NoBlocksError):
        record = installation(model)
        plan = record.plan if record is not None and record.enabled else "no plan of hf_ckpt is enabled"
        lines.append(str(plan))
    lines.append(f"less memory: {ADVICE.get(what, LESS)}")
    text = "\n  ".join(lines)
    log.error("%s", text)
    with contextlib.suppress(OSError, AttributeError):  # no folder, or no Trainer
        path = Path(trainer.args.output_dir) / REPORT_FILE
        append_line(path, text)
        compat.devices.write_snapshot(path.with_suffix(".pickle"))


def _what_ran(frames: Iterable[types.FrameType]) -> str:
    """Return what an error has ended: a key of `ADVICE`, `forward` or `backward`."""
    if any(isinstance(frame.f_locals.get("self"), torch.optim.Optimizer) for frame in frames):
        return "optimizer"
    functions = {frame.f_code.co_name for frame in frames}
    # Before `forward`, which an evaluation runs, too. It is the Trainer's method.
    if "evaluate" in functions:
        return "evaluation"
    # torch's call of autograd's engine, in `torch.autograd.graph`.
    return "backward" if "_engine_run_backward" in functions else "forward"


def _largest_variables(frames: Iterable[types.FrameType], names: dict[int, str]) -> list[str]:
    """Return a line for each of the largest tensors in variables of these calls, with the module that has it."""
    sizes = {}
    for frame in frames:
        where = names.get(id(frame.f_locals.get("self")), frame.f_code.co_name)
        for name, value in frame.f_locals.items():
            if isinstance(value, torch.Tensor):
                storage = compat.distributed.local(value).untyped_storage()
                # By address: several variables may share one storage.
                sizes[storage.data_ptr()] = storage.nbytes(), f"variable `{name}` {list(value.shape)} in {where}"
    return [f"{name}: {format_bytes(size)}" for size, name in sorted(sizes.values(), reverse=True)[:LARGEST]]
