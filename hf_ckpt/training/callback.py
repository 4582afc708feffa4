"""`MemoryTimeCallback`: measure the peak memory and the step time of a Trainer run, and add them to its logs.

    Trainer(..., callbacks=[hf_ckpt.MemoryTimeCallback()])

Each log holds these figures for its window, which is the training steps since the last log, without evaluation and
saving:

| key | unit | meaning |
|---|---|---|
| `memory/peak_gib` | GiB | the largest memory use in the window, on the rank that used most |
| `memory/reserved_gib` | GiB | the most that the allocator took from the device; on accelerators only |
| `memory/head_gib` | GiB | the head's output (logits), where a head was found; loss and gradient need a multiple |
| `memory/head_share` | 0 to 1 | `head_gib` over `peak_gib`: the least that no policy on blocks can save |
| `memory/predicted_gib` | GiB | the largest peak that was predicted for a plan of `budget` or `auto` in the window |
| `memory/prediction_error` | 1 | measured over predicted peak, less 1 (on a CPU: without memory that is not tensors) |
| `plan/bucket` | tokens | size of the batches that the last step's plan was made for; only with `budget` and `auto` |
| `time/step_s` | s | wall time of a step with its data loading, on the slowest rank |
| `time/tokens_per_s` | 1/s | tokens in `input_ids` of all ranks; `time/samples_per_s` where inputs cannot be seen |
| `time/recompute_share` | 0 to 1 | the share of the time spent running blocks again; only while a plan is enabled |
"""

from __future__ import annotations

import collections
import json
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from hf_ckpt import compat
from hf_ckpt.attach.attach import lost_blocks
from hf_ckpt.attach.record import Installation, installation
from hf_ckpt.engines.head.logits import Logits
from hf_ckpt.errors import NoBlocksError, PlanLostError
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.clocks import RecomputeClock, TrainingClock
from hf_ckpt.measure.memory import PeakMeter, peak_meter
from hf_ckpt.models.blocks import base_model, find_blocks, head_module
from hf_ckpt.planner.buckets import Planned
from hf_ckpt.spec.files import append_line, replacing
from hf_ckpt.spec.plan import Plan
from hf_ckpt.training.guard import SNAPSHOT_FILE, runs_again
from hf_ckpt.training.summary import print_training_summary
from hf_ckpt.units import format_bytes, to_gib

log = logging.getLogger(__name__)


HEAD_SHARE = 0.25
"""Share of the peak above which the head's output is warned of: with loss and gradient it is most of the peak then."""
METRICS_FILE = "hf_ckpt_metrics.jsonl"
"""Name of the file in the output folder that the figures are written to, one JSON object a line."""
Metrics = dict[str, float | None]
"""Key of the table above -> its value, or None where it is unknown."""


