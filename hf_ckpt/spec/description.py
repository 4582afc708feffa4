"""`Description`: the plan on a model, with counts of what it has done. `hf_ckpt.describe` returns it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from hf_ckpt.spec.plan import Plan, Prediction
from hf_ckpt.units import counted, format_bytes

SHOWN = 8
"""Most rows of `Description.saved` that are printed."""


@dataclasses.dataclass(frozen=True)
class Watched:
    """Results of the watch so far: whether the backward of blocks got what their forward saved."""

    checks: int
    """Number of checks, each of one block in one step."""
    compared: int
    """Tensors that were compared bit for bit: neither those that are the same memory on both sides, nor those for which
    there was no room."""
    differences: tuple[str, ...]
    """The first difference of each check that found one, in words."""
    not_checked: dict[str, str]
    """What is never checked -> why."""

    def __str__(self) -> str:
        if not self.checks:
            return "no checks so far"
        result = f"{counted(len(self.differences), 'check')} found differences" if self.differences else "all equal"
        return f"{counted(self.checks, 'check')}, {self.compared:,} tensors compared: {result}"


@dataclasses.dataclass(frozen=True)
class Saved:
    """Tensors of one name that autograd saved in blocks under `selective`."""

    name: str
    """What computed it: a module (`o_proj`), an operation on results of modules (`gate_proj * up_proj`), or the block's
    input (`hidden_states`)."""
    bytes: int
    """Bytes in all blocks together, each storage once."""
    is_dropped: bool
    """Whether backward rebuilds it; otherwise it was kept."""

    def __str__(self) -> str:
        return f"{self.name}  {format_bytes(self.bytes)} {'dropped' if self.is_dropped else 'kept'}"


@dataclasses.dataclass(frozen=True)
class Description:
    """The plan on a model, with counts of what it has done so far. `print` shows it."""

    plan: Plan
    """One action for every block."""
    spec: dict[str, Any]
    """The spec that the plan was made from, as `Spec.to_dict`."""
    enabled: bool
    """Whether the plan is enabled now."""
    frozen: tuple[str, ...]
    """Planned blocks below the first trainable parameter, which save nothing."""
    forwards: dict[str, int]
    """Block name -> checkpointed forwards so far."""
    recomputed: dict[str, int]
    """Block name -> recomputations so far, of the whole block or (with `selective`) of operations inside it."""
    dropped_tensors: int = 0
    """How many of the tensors that autograd saved in the last forward `selective` dropped, over all blocks."""
    saved: tuple[Saved, ...] = ()
    """What `selective` kept and dropped in the first forwards of its blocks, the largest first. Parameters, and tensors
    that have no gradient, such as attention masks, are left out."""
    plans: dict[str, Plan] = dataclasses.field(default_factory=dict)
    """Under `budget` and `auto`: the batch shape that a plan was made for, in words -> the plan. A smaller batch
    may use it, too; `plan` is that of the last batch."""
    measuring: str | None = None
    """Under `budget` and `auto`, why `plan` is not the plan of the run yet; None if it is."""
    measured_bytes: int | None = None
    """Under `budget` and `auto`, the measured peak of the plan's first step; None if it was not measured."""
    without: Prediction | None = None
    """Under `budget` and `auto`, what the step is predicted to need without checkpointing; None while it measures."""
    voided: int = 0
    """Under `budget` and `auto`, how often a later step exceeded the budget, so that blocks were measured again."""
    moved: dict[str, int] = dataclasses.field(default_factory=dict)
    """Block name -> bytes that its last forward moved to host memory."""
    watched: Watched | None = None
    """Results of the watch so far; None if nothing is checked."""
    avoided: dict[str, str] = dataclasses.field(default_factory=dict)
    """Block in which the watch found a difference -> its action since then, with `on_mismatch: avoid`."""
    chunked_heads: int = 0
    """Calls of the head that ran in chunks so far."""
    head_ran: str = ""
    """How the last call of a head ran that is planned to run in chunks, in words: with the tokens of a chunk, or why it
    ran as a whole. Empty before the first."""
    in_graphs: tuple[str, ...] = ()
    """Planned blocks inside a graph of torch.compile, where calls are not counted."""
    compiled_by_others: tuple[str, ...] = ()
    """Blocks that hf_ckpt should compile, but that are in a graph of other code, where their share has no effect."""
    holding: tuple[str, ...] = ()
    """Blocks that held their hidden states in the last forward, although the plan makes them again."""
    not_in_tiles: tuple[str, ...] = ()
    """Blocks that should run feed-forwards in tiles, but have none that does."""

    def __str__(self) -> str:
        state = "enabled" if self.enabled else "installed, not enabled (call activation_checkpointing_enable())"
        head = f"hf_ckpt: {state}; spec {json.dumps(self.spec)}\n{self.plan}"
        return "\n".join([head, *self._lines_of_plans(), *self._lines_of_steps(), *self._lines_of_parts()])

    def _lines_of_plans(self) -> Iterator[str]:
        """Why there is no plan yet, what it was predicted to need and needed, and the plans of other batch sizes."""
        prediction = self.plan.prediction
        if self.measuring:
            yield f"  not yet the plan of the run: {self.measuring}"
        if prediction:
            yield f"  predicted: {prediction}"
        if self.measured_bytes:
            # Without an allocator that counts, only the tensors that this model's steps create are counted. A reader
            # who compares the figure with the process's memory must know that a second model is not in it.
            alone = ", without other models" if prediction and prediction.device in ("cpu", "mps") else ""
            yield f"  measured: peak {format_bytes(self.measured_bytes)} in the first step of this plan{alone}"
        if self.without and self.plan.active():
            yield f"  without checkpointing: {self.without}, predicted"
        if self.voided:
            yield f"  measured again: {counted(self.voided, 'time')}, because a step under its plan exceeded the budget"
        if len(self.plans) > 1:
            predictions = [plan.prediction for plan in self.plans.values() if plan.prediction]
            over = sum(p.budget_bytes is not None and p.peak_bytes > p.budget_bytes for p in predictions)
            no_plan = f", for {over} of which no plan fits" if over else ""
            yield f"  plans for batches of {len(self.plans)} sizes{no_plan}:"
            for shape, plan in self.plans.items():
                yield f"    {shape}: {plan.summary()}; {plan.prediction or 'not predicted'}"

    def _lines_of_steps(self) -> Iterator[str]:
        """Which blocks ran and were recomputed, and whether their backward got what their forward had saved."""
        if self.frozen:
            verb = "saves" if len(self.frozen) == 1 else "save"
            yield f"  {counted(len(self.frozen), 'block')} before the first trainable parameter {verb} nothing"
        calls = sum(self.forwards.values())
        if calls:
            # `full` counts a block's run, `selective` each operation: the two do not compare, so the line says so.
            units = "recomputations (of a block, or of an operation under `selective`)"
            yield f"  so far: {counted(calls, 'forward')} of planned blocks; {sum(self.recomputed.values())} {units}"
        if self.watched:
            yield f"  watched: {self.watched}"
            for text in self.watched.differences:
                yield f"    {text}"
            for name, action in self.avoided.items():
                yield f"    since then, {name} runs under {action}"
            for part, reason in self.watched.not_checked.items():
                yield f"    not checked: {part} ({reason})"

    def _lines_of_parts(self) -> Iterator[str]:
        """What compilers, offloading, the head in chunks and `selective` did in the last forward."""
        if self.in_graphs:
            yield f"  in graphs of torch.compile, where nothing is counted: {counted(len(self.in_graphs), 'block')}"
        actions = self.plan.active()
        # Inside a graph there are no autograd nodes from which `selective` could rebuild; see `engines/rebuild`.
        if any(actions[name].kind == "selective" for name in self.in_graphs):
            yield "  `selective` runs as `full` in graphs of torch.compile"
        if any(actions[name].made for name in self.in_graphs):
            yield "  blocks in graphs of torch.compile keep their inputs, despite `segments`"
        if self.compiled_by_others:
            blocks = counted(len(self.compiled_by_others), "block")
            yield f"  compiled by something else, so shares have no effect: {blocks}"
        if self.holding:
            yield f"  kept their inputs despite `segments`, see the warning: {', '.join(self.holding)}"
        if self.not_in_tiles:
            yield f"  feed-forwards not in tiles, see the warning: {', '.join(self.not_in_tiles)}"
        if self.moved:
            moved = format_bytes(sum(self.moved.values()))
            yield f"  moved to host memory in the last forward: {moved} of {counted(len(self.moved), 'block')}"
        if self.head_ran:
            yield f"  head, last call: {self.head_ran}; {counted(self.chunked_heads, 'call')} in chunks so far"
        if self.dropped_tensors:
            yield f"  `selective` dropped {counted(self.dropped_tensors, 'saved tensor')} in the last forward"
        if self.saved:
            yield "  `selective` in the first forward, summed over blocks:"
            yield from (f"    {row}" for row in self.saved[:SHOWN])
        rest = self.saved[SHOWN:]
        if rest:
            yield f"    {counted(len(rest), 'other')}  {format_bytes(sum(row.bytes for row in rest))}"
