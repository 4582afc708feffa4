"""`MemoryTimeCallback`: measure memory, step time and tokens of a Trainer run, and add them to its logs.

    Trainer(..., callbacks=[hf_ckpt.MemoryTimeCallback()])

Each log holds these figures for its window, which is the training steps since the last log, without evaluation and
saving.

| key | unit | meaning |
|---|---|---|
| `memory/peak_gib` | GiB | the largest memory use in the window, on the rank that used most |
| `memory/step_peak_gib` | GiB | under `budget` and `auto` on a CPU: tensors in the measured first step of the plans |
| `memory/predicted_gib` | GiB | the largest predicted peak of a step; unknown if a step ran without a prediction |
| `memory/reserved_gib` | GiB | the most that the allocator reserved on the device; on accelerators only |
| `time/step_s` | s | wall time of a step with its data loading, on the slowest rank |
| `tokens_per_second` | | tokens of all ranks, padding included, over that time |
| `padding` | | share of these tokens that the attention mask masks |
"""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from hf_ckpt import compat
from hf_ckpt.attach.described import describe, lost_blocks
from hf_ckpt.attach.hooks import warn_of_graph
from hf_ckpt.attach.passes import remind
from hf_ckpt.attach.process import Replaced
from hf_ckpt.attach.record import Installation, installation
from hf_ckpt.attach.switches import FUNCTION, is_on
from hf_ckpt.errors import NoBlocksError, PlanLostError, SpecError
from hf_ckpt.logs import tell, warn_once
from hf_ckpt.measure.levels import DeviceClock
from hf_ckpt.models.blocks import FoundBlocks, base_model, find_blocks
from hf_ckpt.spec.files import append_line
from hf_ckpt.spec.reading import READERS
from hf_ckpt.training.figures import Figures
from hf_ckpt.training.out_of_memory import report
from hf_ckpt.training.summary import summary

log = logging.getLogger(__name__)


METRICS_FILE = "hf_ckpt_metrics.jsonl"
"""Name of the file in the output folder that contains the figures, one JSON object per line."""

LAG_STEPS = 15
"""Micro-steps in which the callback reads how far the device lags behind the host. The first few may compile, so that
only their median counts."""
LEAST_LAG = 0.02
"""If the device lags by a smaller share of the step, it waits for the host."""
WAITS = 'hf_ckpt: the device waits for the host in each step. Set `"compile": "blocks"`, or use a larger batch.'


