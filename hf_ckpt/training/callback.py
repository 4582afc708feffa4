"""`MemoryTimeCallback`: measure the peak memory and the step time of a Trainer run, and add them to its logs.

    Trainer(..., callbacks=[hf_ckpt.MemoryTimeCallback()])

Each log holds these figures for its window, which is the training steps since the last log, without evaluation and
saving:

| key | unit | meaning |
|---|---|---|
| `memory/peak_gib` | GiB | the largest memory use in the window, on the rank that used most |
| `memory/reserved_gib` | GiB | the most that the allocator reserved on the device; on accelerators only |
| `memory/head_gib` | GiB | output of the head (logits), if a head was found; loss and gradient need a multiple |
| `memory/predicted_gib` | GiB | the largest predicted peak of the plans in the window; only with `budget` and `auto` |
| `time/step_s` | s | wall time of a step with its data loading, on the slowest rank |
| `time/tokens_per_s` | 1/s | tokens in `input_ids` of all ranks; `time/samples_per_s` without `input_ids` |
| `ckpt/mismatch` | checks | checks that found a block whose backward did not get what its forward saved |
"""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from hf_ckpt import compat
from hf_ckpt.attach.attach import lost_blocks
from hf_ckpt.attach.hooks import remind
from hf_ckpt.attach.record import FUNCTION, IN_GRAPH, Installation, installation, is_on
from hf_ckpt.engines.head.logits import Logits
from hf_ckpt.errors import NoBlocksError, PlanLostError, SpecError
from hf_ckpt.logs import tell, warn_once
from hf_ckpt.measure.clocks import TrainingClock
from hf_ckpt.measure.memory import PeakMeter, spare_bytes
from hf_ckpt.models.blocks import FoundBlocks, base_model, find_blocks, vocabulary_head
from hf_ckpt.spec.files import append_line
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.reading import READERS
from hf_ckpt.training.session import Planned
from hf_ckpt.training.watch import Watch
from hf_ckpt.units import format_bytes, to_gib

log = logging.getLogger(__name__)


HEAD_SHARE = 0.25
"""The callback warns above this share of the peak: with loss and gradient, the head's output is most of it then."""
METRICS_FILE = "hf_ckpt_metrics.jsonl"
"""Name of the file in the output folder that contains the figures, one JSON object per line."""
Metrics = dict[str, float | None]
"""Key of the table above -> its value, or None if it is unknown."""


