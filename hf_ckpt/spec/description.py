"""`Description`: the plan on a model, with counts of what it has done. `hf_ckpt.describe` returns it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import format_bytes


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
    updated: tuple[str, ...]
    """What recomputations updated once more while backward got what the forward saved, in words."""
    not_checked: dict[str, str]
    """What is never checked -> why."""

    def __str__(self) -> str:
        if not self.checks:
            return "no checks so far"
        found = f"{len(self.differences)} checks found differences" if self.differences else "all equal"
        return f"{self.checks} checks, {self.compared:,} tensors compared: {found}"


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
    plans: dict[str, Plan] = dataclasses.field(default_factory=dict)
    """Under `budget` and `auto`: the batch shape that a plan was made for, in words -> the plan. A smaller batch
    may use it, too; `plan` is that of the last batch."""
    measuring: str | None = None
    """Under `budget` and `auto`, why `plan` is not the plan of the run yet; None if it is."""
    measured_bytes: int | None = None
    """Under `budget` and `auto`, the measured peak of the plan's first step; None if it was not measured."""
    moved: dict[str, int] = dataclasses.field(default_factory=dict)
    """Block name -> bytes that its last forward moved to host memory."""
    watched: Watched | None = None
    """Results of the watch so far; None if nothing is checked."""
    chunked_heads: int = 0
    """Calls of the head that ran in chunks so far."""
    head_ran: str = ""
    """How the last call of a head ran that is planned to run in chunks, in words: with the tokens of a chunk, or why it
    ran as a whole. Empty before the first."""
    in_graphs: tuple[str, ...] = ()
    """Planned blocks inside a graph of torch.compile, where calls are not counted."""
    compiled_by_others: tuple[str, ...] = ()
    """Blocks that hf_ckpt should compile, but that are in a graph of other code, where their share has no effect."""

    def __str__(self) -> str:
        state = "enabled" if self.enabled else "installed, not enabled (call activation_checkpointing_enable())"
        watched, moved = self.watched, format_bytes(sum(self.moved.values()))
        measured = f"peak {format_bytes(self.measured_bytes)} in the first step of this plan"
        if self.plan.prediction and self.plan.prediction.device in ("cpu", "mps"):  # live tensors are counted there
            measured += ", without other models"
        stacks = self.plan.prediction.stacks if self.plan.prediction else ()
        kept = [f"{stack} {format_bytes(size)}" for stack, size in stacks]
        calls, recomputed = sum(self.forwards.values()), sum(self.recomputed.values())
        units = "(of a block, or of an operation under `selective`)"
        not_counted = "in graphs of torch.compile, where nothing is counted"
        lines = {
            f"hf_ckpt: {state}; spec {json.dumps(self.spec)}\n{self.plan}": True,
            f"  not the plan of the run yet: {self.measuring}": self.measuring,
            f"  predicted: {self.plan.prediction}": self.plan.prediction,
            f"    of that, kept by blocks: {', '.join(kept)}": len(kept) > 1,
            f"  measured: {measured}": self.measured_bytes,
            f"  plans for batches of {len(self.plans)} sizes:": len(self.plans) > 1,
            **{
                f"    {shape}: {plan.summary()}; {plan.prediction or 'not predicted'}": len(self.plans) > 1
                for shape, plan in self.plans.items()
            },
            f"  {len(self.frozen)} blocks below the first trainable parameter save nothing": self.frozen,
            f"  so far: {calls} forwards of planned blocks; {recomputed} recomputations {units}": calls,
            f"  watched: {watched}": watched,
            **{f"    {text}": True for text in ((*watched.differences, *watched.updated) if watched else ())},
            **{
                f"    not checked: {what} ({why})": True
                for what, why in (watched.not_checked if watched else {}).items()
            },
            f"  {not_counted}: {len(self.in_graphs)} blocks": self.in_graphs,
            "  `selective` runs as `full` in graphs of torch.compile": any(
                self.plan.active()[name].kind == "selective" for name in self.in_graphs
            ),
            f"  compiled by something else, so that no share counts: {len(self.compiled_by_others)} blocks": (
                self.compiled_by_others
            ),
            f"  moved to host memory in the last forward: {moved} of {len(self.moved)} blocks": self.moved,
            f"  head, last call: {self.head_ran}; {self.chunked_heads} calls in chunks so far": self.head_ran,
            f"  `selective` dropped {self.dropped_tensors} saved tensors in the last forward": self.dropped_tensors,
        }
        return "\n".join(line for line, is_shown in lines.items() if is_shown)