class MemoryTimeCallback(TrainerCallback):
    """Log the peak memory and the step time of a training.

        Trainer(..., callbacks=[hf_ckpt.MemoryTimeCallback()])

    The figures go to every reporter of the Trainer (keys like `memory/peak_gib` and `time/step_s`), and to
    `hf_ckpt_metrics.jsonl` in the output folder.

    Args:
        snapshot_on_oom: write the CUDA allocator's snapshot to the output folder when memory runs out. Every allocation
            is recorded for it from the start of training, which costs some time.
        summary: print a table at the end of training.

    At the first step the callback checks that every planned block still carries its function, and raises
    `PlanLostError` if one does not. It warns once when the logits fill much of the memory, which a plan on blocks
    cannot change. It logs how far the measured peak is from the predicted one; on a CPU the resident size of a process
    includes memory that the C allocator keeps after it was freed. Plans are corrected by measured steps without it.
    """

    def __init__(self, *, snapshot_on_oom: bool = False, summary: bool = True) -> None:
        self.snapshot_on_oom = snapshot_on_oom
        self.summary = summary
        self._handles: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        """Begin anew: remove the hooks of the last training and forget its figures."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._clock = TrainingClock()
        self._recompute = RecomputeClock()
        self._meter: PeakMeter | None = None
        self._peak: float | None = None
        self._reserved: float | None = None
        self._tokens = _TokenCounter()
        self._head: _HeadBytes | None = None
        self._checked = False
        self._windows: list[Metrics] = []
        self._told: list[Plan] = []
        """The plans that were written to the metrics file."""
        self._used: list[Planned] = []
        """The plans of the window's micro-steps, each once."""
        self._steps_of: collections.Counter[str] = collections.Counter()
        """The batch shape that a plan was made for -> steps that ended with it."""

    # --- events, which the Trainer calls ---

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Choose a memory meter, hook the model and its head, and write the first row of the metrics file."""
        self._forget()
        self._go_before_reporters()
        model: nn.Module = kwargs["model"]
        self._meter = peak_meter()
        self._handles.append(model.register_forward_pre_hook(self._tokens, with_kwargs=True))
        record = _record(model)
        head = _head(model)
        if head is not None:
            self._head = _HeadBytes()
            self._handles.append(head.register_forward_hook(self._head))
        if record is not None and not record.enabled and record.plan.active():
            log.warning(
                "hf_ckpt is installed on this model, but not enabled: pass activation_checkpointing=True (formerly "
                "gradient_checkpointing=True) to TrainingArguments, or call model.gradient_checkpointing_enable()."
            )
        if self.snapshot_on_oom:
            self._prepare_snapshot(Path(args.output_dir or ".") / SNAPSHOT_FILE)
        self._write(
            args,
            state,
            {
                "event": "start",
                "step": state.global_step,
                "memory_source": self._meter.source,
                "world_size": args.world_size,
                "spec": record.spec.to_dict() if record else None,
                "plan": record.plan.to_dict() if record and record.enabled else None,
            },
        )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the plan where that is due, and start the clock if it stands still.

        Raises `PlanLostError` at the first step where a planned block no longer carries its function.
        """
        record = _record(kwargs["model"])
        if record is not None:
            if not self._checked:
                self._check(kwargs["model"])
            record.functions.observe(self._recompute.observer())  # at every step: an enable call may have made others
        if not self._clock.running and self._meter is not None:
            self._meter.reset()
            self._clock.resume()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write down a plan that was made for a micro-step."""
        self._tell_plan(args, state, kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step, and write down a plan that was made in it."""
        self._clock.count_step()
        self._tell_plan(args, state, kwargs["model"])
        if self._used:
            self._steps_of[str(self._used[-1].shape)] += 1
        if not control.should_log:  # else `on_log` comes first, and waits for the accelerator
            self._pause_for_others(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop the clock where evaluation or saving follows, and no log comes first."""
        # The Trainer logs a step only once: what the last step has logged already is not logged again here.
        if not control.should_log or not self._clock.steps:
            self._pause_for_others(control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the figures of the window that ends now to the Trainer's log and to the metrics file."""
        if logs is None or "loss" not in logs:  # the log of an evaluation, or the totals at the end
            return
        metrics = self._take_window(args, kwargs["model"])
        self._pause_for_others(control)
        if metrics is None:
            return
        self._windows.append(metrics)
        known = {key: value for key, value in metrics.items() if value is not None}  # reporters cannot take None
        logs.update(known)
        if state.log_history:
            state.log_history[-1].update(known)
        self._write(args, state, {"event": "log", "step": state.global_step, **metrics})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write and print the summary of the run, and let go of the model."""
        record = _record(kwargs["model"])
        summary = _summarise(self._windows)
        batches = {"batches": dict(self._steps_of)} if self._steps_of else {}
        self._write(args, state, {"event": "end", "step": state.global_step, **summary, **batches})
        if self.summary and state.is_world_process_zero and self._meter is not None and self._windows:
            plan = record.plan if record is not None and record.enabled else None
            print_training_summary(summary, self._meter.source, plan)
        if record is not None:
            record.functions.observe(None)
        self._forget()

    # --- what the events do ---

    def _go_before_reporters(self) -> None:
        """Let the Trainer call this callback before its reporters, which read what it adds to the logs."""
        handler = compat.callback_handler_of(self)
        if handler is None:
            log.warning("no callback handler found: figures go to %s only, not to the reporters.", METRICS_FILE)
            return
        others = [callback for callback in handler.callbacks if callback is not self]
        flow = [place for place, callback in enumerate(others) if isinstance(callback, DefaultFlowCallback)]
        place = flow[0] + 1 if flow else 0
        handler.callbacks[:] = [*others[:place], self, *others[place:]]

    def _check(self, model: nn.Module) -> None:
        """Raise `PlanLostError` where planned blocks no longer carry their functions."""
        self._checked = True
        lost = lost_blocks(model)
        if lost:
            raise PlanLostError(lost)

    def _tell_plan(self, args: TrainingArguments, state: TrainerState, model: nn.Module) -> None:
        """Write a plan that was made for batches to the metrics file, once; warn where torch.compile prevents plans."""
        record = _record(model)
        planned = record.planned if record is not None else None
        if record is not None and record.enabled and record.spec.is_planned and planned is None:
            _warn_unplanned(record.spec.policy)
        if record is not None and record.enabled and record.heads.in_graph:
            _warn_head_in_graph()
        if record is not None and record.enabled and record.compiled_by_others():
            _warn_compiled_by_others()
        if planned is None or record is None or not record.enabled:
            return
        self._used = [*(found for found in self._used if found is not planned), planned]
        if any(planned.plan is plan for plan in self._told):
            return
        self._told.append(planned.plan)
        row = {
            "batch": str(planned.shape),
            "limit_bytes": planned.limit_bytes,
            "bias_bytes": planned.bias_bytes,
            "plan": planned.plan.to_dict(),
        }
        self._write(args, state, {"event": "plan", "step": state.global_step, **row})

    def _compare(self) -> dict[str, float | None]:
        """Return this rank's largest predicted peak, and how many bytes the measured one is above it."""
        predicted = _largest(*(found.plan.prediction.peak_bytes for found in self._used if found.plan.prediction))
        if predicted is None or self._peak is None:
            return {"predicted": None, "above": None}
        measured = self._peak - (self._used[-1].memory.outside_bytes or 0)
        return {"predicted": predicted, "above": measured - predicted}

    def _pause_for_others(self, control: TrainerControl) -> None:
        """Where evaluation or saving comes next, keep its time and its memory out of the window."""
        if (control.should_evaluate or control.should_save) and self._clock.running:
            self._latch_peak()
            self._clock.pause()

    def _latch_peak(self) -> None:
        """Read the meter into the peak of the window, which later readings can only raise."""
        assert self._meter is not None
        self._peak = _largest(self._peak, self._meter.peak_bytes())
        self._reserved = _largest(self._reserved, self._meter.reserved_bytes())

    def _take_window(self, args: TrainingArguments, model: nn.Module) -> Metrics | None:
        """Return the figures of the window that ends now, over all ranks; None if it holds no step."""
        if self._meter is None:
            return None
        seconds, steps = self._clock.take()
        if self._clock.running:
            self._latch_peak()
        record = _record(model)
        planned = record is not None and record.enabled and bool(record.regions)
        ranks = self._of_all_ranks(record, seconds, planned)
        used, self._used = self._used, []
        self._peak = self._reserved = None
        self._meter.reset()
        if not steps or not seconds:
            return None
        slowest = _over(ranks, "seconds", max) or seconds
        peak, head, tokens = _over(ranks, "peak", max), _over(ranks, "head", max), _over(ranks, "tokens", sum)
        recompute = _over(ranks, "recompute", max)
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size * steps
        if head and peak and head > peak * HEAD_SHARE and planned and record is not None and record.plan.head == "full":
            _warn_head(type(base_model(model)).__name__, round(100 * head / peak), format_bytes(round(head)))
        rate = ("time/tokens_per_s", tokens) if tokens else ("time/samples_per_s", samples)
        return {
            "memory/peak_gib": to_gib(peak),
            "memory/reserved_gib": to_gib(_over(ranks, "reserved", max)),
            "memory/head_gib": to_gib(head),
            "memory/head_share": head / peak if head and peak else None,
            **_figures_of_plans(ranks, used),
            "time/step_s": slowest / steps,
            rate[0]: rate[1] / slowest,
            "time/recompute_share": None if recompute is None else recompute / slowest,
        }

    def _of_all_ranks(
        self, record: Installation | None, seconds: float, planned: bool
    ) -> list[dict[str, float | None]]:
        """Return the figures of the window that ends now, a dict a rank; `planned` says whether blocks run again."""
        in_graphs = record is not None and any(region.in_graph for region in record.regions.values())
        recompute_seconds = self._recompute.take()
        return compat.of_all_ranks(
            {
                "peak": self._peak,
                "reserved": self._reserved,
                "head": self._head.take() if self._head else None,
                "seconds": seconds,
                "recompute": recompute_seconds if (planned or recompute_seconds) and not in_graphs else None,
                "tokens": self._tokens.take(),
                **self._compare(),
            }
        )

    def _prepare_snapshot(self, path: Path) -> None:
        """Let the allocator write its snapshot to a file when memory runs out; warn where it cannot."""

        def write() -> None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as beside:
                    compat.dump_memory_snapshot(str(beside))
            except OSError as error:
                log.error("out of memory, and the allocator snapshot could not be written: %s", error)
                return
            log.error("out of memory: allocator snapshot written to %s (view it at pytorch.org/memory_viz).", path)

        if not compat.attach_oom_observer(write):
            log.warning("snapshot_on_oom needs CUDA, which is not available: no snapshot will be written.")

    def _write(self, args: TrainingArguments, state: TrainerState, row: dict[str, Any]) -> None:
        """Append a row to the metrics file, on the first rank only; warn once where it cannot be written."""
        if not state.is_world_process_zero or args.output_dir is None:
            return
        path = Path(args.output_dir) / METRICS_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_line(path, json.dumps(row))
        except OSError as error:  # no reason to end a training
            _warn_unwritten(str(error))


class _TokenCounter:
    """Forward pre-hook of the model that counts the tokens of training forwards."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if compat.is_compiling() or runs_again() or not (model.training and torch.is_grad_enabled()):
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        embeddings = kwargs.get("inputs_embeds")
        if isinstance(ids, torch.Tensor):
            self.tokens += ids.numel()
        elif isinstance(embeddings, torch.Tensor):
            self.tokens += embeddings.shape[0] * embeddings.shape[1]

    def take(self) -> float | None:
        """Return the tokens since the last call; None where none were seen."""
        taken, self.tokens = self.tokens, 0
        return taken or None


class _HeadBytes:
    """Forward hook of the head that keeps the size of its largest output in a training forward, in bytes."""

    def __init__(self) -> None:
        self.largest = 0

    def __call__(self, head: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and not compat.is_compiling() and torch.is_grad_enabled():
            size = output.chunk_bytes() if isinstance(output, Logits) else output.nbytes
            self.largest = max(self.largest, size)

    def take(self) -> float | None:
        """Return the largest size since the last call; None where the head was not called."""
        taken, self.largest = self.largest, 0
        return taken or None


def _record(model: nn.Module) -> Installation | None:
    """Return the record on a model; None where nothing is or can be installed."""
    try:
        return installation(model)
    except NoBlocksError:  # the callback also measures models that hf_ckpt cannot install on
        return None


def _head(model: nn.Module) -> nn.Module | None:
    """Return the head of a model; None where it is not known."""
    try:
        return head_module(base_model(model), find_blocks(model).family)
    except NoBlocksError:
        return None


def _warn_unplanned(policy: str) -> None:
    warn_once(
        log,
        "`policy: %s` saw no forward to plan for (torch.compile hides it), so every block is recomputed. Give it a "
        "plan of `hf-ckpt plan`, compile regions only, or run one batch before training in "
        "`with torch.compiler.set_stance('force_eager')`.",
        policy,
    )


def _warn_head(model: str, percent: int, size: str) -> None:
    warn_once(
        log,
        "hf_ckpt: the logits of %s alone are %d %% of the peak (%s), and their loss and gradient come on top, which no "
        'policy on blocks can save. "head": "auto" takes them in chunks.',
        model,
        percent,
        size,
    )


def _warn_head_in_graph() -> None:
    warn_once(log, "hf_ckpt: the head is not run in chunks, because torch.compile has it in a graph.")


def _warn_compiled_by_others() -> None:
    warn_once(
        log,
        'hf_ckpt: `compile: "blocks"` has no effect, because the model, or a part of it that holds the '
        "blocks, is compiled as a whole by something else, which decides what is kept. Leave `torch_compile` (or "
        "accelerate's dynamo settings) out, and hf_ckpt compiles the blocks.",
    )


def _warn_unwritten(reason: str) -> None:
    warn_once(log, "hf_ckpt: figures are missing in the metrics file: %s Training goes on.", reason)


def _largest(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _over(ranks: list[dict[str, float | None]], key: str, combine: Any) -> float | None:
    """Combine the values that ranks have for a key; None where no rank has one."""
    known = [value for rank in ranks if (value := rank[key]) is not None]
    return combine(known) if known else None


def _figures_of_plans(ranks: list[dict[str, float | None]], used: Sequence[Planned]) -> Metrics:
    """Return the predicted peak over all ranks with its error, and the bucket of the last of the plans in use."""
    predicted, above = _over(ranks, "predicted", max), _over(ranks, "above", max)
    found: Metrics = {"plan/bucket": float(used[-1].shape.tokens)} if used else {}
    if predicted and above is not None:
        found |= {"memory/predicted_gib": to_gib(predicted), "memory/prediction_error": above / predicted}
    return found


def _summarise(windows: list[Metrics]) -> Metrics:
    """Return the figures of the whole run: the largest of the memory figures, and the median of the others."""
    summary: Metrics = {}
    for key in dict.fromkeys(key for window in windows for key in window):
        values = [value for window in windows if (value := window.get(key)) is not None]
        combine = max if key.startswith("memory/") else statistics.median
        summary[key] = combine(values) if values else None
    return summary