class MemoryTimeCallback(TrainerCallback):
    """Log peak memory (GiB), step time (seconds) and tokens per second of a Trainer run.

        Trainer(..., callbacks=[hf_ckpt.MemoryTimeCallback()])

    The figures are logged with the Trainer's own, under keys such as `memory/peak_gib` and `time/step_s`. They are
    also appended to `hf_ckpt_metrics.jsonl` in the output folder. At the end, a table shows what the plan predicted and
    what was measured. At the first step, the callback checks that all
    planned blocks are still checkpointed. If memory runs out, it writes a report: see `training.out_of_memory.report`.
    It says once if the device waits for the host.

    Raises `PlanLostError` at the first step if other code has removed the plan from a block.
    """

    def __init__(self) -> None:
        self._methods = Replaced()
        """The Trainer's methods that run inside those of the callback, because no event tells of an error."""

    # --- events, which the Trainer calls ---

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say who checkpoints, choose a clock and a memory meter, and write the first row of the metrics file.

        Raises `SpecError` for options of hf_ckpt in the arguments of a model that it is not installed on.
        """
        handler = next(compat.frames.calling_objects(CallbackHandler))  # it calls this
        if self not in handler.callbacks:
            return  # another callback of this kind has begun, and removed this one
        # A second callback of this kind, such as a program's beside a script's, would report everything twice.
        others = [callback for callback in handler.callbacks if type(callback) is not type(self)]
        # After the Trainer's flow, which decides about logging, and before the reporters, which read what this adds.
        place = next((after for after, one in enumerate(others, 1) if isinstance(one, DefaultFlowCallback)), 0)
        # A new list, because the handler iterates over the old one: it would skip one, or call this one twice.
        handler.callbacks = [*others[:place], self, *others[place:]]
        model: nn.Module = kwargs["model"]
        record = _record(model)
        with contextlib.suppress(NoBlocksError):
            blocks = find_blocks(model)
            if record is None:
                _refuse_options_without_hf_ckpt(args)
            tell("hf_ckpt: %s: %s", blocks.class_name, _who_checkpoints(blocks, record))
        if record is not None:
            remind(base_model(model), record)
        devices = compat.distributed.devices_of_model(model)
        self._figures = Figures(devices)
        self._methods.close()  # of a run that an error ended outside of them
        trainer: Any = next(compat.frames.calling_objects(Trainer))
        self._methods.replace(trainer, "training_step", self._micro_step)
        for name in ("_run_epoch", "_evaluate", "_save_checkpoint"):
            if hasattr(trainer, name):  # transformers 4 has no `_run_epoch`
                self._methods.replace(trainer, name, self._reporting)
        self._reads_lags = bool(compat.devices.accelerators(devices)) and not trainer.is_deepspeed_enabled
        """Whether to read how far the device lags. Under DeepSpeed, accelerate runs the optimizer's step within the
        backward (`DeepSpeedEngineWrapper.backward`), so that a micro-step is not one of the model only."""
        self._lags: list[float] = []
        """How far it lagged in each micro-step so far, relative to the time of that."""
        self._write(args, state, "start", world_size=args.world_size)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """If no time is counted, as before the first step, check the plan and begin to count.

        Raises `PlanLostError` if a planned block has lost its checkpointing function.
        """
        if self._figures.since is not None:
            return
        lost = () if _record(kwargs["model"]) is None else lost_blocks(kwargs["model"])
        if lost:
            raise PlanLostError(lost)
        self._figures.go_on()

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Warn if torch.compile prevents a part of the plan."""
        record = _record(kwargs["model"])
        if record is None or not record.enabled:
            return
        # The hooks of the model plan for a batch. In a graph of the whole model they do not run.
        saw_no_forward = record.spec.is_planned and record.session is None
        if saw_no_forward or record.heads.is_in_graph or record.compiled_by_others():
            warn_of_graph()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step, and look at the plan that ran."""
        self._figures.steps += 1
        self.on_substep_end(args, state, control, **kwargs)
        if not control.should_log:  # otherwise `on_log` follows, and waits for the accelerator
            self._pause_for_others(control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop counting if evaluation or saving follows without a log before it."""
        # The Trainer logs a step only once: if the last step was logged already, no log follows.
        if not control.should_log or not self._figures.steps:
            self._pause_for_others(control)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the figures of the window that ends now to the Trainer's log and to the metrics file."""
        logs = kwargs.get("logs")
        if logs is None or "loss" not in logs:  # the log of an evaluation, or the totals at the end
            return
        metrics = self._figures.end_window()
        self._pause_for_others(control)
        if metrics is None:
            return
        values = {key: value for key, value in metrics.items() if value is not None}  # reporters cannot take None
        logs.update(values)
        if state.log_history:
            state.log_history[-1].update(values)
        self._write(args, state, "log", **metrics)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the summary of the run, including steps since the last log, and log it as a table."""
        self._methods.close()
        self._figures.end_window()
        figures = self._figures.of_run()
        self._write(args, state, "end", **figures)
        if self._figures.windows and state.is_world_process_zero:
            model = kwargs["model"]
            lines = summary(None if _record(model) is None else describe(model), figures, len(self._figures.windows))
            tell("\n%s", "\n".join(lines))  # the Trainer's progress bar has not ended its line

    # --- around methods of the Trainer ---

    def _reporting(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method of the Trainer. If memory runs out, write the report."""
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            self._methods.close()
            report(error)
            raise

    def _micro_step(self, training_step: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run `training_step`, and count its batch. Say once if the device waits for the host.

        If it does, the device has done nearly all of a step when the host has issued all of it.
        """
        record = _record(model)
        loss = self._timed_step(training_step, record, model, *args, **kwargs)
        self._figures.count(kwargs.get("inputs", args[0] if args else None), record)
        return loss

    def _timed_step(
        self, training_step: Callable[..., Any], record: Installation | None, *args: Any, **kwargs: Any
    ) -> Any:
        # A session waits for the device when it stores a measured step, which is in the next one.
        if not self._reads_lags or (record is not None and record.measuring is not None):
            return self._reporting(training_step, *args, **kwargs)
        host = DeviceClock()
        clock = self._figures.clock
        began = clock.stamp()
        host_began = host.stamp()
        loss = self._reporting(training_step, *args, **kwargs)
        issued_nanoseconds = host.between(host_began, host.stamp())
        spent_nanoseconds = clock.between(began, clock.stamp())
        if spent_nanoseconds > 0:  # a coarse clock may not have moved
            self._lags.append(1 - issued_nanoseconds / spent_nanoseconds)
        if len(self._lags) == LAG_STEPS:
            self._reads_lags = False  # to read it, the host waits for the device
            if statistics.median(self._lags) < LEAST_LAG:
                tell(WAITS)
        return loss

    # --- what the events do ---

    def _pause_for_others(self, control: TrainerControl) -> None:
        """If evaluation, saving or the end follows, exclude its time and memory from the window."""
        others = control.should_evaluate or control.should_save or control.should_training_stop
        if others:
            self._figures.pause()

    def _write(self, args: Any, state: TrainerState, event: str, **row: Any) -> None:
        """Append a row to the metrics file, on the first rank only; warn once if that fails."""
        if not state.is_world_process_zero or args.output_dir is None:
            return
        path = Path(args.output_dir) / METRICS_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_line(path, json.dumps({"event": event, "step": state.global_step, **row}))
        except OSError as error:  # no reason to end a training
            warn_once(log, "hf_ckpt: figures are missing in the metrics file: %s Training continues.", str(error))


def _record(model: nn.Module) -> Installation | None:
    """Return the record on a model; None if nothing is or can be installed."""
    try:
        return installation(model)
    except NoBlocksError:  # the callback also measures models that hf_ckpt cannot install on
        return None


def _refuse_options_without_hf_ckpt(args: Any) -> None:
    """Raise `SpecError` for options that transformers would pass to torch, which fails with them in the first step."""
    name = f"{compat.transformers.FLAG_NAME}_kwargs"
    options = getattr(args, name, None) or {}
    of_transformers = {*compat.transformers.TORCH_OPTIONS, "every_n_layers", "offload"}
    ours = [f"`{key}`" for key in options if key in READERS and key not in of_transformers]
    if ours and getattr(args, compat.transformers.FLAG_NAME):
        needs = "needs" if len(ours) == 1 else "need"
        text = f"{needs} hf_ckpt, which is not installed on this model: call hf_ckpt.install(model) before the training"
        raise SpecError([f"{', '.join(ours)} {text}, or start the script with `python -m hf_ckpt`."], name)


def _who_checkpoints(blocks: FoundBlocks, record: Installation | None) -> str:
    """Return in one line whether blocks are checkpointed, how many, and by whom."""
    functions = [getattr(module, FUNCTION) for module in blocks.modules.values() if is_on(module)]
    if not functions:
        return "no block is checkpointed"
    whose = "hf_ckpt"
    if record is None or not record.enabled:
        is_reentrant = getattr(functions[0], "keywords", {}).get("use_reentrant", True)  # as torch reads it
        whose = "transformers, reentrant" if is_reentrant else "transformers, non-reentrant"
    return f"{len(functions)} of {len(blocks.blocks)} blocks are checkpointed by {whose}"
