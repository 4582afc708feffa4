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
| `memory/prediction_error` | 1 | measured over predicted peak, minus 1; on accelerators, whose meter counts tensors |
| `plan/bucket` | tokens | size of the batch that the last step's plan was made for; only with `budget` and `auto` |
| `time/step_s` | s | wall time of a step with its data loading, on the slowest rank |
| `time/tokens_per_s` | 1/s | tokens in `input_ids` of all ranks; `time/samples_per_s` if inputs cannot be read |
| `ckpt/mismatch` | checks | checks that found a block whose backward did not get what its forward saved |
"""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import DefaultFlowCallback

from hf_ckpt import compat
from hf_ckpt.attach.attach import lost_blocks
from hf_ckpt.attach.record import Installation, installation
from hf_ckpt.console import make_console, print_beside_bars
from hf_ckpt.engines.head.logits import Logits
from hf_ckpt.errors import NoBlocksError, OwnerConflictError, PlanLostError
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.clocks import TrainingClock
from hf_ckpt.measure.memory import PeakMeter
from hf_ckpt.models.blocks import base_model, find_blocks, head_module
from hf_ckpt.spec.files import append_line
from hf_ckpt.spec.plan import Plan
from hf_ckpt.training.guard import runs_again
from hf_ckpt.training.session import Planned
from hf_ckpt.training.watch import Watch
from hf_ckpt.units import GIB, format_bytes, format_percent, format_seconds, to_gib

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
        summary: print a table at the end of the training.
        check_every: for a model that hf_ckpt does not checkpoint (transformers itself does, for example): in every n-th
            step, check whether the backward of one block gets what its forward saved. Blocks take turns. 0 checks
            nothing. Under a plan of hf_ckpt, the spec's `check_every` applies instead.
        on_mismatch: what happens if such a check finds a difference: `warn`, or `raise` to stop the run before the
            optimizer steps.

    Raises `PlanLostError` at the first step if other code has removed the plan from a block.
    """

    def __init__(self, *, summary: bool = True, check_every: int = 100, on_mismatch: str = "warn") -> None:
        self.summary = summary
        self.check_every, self.on_mismatch = check_every, on_mismatch
        self._handles: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        """Remove the hooks of the last training and forget its figures."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._clock = TrainingClock()
        self._meter: PeakMeter | None = None
        self._checked = False
        self._watch = Watch(self.check_every, self.on_mismatch) if self.check_every else None
        """Checks a model that hf_ckpt does not checkpoint."""
        self._mismatches = 0
        """Number of checks that found a difference before the window."""
        self._windows: list[Metrics] = []
        self._counts = _Counts()
        self._written: list[Plan] = []
        """The plans that were written to the metrics file."""
        self._begin_window()

    def _begin_window(self) -> None:
        self._peak: float | None = None
        self._reserved: float | None = None
        self._counts.tokens = self._counts.head_bytes = 0
        self._used: list[Planned] = []
        """The plans of the window's micro-steps, the latest one last."""

    # --- events, which the Trainer calls ---

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Choose a memory meter, hook the model and its head, and write the first row of the metrics file."""
        self._forget()
        self._go_before_reporters()
        model: nn.Module = kwargs["model"]
        devices = compat.distributed.devices_of_model(model)
        self._clock, self._meter = TrainingClock(devices), PeakMeter(devices)
        self._handles.append(model.register_forward_pre_hook(self._counts.see_model, with_kwargs=True))
        with contextlib.suppress(NoBlocksError):
            head = head_module(base_model(model), find_blocks(model).family)
            if head is not None:
                self._handles.append(head.register_forward_hook(self._counts.see_head))
        record = _record(model)
        if record is not None and not record.enabled and record.plan.active():
            log.warning(
                "hf_ckpt is installed on this model, but not enabled: pass activation_checkpointing=True (formerly "
                "gradient_checkpointing=True) to TrainingArguments, or call model.gradient_checkpointing_enable()."
            )
        is_on = record is not None and record.enabled and not record.measuring
        self._write(
            args,
            state,
            "start",
            memory_source=self._meter.source,
            world_size=args.world_size,
            spec=record.spec.to_dict() if record else None,
            plan=record.plan.to_dict() if record is not None and is_on else None,
        )

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the plan at the first step, and start the clock if it is paused.

        Raises `PlanLostError` if a planned block has lost its checkpointing function.
        """
        record = _record(kwargs["model"])
        if record is not None:
            if not self._checked:
                self._checked = True
                lost = lost_blocks(kwargs["model"])
                if lost:
                    raise PlanLostError(lost)
        elif self._watch is not None:
            self._counts.watch = self._watch_forward
        if self._clock.running_since is None and self._meter is not None:
            self._meter.reset()
            self._clock.resume()

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record a plan that was made for a micro-step."""
        self._note_plan(args, state, kwargs["model"])

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step, and record a plan that was made in it."""
        self._clock.steps += 1
        self._note_plan(args, state, kwargs["model"])
        if not control.should_log:  # otherwise `on_log` follows, and waits for the accelerator
            self._pause_for_others(control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Pause the clock if evaluation or saving follows without a log before it."""
        # The Trainer logs a step only once: if the last step was logged already, no log follows.
        if not control.should_log or not self._clock.steps:
            self._pause_for_others(control)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the figures of the window that ends now to the Trainer's log and to the metrics file."""
        logs = kwargs.get("logs")
        if logs is None or "loss" not in logs:  # the log of an evaluation, or the totals at the end
            return
        metrics = self._take_window(args, kwargs["model"])
        self._pause_for_others(control)
        if metrics is None:
            return
        known = {key: value for key, value in metrics.items() if value is not None}  # reporters cannot take None
        logs.update(known)
        if state.log_history:
            state.log_history[-1].update(known)
        self._write(args, state, "log", **metrics)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write and print the summary of the run, including steps since the last log, and remove all hooks."""
        record = _record(kwargs["model"])
        if self._clock.steps:
            self._take_window(args, kwargs["model"])
        summary = _summarise(self._windows)
        self._write(args, state, "end", **summary)
        if self.summary and state.is_world_process_zero and self._meter is not None and self._windows:
            _print_summary(summary, self._meter, record if record is not None and record.enabled else None)
        self._forget()

    # --- what the events do ---

    def _go_before_reporters(self) -> None:
        """Move this callback before the Trainer's reporters, which read what it adds to the logs."""
        handler = compat.transformers.callback_handler_of(self)
        if handler is None:
            log.warning("no callback handler found: figures go to %s only, not to the reporters.", METRICS_FILE)
            return
        others = [callback for callback in handler.callbacks if callback is not self]
        flow = [place for place, callback in enumerate(others) if isinstance(callback, DefaultFlowCallback)]
        place = flow[0] + 1 if flow else 0
        handler.callbacks[:] = [*others[:place], self, *others[place:]]

    def _watch_forward(self, running: nn.Module) -> None:
        """Notify the watch of a forward that is about to begin, of a plain or wrapped model."""
        try:
            if self._watch is not None:
                self._watch.on_forward(base_model(running), None, running)
        except (NoBlocksError, OwnerConflictError):  # nothing to check
            self._watch = None

    def _note_plan(self, args: Any, state: TrainerState, model: nn.Module) -> None:
        """Write each plan of `budget` or `auto` to the metrics file once; warn if torch.compile prevents a part."""
        record = _record(model)
        if record is None or not record.enabled:
            return
        planned: Planned | None = record.planned
        if record.spec.is_planned and planned is None:
            warn_once(
                log,
                "`policy: %s` saw no forward to plan for (torch.compile hides it), so every block is recomputed. Give "
                "it a plan of `hf-ckpt plan`, compile regions only, or run one batch before training in "
                "`with torch.compiler.set_stance('force_eager')`.",
                record.spec.policy,
            )
        if record.heads.in_graph:
            warn_once(log, "hf_ckpt: the head is not run in chunks, because torch.compile has it in a graph.")
        if record.compiled_by_others():
            warn_once(
                log,
                'hf_ckpt: `compile: "blocks"` has no effect, because the model, or a part of it that holds the '
                "blocks, is compiled as a whole by something else, which decides what is kept. Leave `torch_compile` "
                "(or accelerate's dynamo settings) out, and hf_ckpt compiles the blocks.",
            )
        if planned is None or planned.measures:
            return
        self._used = [*(used for used in self._used if used is not planned), planned]
        if any(planned.plan is plan for plan in self._written):
            return
        self._written.append(planned.plan)
        self._write(
            args,
            state,
            "plan",
            batch=str(planned.shape),
            limit_bytes=planned.limit_bytes,
            bias_bytes=planned.bias_bytes,
            plan=planned.plan.to_dict(),
            actions=[dict(zip(("action", "kept_bytes", "time"), row, strict=True)) for row in planned.costs],
        )

    def _pause_for_others(self, control: TrainerControl) -> None:
        """If evaluation, saving or the end follows, exclude its time and memory from the window."""
        others = control.should_evaluate or control.should_save or control.should_training_stop
        if others and self._clock.running_since is not None:
            self._read_meter()
            self._clock.pause()

    def _read_meter(self) -> None:
        """Raise the peaks of the window to those of the meter."""
        assert self._meter is not None
        self._peak = _largest(self._peak, self._meter.peak_bytes())
        self._reserved = _largest(self._reserved, self._meter.reserved_bytes())

    def _take_window(self, args: Any, model: nn.Module) -> Metrics | None:
        """Return the figures of the window over all ranks, or None if it has no step, and begin a new window."""
        if self._meter is None:
            return None
        seconds, steps = self._clock.take()
        if self._clock.running_since is not None:
            self._read_meter()
        record, used = _record(model), self._used
        planned = record is not None and record.enabled and bool(record.regions)
        predicted = _largest(*(plan.plan.prediction.peak_bytes for plan in used if plan.plan.prediction))
        comparable = self._meter.exact and predicted is not None and self._peak is not None
        ranks = compat.distributed.of_all_ranks(
            {
                "peak": self._peak,
                "reserved": self._reserved,
                "head": self._counts.head_bytes or None,
                "seconds": seconds,
                "tokens": self._counts.tokens or None,
                "predicted": predicted,
                "mismatches": self._take_mismatches(record),
                "above": (self._peak or 0.0) - (predicted or 0.0) if comparable else None,
            }
        )
        self._begin_window()
        self._meter.reset()
        if not steps or not seconds:
            return None
        found = {key: _over(ranks, key, sum if key in ("tokens", "mismatches") else max) for key in ranks[0]}
        slowest = found["seconds"] or seconds
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size * steps
        metrics: Metrics = {
            "memory/peak_gib": to_gib(found["peak"]),
            "memory/reserved_gib": to_gib(found["reserved"]),
            "memory/head_gib": to_gib(found["head"]),
            **({"plan/bucket": float(used[-1].shape.tokens)} if used else {}),
        }
        if found["predicted"]:
            metrics["memory/predicted_gib"] = to_gib(found["predicted"])
            metrics["memory/prediction_error"] = _share(found["above"], found["predicted"])
        metrics["time/step_s"] = slowest / steps
        rate = "time/tokens_per_s" if found["tokens"] else "time/samples_per_s"
        metrics[rate] = (found["tokens"] or samples) / slowest
        if found["mismatches"] is not None:
            metrics["ckpt/mismatch"] = found["mismatches"]
        self._windows.append(metrics)
        share = _share(found["head"], found["peak"])
        if share and share > HEAD_SHARE and planned and record is not None and record.plan.head == "full":
            warn_once(
                log,
                "hf_ckpt: the logits of %s alone are %d %% of the peak (%s), and their loss and gradient come on top, "
                'which no policy on blocks can save. "head": "auto" takes them in chunks.',
                type(base_model(model)).__name__,
                round(100 * share),
                format_bytes(round(found["head"] or 0)),
            )
        return metrics

    def _take_mismatches(self, record: Installation | None) -> float | None:
        """Return how many checks of the window found a difference; None before the first check."""
        watch = self._watch if record is None else record.watch
        if watch is None or not watch.report().checks:
            return None
        before, self._mismatches = self._mismatches, len(watch.differences)
        return float(max(0, self._mismatches - before))

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
    """Tokens and the head's largest output in training forwards, counted by hooks. It is copied with the model."""

    def __init__(self) -> None:
        self.tokens = 0
        self.head_bytes = 0
        self.watch: Callable[[nn.Module], None] | None = None
        """Called with the model at the next training forward that torch.compile does not trace."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "watch": None}

    def see_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: count the tokens of training forwards, and notify the watch of the first."""
        if compat.torch.is_compiling() or runs_again() or not (model.training and torch.is_grad_enabled()):
            return
        watch, self.watch = self.watch, None
        if watch is not None and not compat.torch.is_replica(model):
            watch(model)
        ids = kwargs.get("input_ids", args[0] if args else None)
        embeddings = kwargs.get("inputs_embeds")
        if isinstance(ids, torch.Tensor):
            self.tokens += ids.numel()
        elif isinstance(embeddings, torch.Tensor):
            self.tokens += embeddings.shape[0] * embeddings.shape[1]

    def see_head(self, head: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the head: note the size of its largest output in a training forward."""
        if isinstance(output, torch.Tensor) and not compat.torch.is_compiling() and torch.is_grad_enabled():
            size = output.chunk_bytes() if isinstance(output, Logits) else output.nbytes
            self.head_bytes = max(self.head_bytes, size)


def _record(model: nn.Module) -> Installation | None:
    """Return the record on a model; None if nothing is or can be installed."""
    try:
        return installation(model)
    except NoBlocksError:  # the callback also measures models that hf_ckpt cannot install on
        return None


def _largest(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _over(ranks: list[dict[str, float | None]], key: str, combine: Any) -> float | None:
    """Combine the values that ranks have for a key; None if no rank has one."""
    known = [value for rank in ranks if (value := rank[key]) is not None]
    return combine(known) if known else None


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _summarise(windows: list[Metrics]) -> Metrics:
    """Return the figures of the whole run: the largest memory use, the sum of mismatches, and medians of the others."""
    summary: Metrics = {}
    for key in dict.fromkeys(key for window in windows for key in window):
        values = [value for window in windows if (value := window.get(key)) is not None]
        combine = max if key.startswith("memory/") else sum if key == "ckpt/mismatch" else statistics.median
        summary[key] = combine(values) if values else None
    return summary


def _print_summary(summary: Metrics, meter: PeakMeter, enabled: Installation | None) -> None:
    """Print the figures of a training run as a table, to stderr, with the plan of an enabled installation."""
    from rich.table import Table

    def size(key: str) -> str:
        value = summary.get(key)
        return format_bytes(None if value is None else value * GIB)

    rows = {"peak memory": f"{size('memory/peak_gib')} ({meter.source})"}
    if summary.get("memory/predicted_gib") is not None:
        error = summary.get("memory/prediction_error")
        compared = "tensors alone" if error is None else f"measured against it: {format_percent(error)}"
        rows["predicted"] = f"{size('memory/predicted_gib')} ({compared})"
    for key, name in (("memory/reserved_gib", "reserved"), ("memory/head_gib", "head output")):
        if summary.get(key) is not None:
            rows[name] = size(key)
    rows["step time, median"] = format_seconds(summary.get("time/step_s"))
    for key, name in (("time/tokens_per_s", "tokens/s, median"), ("time/samples_per_s", "samples/s, median")):
        rate = summary.get(key)
        if rate is not None:
            rows[name] = f"{rate:,.1f}"
    rows["plan"] = "none is enabled" if enabled is None else enabled.plan.summary()
    if enabled is not None and enabled.measuring is not None:
        rows["plan"] = f"not made yet: {enabled.measuring}"
    table = Table(title="hf_ckpt: this training run", show_header=False, title_justify="left")
    for row in rows.items():
        table.add_row(*row)
    console = make_console(stderr=True)
    with console.capture() as text:
        console.print(table)
    print_beside_bars(text.get().rstrip())
