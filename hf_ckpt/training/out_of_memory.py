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
PLACES = {
    # The outer ones come first: an evaluation may generate, and both run forwards.
    "evaluation": {"evaluate", "predict"},
    "generation": {"generate", "generate_batch"},
    "saving": {"_save_checkpoint", "save_model", "save_pretrained"},
    "loading of a batch": {"get_batch_samples", "_next_data"},
    "backward": {"_engine_run_backward"},  # torch's call of autograd's engine, in `torch.autograd.graph`
    "forward": {"compute_loss"},
}
"""What runs -> the functions that run it, of the Trainer, transformers or torch."""
LESS = 'a policy that saves less, `"head": "auto"`, or fewer tokens; `hf-ckpt plan` compares them'
ADVICE = {
    "evaluation": "a smaller `per_device_eval_batch_size`, or a `preprocess_logits_for_metrics`",
    "generation": "fewer or shorter completions at a time; no activations are kept for a backward here",
    "optimizer": 'an optimizer with a smaller state, such as `optim="adamw_8bit"`, or LoRA',
    "backward": LESS,
    "forward": LESS,
}
"""What runs -> what needs less memory there, as far as that is known."""


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
    try:
        _write(error, model)
    except Exception as failure:  # variables may hold anything; the error of the training must reach the caller
        log.error("hf_ckpt: out of memory: %s (no report: %s)", reason_of(error), reason_of(failure))


def place_of(error: BaseException) -> str:
    """Return what ran out of memory: `optimizer`, or a key of `PLACES`; empty if that is not known."""
    return _what_ran(_frames(error))


def _frames(error: BaseException) -> list[types.FrameType]:
    # Without the caller's frame, which still runs: until it ends, Python would keep a copy of its variables.
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]


def _write(error: BaseException, model: nn.Module | None) -> None:
    """Write the report of an error."""
    frames = _frames(error)
    objects = [frame.f_locals.get("self") for frame in frames]
    trainer: Any = next((value for value in objects if hasattr(value, "callback_handler")), None)
    model = getattr(trainer, "model", model) or _model_in(frames)
    if model is None:
        return
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    running = [names[id(value)] for value in objects if id(value) in names]
    what = _what_ran(frames) or ("forward" if running else "")
    # What autograd has saved runs without Python, so that no module is known.
    parts = [f" in the {what}" if what else "", f" of {running[-1]}" if what and running else ""]
    lines = [f"hf_ckpt: out of memory{''.join(parts)}: {reason_of(error)}"]
    for device in compat.devices.accelerators(compat.distributed.devices_of_model(model)):
        with contextlib.suppress(RuntimeError):  # an allocator without statistics
            memory = compat.devices.allocator_bytes(device)
            lines.append(f"{device}: {format_bytes(memory.current)} used, {format_bytes(memory.reserved)} reserved")
    lines += _largest_variables(frames, names)
    with contextlib.suppress(NoBlocksError):
        record = installation(model)
        plan = record.plan if record is not None and record.enabled else "no plan of hf_ckpt is enabled"
        lines.append(str(plan))
    if what in ADVICE:
        lines.append(f"less memory: {ADVICE[what]}")
    text = "\n  ".join(lines)
    log.error("%s", text)
    with contextlib.suppress(OSError, AttributeError):  # no folder, or no Trainer
        path = Path(trainer.args.output_dir) / REPORT_FILE
        append_line(path, text)
        compat.devices.write_snapshot(path.with_suffix(".pickle"))


def _model_in(frames: Iterable[types.FrameType]) -> nn.Module | None:
    """Return the first Hugging Face model in variables of these calls, with its wrappers; None without one."""
    values = (value for frame in frames for value in frame.f_locals.values())
    # By their types: proxies run code when they are asked for their class.
    modules = (value for value in values if issubclass(type(value), nn.Module))
    kind = compat.transformers.PreTrainedModel
    return next((module for module in modules if any(isinstance(part, kind) for part in module.modules())), None)


def _what_ran(frames: Iterable[types.FrameType]) -> str:
    """Return what an error has ended: `optimizer`, or the first key of `PLACES` that fits; empty if none does."""
    if any(isinstance(frame.f_locals.get("self"), torch.optim.Optimizer) for frame in frames):
        return "optimizer"
    functions = {frame.f_code.co_name for frame in frames}
    return next((what for what, names in PLACES.items() if names & functions), "")


def _largest_variables(frames: Iterable[types.FrameType], names: dict[int, str]) -> list[str]:
    """Return a line for each of the largest tensors in variables of these calls, with the module that has it."""
    sizes = {}
    for frame in frames:
        where = names.get(id(frame.f_locals.get("self")), frame.f_code.co_name)
        for name, value in frame.f_locals.items():
            if not issubclass(type(value), torch.Tensor):
                continue
            with contextlib.suppress(RuntimeError, ValueError):  # parameters of lazy modules have no shape yet
                # One that torch.func has wrapped has no storage, and a sparse one has two.
                for part in compat.torch.parts_with_storage(value):
                    storage = part.untyped_storage()
                    # By address: several variables may share one storage.
                    sizes[storage.data_ptr()] = storage.nbytes(), f"variable `{name}` {list(value.shape)} in {where}"
    return [f"{name}: {format_bytes(size)}" for size, name in sorted(sizes.values(), reverse=True)[:LARGEST]]