class MemoryTimeCallback(TrainerCallback):
    """Log peak memory (GiB) and step time (seconds) of a Trainer run.

        Trainer(..., callbacks=[hf_ckpt.MemoryTimeCallback()])

    The figures are logged with the Trainer's own, under keys such as `memory/peak_gib` and `time/step_s`. They are
    also appended to `hf_ckpt_metrics.jsonl` in the output folder. At the first step, the callback checks that all
    planned blocks are still checkpointed. It warns once if the logits need more than a quarter of the peak, which no
    plan for blocks can change.

    Args:
        check_every: for a model that hf_ckpt does not checkpoint (transformers itself does, for example): in every n-th
            training forward, check whether the backward of one block gets what its forward saved. Blocks take turns. 0
            checks nothing. Under a plan of hf_ckpt, the spec's `check_every` applies instead.
        on_mismatch: what happens if such a check finds a difference: `warn`, or `raise` to stop the run before the
            optimizer steps.

    Raises `PlanLostError` at the first step if other code has removed the plan from a block.
    """

    def __init__(self, *, check_every: int = 100, on_mismatch: str = "warn") -> None:
        self.check_every, self.on_mismatch = check_every, on_mismatch
        self._hooks = contextlib.ExitStack()
        """Removes the hooks of the training."""
        self._forget()

    def _forget(self) -> None:
        """Remove the hooks of the last training and forget its figures."""
        self._hooks.close()
        self._clock = TrainingClock()
        self._meter = PeakMeter(())
        self._mismatches = 0
        """Number of checks that found a difference before the window."""
        self._windows: list[Metrics] = []
        self._counts = _Counts(self._forget)
        self._written: list[Plan] = []
        """The plans that were written to the metrics file."""
        self._begin_window()

    def _begin_window(self) -> None:
        self._peak: float | None = None
        self._reserved: float | None = None
        self._predicted: float | None = None
        """The largest predicted peak of the plans in the window."""
        self._counts.tokens = self._counts.head_bytes = 0

    # --- events, which the Trainer calls ---

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say who checkpoints, choose a memory meter, hook the model, and write the first row of the metrics file.

        Raises `SpecError` for options of hf_ckpt in the arguments of a model that it is not installed on.
        """
        self._forget()
        handler = compat.transformers.running(CallbackHandler)
        assert handler is not None  # it calls this
        # After the Trainer's flow, which decides about logging, and before the reporters, which read what this adds.
        handler.callbacks.remove(self)
        handler.callbacks.insert(1, self)
        model: nn.Module = kwargs["model"]
        record = _record(model)
        with contextlib.suppress(NoBlocksError):
            found = find_blocks(model)
            if record is None:
                _refuse_options_without_hf_ckpt(args)
            tell("hf_ckpt: %s: %s", found.model, _who_checkpoints(found, record))
            if record is None and self.check_every:  # otherwise the record has its own
                self._counts.watch = Watch(self.check_every, self.on_mismatch)
            head = vocabulary_head(found.base)
            if head is not None:
                self._hooks.callback(head.register_forward_hook(self._counts.see_head).remove)
        devices = compat.distributed.devices_of_model(model)
        self._clock = TrainingClock(devices)
        self._meter = PeakMeter(devices)
        self._hooks.callback(model.register_forward_pre_hook(self._counts.see_model, with_kwargs=True).remove)
        spec = None
        plan = None
        if record is not None:
            remind(base_model(model), record)
            spec = record.spec.to_dict()
            if record.enabled and not record.measuring:
                plan = record.plan.to_dict()
        self._write(
            args, state, "start", memory_source=self._meter.source, world_size=args.world_size, spec=spec, plan=plan
        )

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """If the clock is paused, as at the first step, check the plan and start the clock.

        Raises `PlanLostError` if a planned block has lost its checkpointing function.
        """
        if self._clock.running_since is None:
            lost = () if _record(kwargs["model"]) is None else lost_blocks(kwargs["model"])
            if lost:
                raise PlanLostError(lost)
            self._meter.reset()
            self._clock.resume()

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write each plan of `budget` or `auto` to the metrics file once; warn if torch.compile prevents a part."""
        record = _record(kwargs["model"])
        if record is None or not record.enabled:
            return
        planned: Planned | None = record.planned
        saw_no_forward = record.spec.is_planned and planned is None
        if saw_no_forward or record.heads.last == IN_GRAPH or record.compiled_by_others():
            warn_once(
                log,
                "hf_ckpt: a part of the plan has no effect, because torch.compile has the model or its head in a "
                "graph: see hf_ckpt.describe(model). Leave `torch_compile` (or accelerate's dynamo settings) out; "
                '`compile: "blocks"` compiles the blocks.',
            )
        if planned is None or planned.measures:
            return
        prediction = planned.plan.prediction
        self._predicted = _over(max, (self._predicted, None if prediction is None else prediction.peak_bytes))
        if any(planned.plan is plan for plan in self._written):
            return
        self._written.append(planned.plan)
        self._write(args, state, "plan", batch=str(planned.shape), plan=planned.plan.to_dict())

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step, and record a plan that was made in it."""
        self._clock.steps += 1
        self.on_substep_end(args, state, control, **kwargs)
        if not control.should_log:  # otherwise `on_log` follows, and waits for the accelerator
            self._pause_for_others(control, kwargs["model"])

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Pause the clock if evaluation or saving follows without a log before it."""
        # The Trainer logs a step only once: if the last step was logged already, no log follows.
        if not control.should_log or not self._clock.steps:
            self._pause_for_others(control, kwargs["model"])

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the figures of the window that ends now to the Trainer's log and to the metrics file."""
        logs = kwargs.get("logs")
        if logs is None or "loss" not in logs:  # the log of an evaluation, or the totals at the end
            return
        metrics = self._take_window(args, kwargs["model"])
        self._pause_for_others(control, kwargs["model"])
        if metrics is None:
            return
        known = {key: value for key, value in metrics.items() if value is not None}  # reporters cannot take None
        logs.update(known)
        if state.log_history:
            state.log_history[-1].update(known)
        self._write(args, state, "log", **metrics)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the summary of the run, including steps since the last log, and remove all hooks."""
        if self._clock.steps:
            self._take_window(args, kwargs["model"])
        self._write(args, state, "end", **_summarise(self._windows))
        self._forget()

    # --- what the events do ---

    def _pause_for_others(self, control: TrainerControl, model: nn.Module) -> None:
        """If evaluation, saving or the end follows, exclude its time and memory from the window."""
        if control.should_evaluate:
            self._warn_of_evaluation(model)
        others = control.should_evaluate or control.should_save or control.should_training_stop
        if others and self._clock.running_since is not None:
            self._read_meter()
            self._clock.pause()

    def _warn_of_evaluation(self, model: nn.Module) -> None:
        """Warn once if the evaluation that follows gathers more logits than there is memory for."""
        trainer = compat.transformers.running(Trainer)
        rows = 0 if trainer is None else compat.transformers.gathered_rows(trainer)
        size = rows * self._counts.row_bytes
        room = spare_bytes(compat.distributed.devices_of_model(model)) if size else None
        if room is not None and size > room:
            warn_once(
                log,
                "hf_ckpt: evaluation gathers the logits of %d rows, %s or more, and %s are left. Give the Trainer "
                "`preprocess_logits_for_metrics`, which keeps what `compute_metrics` reads, such as the argmax; or set "
                "`batch_eval_metrics`, or on an accelerator `eval_accumulation_steps`.",
                rows,
                format_bytes(size),
                format_bytes(room),
            )

    def _read_meter(self) -> None:
        """Raise the peaks of the window to those of the meter."""
        self._peak = _over(max, (self._peak, self._meter.peak_bytes()))
        self._reserved = _over(max, (self._reserved, self._meter.reserved_bytes()))

    def _take_window(self, args: Any, model: nn.Module) -> Metrics | None:
        """Return the figures of the window over all ranks, or None if it has no step, and begin a new window."""
        seconds, steps = self._clock.take()
        if self._clock.running_since is not None:
            self._read_meter()
        record = _record(model)
        watch = self._counts.watch if record is None else record.watch
        mismatches = None
        if watch is not None and watch.report().checks:
            before, self._mismatches = self._mismatches, len(watch.differences)
            mismatches = max(0, self._mismatches - before)
        own = (self._peak, self._reserved, self._counts.head_bytes or None, self._predicted, seconds)
        ranks = compat.distributed.of_all_ranks((*own, self._counts.tokens or None, mismatches))
        columns = list(zip(*ranks, strict=True))
        peak, reserved, head, predicted, slowest = (_over(max, values) for values in columns[:5])
        tokens, found = (_over(sum, values) for values in columns[5:])
        self._begin_window()
        self._meter.reset()
        if not steps or not slowest:
            return None
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size * steps
        metrics: Metrics = {
            "memory/peak_gib": to_gib(peak),
            "memory/reserved_gib": to_gib(reserved),
            "memory/head_gib": to_gib(head),
            **({"memory/predicted_gib": to_gib(predicted)} if predicted else {}),
            "time/step_s": slowest / steps,
            "time/tokens_per_s" if tokens else "time/samples_per_s": (tokens or samples) / slowest,
            **({"ckpt/mismatch": found} if found is not None else {}),
        }
        self._windows.append(metrics)
        remedy, planned = '"head": "auto" takes them in chunks.', record if record and record.enabled else None
        if planned and planned.plan.head != "full":
            head, remedy = planned.heads.whole_bytes, f"The head ran in {planned.heads.last}."
        if planned and planned.regions and head and peak and head > HEAD_SHARE * peak:
            warn_once(
                log,
                "hf_ckpt: the logits of %s alone are %d %% of the peak (%s), and their loss and gradient come on top, "
                "which no policy on blocks can save. %s",
                *(type(base_model(model)).__name__, round(100 * head / peak), format_bytes(round(head)), remedy),
            )
        return metrics

    def _write(self, args: Any, state: TrainerState, event: str, **row: Any) -> None:
        """Append a row to the metrics file, on the first rank only; warn once if that fails."""
        if not state.is_world_process_zero or args.output_dir is None:
            return
        path = Path(args.output_dir) / METRICS_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_line(path, json.dumps({"event": event, "step": state.global_step, **row}))
        except OSError as error:  # no reason to end a training
            warn_once(log, "hf_ckpt: figures are missing in the metrics file: %s Training goes on.", str(error))


class _Counts:
    """Tokens and the head's largest output in training forwards, counted by hooks. It is copied with the model.

    Args:
        forget: removes the hooks. It is called in the first forward after a training that an error has ended, because
            the Trainer has no event for that.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        self.forget = forget
        self.training = compat.frames.running_call("train")
        """The number of the running call of `Trainer.train`; 0 without one, and in a copy."""
        self.tokens = 0
        self.head_bytes = 0
        self.row_bytes = 0
        """Bytes of the head's largest output for one row of a batch."""
        self.watch: Watch | None = None
        """Checks a model that hf_ckpt does not checkpoint; None checks nothing."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "watch": None, "training": 0, "forget": None}

    def see_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: count the tokens of training forwards, and notify the watch of them."""
        if compat.torch.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        if not compat.frames.is_running(self.training):
            self.forget()
            return
        if self.watch is not None and not compat.torch.is_replica(model):
            self.watch.on_forward(base_model(model), None, model)
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, torch.Tensor):
            self.tokens += ids.numel()

    def see_head(self, head: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the head: note the size of its largest output in a training forward."""
        if isinstance(output, torch.Tensor) and not compat.torch.is_compiling() and torch.is_grad_enabled():
            size = output.chunk_bytes() if isinstance(output, Logits) else output.nbytes
            self.head_bytes = max(self.head_bytes, size)
            self.row_bytes = max(self.row_bytes, output.numel() * output.element_size() // max(1, len(output)))


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
    theirs = {*compat.transformers.TORCH_OPTIONS, "every_n_layers", "offload"}
    ours = [f"`{key}`" for key in options if key in READERS and key not in theirs]
    if ours and getattr(args, compat.transformers.FLAG_NAME):
        text = "only hf_ckpt has, which is not installed on this model: call hf_ckpt.install(model) before the training"
        raise SpecError([f"{', '.join(ours)} {text}, or start the script by `python -m hf_ckpt`."], name)


def _who_checkpoints(found: FoundBlocks, record: Installation | None) -> str:
    """Return in one line whether blocks are checkpointed, how many, and by whom."""
    functions = [getattr(module, FUNCTION) for module in found.modules.values() if is_on(module)]
    if not functions:
        return "no block is checkpointed"
    whose = "hf_ckpt"
    if record is None or not record.enabled:
        reentrant = getattr(functions[0], "keywords", {}).get("use_reentrant", True)  # as torch reads it
        whose = f"transformers, {'reentrant' if reentrant else 'non-reentrant'}"
    return f"{len(functions)} of {len(found.blocks)} blocks are checkpointed by {whose}"


def _over(combine: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """Combine the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return combine(known) if known else None


def _summarise(windows: list[Metrics]) -> Metrics:
    """Return the figures of the whole run: the largest memory use, the sum of mismatches, and medians of the others."""
    summary: Metrics = {}
    for key in dict.fromkeys(key for window in windows for key in window):
        combine = max if key.startswith("memory/") else sum if key == "ckpt/mismatch" else statistics.median
        summary[key] = _over(combine, (window.get(key) for window in windows))
    return summary
