"""Records only: what a model is made of, and what each block of it gets. Free of torch.

A `Plan` names blocks by qualified name, so it can be saved, read by people and given to another run of the same model.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.units import format_bytes, format_seconds

ACTIONS = ("keep", "selective", "full", "offload")
SAVE_CLASSES = ("linear", "attention")
"""Of operations whose results `selective` may save."""
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Block:
    """One repeated transformer layer."""

    name: str
    """Qualified name inside the base model, free of wrapper segments: `model.layers.0`."""
    stack: str
    """The stack it is counted in."""
    index: int
    """Position in the stack, from 0."""
    kind: str
    """Class name: `LlamaDecoderLayer`."""


@dataclasses.dataclass(frozen=True)
class Action:
    """What happens to one block's activations."""

    kind: str = "keep"
    """`keep`, `selective`, `full` or `offload`."""
    save: tuple[str, ...] = ()
    """Op classes whose results stay, for `selective`."""
    segment: int | None = None
    """For `full`: neighbours of the same number are recomputed as one region."""
    moved: bool = False
    """For `selective`: what is saved lies in host memory until backward."""

    def __str__(self) -> str:
        if self.segment is not None:
            return f"{self.kind} (segment {self.segment})"
        where = " in host memory" if self.moved else ""
        return f"{self.kind} (save {', '.join(self.save)}{where})" if self.save else self.kind


KEEP = Action("keep")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a plan is expected to cost."""

    peak_bytes: int
    """Most bytes of tensors alive at any moment of a step."""
    step_seconds: float
    """Of one optimizer step, all its micro-steps."""
    tokens: int
    """Of one optimizer step."""
    parts: tuple[tuple[str, int], ...]
    """What fills the peak: (name, bytes)."""
    budget_bytes: int | None = None
    """What was allowed, for a plan that was made for a budget."""
    device: str = ""
    """Whose speed was assumed."""

    @property
    def tokens_per_second(self) -> float | None:
        """Predicted; unknown where no tokens are counted."""
        return self.tokens / self.step_seconds if self.tokens and self.step_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**dataclasses.asdict(self), "parts": dict(self.parts)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Prediction:
        """Read `to_dict`'s form."""
        parts = tuple((str(name), int(size)) for name, size in given["parts"].items())
        # As a number in any case: YAML reads 2e-05 as a text.
        counts = {name: int(given[name]) for name in ("peak_bytes", "tokens")}
        return cls(**{**given, **counts, "parts": parts, "step_seconds": float(given["step_seconds"])})


@dataclasses.dataclass(frozen=True)
class Plan:
    """One action for every block of every stack."""

    family: str
    """Family row the blocks were found by, or `generic`."""
    model: str
    """Class name of the base model."""
    actions: tuple[tuple[Block, Action], ...]
    """In the order the blocks run within each stack; stacks one after another."""
    prediction: Prediction | None = dataclasses.field(default=None, compare=False)
    """What it is expected to cost, where that was computed."""
    head: int | str = "full"
    """The head and its loss as a whole, or in chunks of so many tokens (`auto`: as many as seems best)."""

    def stacks(self) -> dict[str, list[tuple[Block, Action]]]:
        """The same pairs, stack by stack."""
        groups = itertools.groupby(self.actions, key=lambda pair: pair[0].stack)
        return {stack: list(pairs) for stack, pairs in groups}

    def segments(self) -> list[tuple[str, list[str]]]:
        """What is recomputed together, run by run of neighbours: (`segment 0 of decoder`, names of its blocks)."""
        found: list[tuple[str, list[str]]] = []
        for stack, pairs in self.stacks().items():
            for segment, group in itertools.groupby(pairs, key=lambda pair: pair[1].segment):
                if segment is not None:
                    found.append((f"segment {segment} of {stack}", [block.name for block, _ in group]))
        return found

    def active(self) -> dict[str, Action]:
        """Qualified name -> action, for the blocks whose action is not `keep`."""
        return {block.name: action for block, action in self.actions if action.kind != "keep"}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; `Plan.from_dict` reads it back to an equal plan."""

        def row(block: Block, action: Action) -> dict[str, Any]:
            return {"block": block.name, "kind": block.kind, "action": action.kind} | (
                ({"save": list(action.save)} if action.save else {})
                | ({"segment": action.segment} if action.segment is not None else {})
                | ({"moved": True} if action.moved else {})
            )

        stacks = {stack: [row(*pair) for pair in pairs] for stack, pairs in self.stacks().items()}
        found = {"hf_ckpt_plan": FORMAT_VERSION, "family": self.family, "model": self.model, "stacks": stacks}
        found |= {"head": self.head} if self.head != "full" else {}
        return found if self.prediction is None else {**found, "prediction": self.prediction.to_dict()}

    @classmethod
    def from_dict(cls, given: Any, source: str = "the plan") -> Plan:
        """Read `to_dict`'s form. Raises `PlanMismatchError` when it is no plan of this format."""
        if not isinstance(given, Mapping) or given.get("hf_ckpt_plan") != FORMAT_VERSION:
            raise PlanMismatchError(f"{source} is no plan of hf_ckpt (format {FORMAT_VERSION}): {str(given)[:120]!r}")
        try:
            actions = tuple(_read_rows(given["stacks"]))
            predicted = given.get("prediction")
            prediction = None if predicted is None else Prediction.from_dict(predicted)
            return cls(str(given["family"]), str(given["model"]), actions, prediction, _read_head(given))
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise PlanMismatchError(f"{source} is damaged: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON (or as YAML, if the path ends so)."""
        path = Path(path)
        if path.suffix in (".yaml", ".yml"):
            import yaml

            text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        else:
            text = json.dumps(self.to_dict(), indent=1) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a saved plan, JSON or YAML. Raises `PlanMismatchError` when the file cannot be read as one."""
        try:
            loaded = load_yaml(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanMismatchError(f"cannot read a plan from {str(path)!r}: {error}") from error
        return cls.from_dict(loaded, source=str(path))

    def __str__(self) -> str:
        lines = [f"{self.model} (family {self.family}), {len(self.active())} of {len(self.actions)} blocks planned"]
        for stack, pairs in self.stacks().items():
            chosen: dict[str, list[int]] = {}
            for block, action in pairs:
                chosen.setdefault(str(action), []).append(block.index)
            kinds = ", ".join(dict.fromkeys(block.kind for block, _ in pairs))
            parts = [f"{action} {_spans(indices)}" for action, indices in chosen.items()]
            lines.append(f"  {stack} ({len(pairs)} x {kinds}): {'; '.join(parts)}")
        if self.head != "full":
            lines.append(f"  head: in chunks ({self.head if isinstance(self.head, str) else f'{self.head} tokens'})")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Description:
    """What `hf_ckpt.describe` returns: the plan, and what has become of it."""

    plan: Plan
    spec: dict[str, Any]
    """The spec the plan came from."""
    enabled: bool
    """Whether the plan is on the blocks now."""
    frozen: tuple[str, ...]
    """Planned blocks below the first trainable parameter: they save nothing and are not recomputed."""
    forwards: dict[str, int]
    """Block -> checkpointed forward calls so far."""
    recomputed: dict[str, int]
    """Block -> recomputations so far: of the block, or of single operations in it (`selective`)."""
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    """Op class, or class of a module run again -> bytes that `selective` dropped in the last forward of every block."""
    kept: dict[str, int] = dataclasses.field(default_factory=dict)
    """Autograd node -> bytes of its results that `selective` kept, parameters left out."""
    kept_to_rebuild: dict[str, int] = dataclasses.field(default_factory=dict)
    """The part of `kept` that autograd itself would not hold: without `selective` it holds the rest, and `dropped`."""
    moved: dict[str, int] = dataclasses.field(default_factory=dict)
    """Block -> bytes that its last forward moved to host memory."""
    chunked_heads: int = 0
    """Calls of the head in chunks so far."""
    in_graphs: tuple[str, ...] = ()
    """Planned blocks that were called from a graph of torch.compile, where no call is counted."""
    head_in_graph: bool = False
    """Whether the head, planned to run in chunks, ran as a whole in such a graph."""

    def save(self, path: str | Path) -> None:
        """Save the plan; see `Plan.save`."""
        self.plan.save(path)

    def __str__(self) -> str:
        state = "enabled" if self.enabled else "installed, not enabled (call model.gradient_checkpointing_enable())"
        lines = [f"hf_ckpt: {state}; spec {json.dumps(self.spec)}", str(self.plan)]
        predicted = self.plan.prediction
        if predicted is not None:
            within = "" if predicted.budget_bytes is None else f" within {format_bytes(predicted.budget_bytes)}"
            seconds = format_seconds(predicted.step_seconds)
            lines.append(f"  predicted: peak {format_bytes(predicted.peak_bytes)}{within}, step {seconds}")
        if self.frozen:
            lines.append(
                f"  kept in effect: {len(self.frozen)} blocks below the first trainable parameter save nothing"
            )
        if any(self.forwards.values()):
            lines.append(
                f"  so far: {sum(self.forwards.values())} checkpointed block calls, "
                f"{sum(self.recomputed.values())} recomputations"
            )
        if self.in_graphs:
            lines.append(f"  in graphs of torch.compile, where nothing is counted: {len(self.in_graphs)} blocks")
        if self.head_in_graph:
            lines.append("  in a graph of torch.compile, where it runs as a whole: the head")
        if self.moved:
            moved = format_bytes(sum(self.moved.values()))
            lines.append(f"  moved to host memory in the last forward: {moved} of {len(self.moved)} blocks")
        if self.chunked_heads:
            lines.append(f"  so far: {self.chunked_heads} calls of the head in chunks")
        for verb, parts in (("dropped, to be rebuilt", self.dropped), ("kept", self.kept)):
            if parts:
                shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
                lines.append(f"  {verb} in the last forward: {format_bytes(sum(parts.values()))} ({shown})")
        return "\n".join(lines)


def load_yaml(text: str) -> Any:
    """What a YAML text says. Raises `ValueError` for one that says nothing."""
    import yaml

    try:
        return yaml.safe_load(text)
    # PyYAML lets other errors through for values that do not fit their tags: a date that is none, `!!bool maybe`.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def run_lengths(blocks: int, runs: int) -> list[int]:
    """So many runs of so many blocks, of lengths that differ by one at most, the longer first."""
    each, longer = divmod(blocks, runs)
    return [each + (number < longer) for number in range(runs)]


def _spans(indices: list[int]) -> str:
    """`_spans([0, 1, 2, 5]) == "0-2, 5"`; a long run of equal steps is shortened: `"0, 2, ... 78"`."""
    steps = {later - earlier for earlier, later in itertools.pairwise(indices)}
    if len(indices) > 4 and len(steps) == 1 and steps != {1}:
        return f"{indices[0]}, {indices[1]}, ... {indices[-1]}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _read_head(given: Mapping[str, Any]) -> int | str:
    head = given.get("head", "full")
    if head not in ("full", "auto") and not (type(head) is int and head >= 1):
        raise ValueError(f"its head is {head!r}, which is neither a number of tokens nor `auto` nor `full`")
    return head  # type: ignore[no-any-return]


def _read_rows(stacks: Mapping[str, list[Mapping[str, Any]]]) -> Iterator[tuple[Block, Action]]:
    for stack, rows in stacks.items():
        for index, row in enumerate(rows):
            if row["action"] not in ACTIONS:
                raise ValueError(f"{row['block']} has the unknown action {row['action']!r}")
            block = Block(name=str(row["block"]), stack=str(stack), index=index, kind=str(row["kind"]))
            segment = row.get("segment")
            if segment is not None and (row["action"] != "full" or type(segment) is not int):
                raise ValueError(f"{row['block']} has the segment {segment!r}, which is a number and goes with `full`")
            moved = row.get("moved", False)
            if type(moved) is not bool or (moved and row["action"] != "selective"):
                raise ValueError(
                    f"{row['block']} has `moved` {moved!r}, which is true or false and goes with `selective`"
                )
            save = row.get("save", [])
            if not isinstance(save, (list, tuple)) or any(name not in SAVE_CLASSES for name in save):
                raise ValueError(f"{row['block']} saves {save!r}, which must be a list out of {list(SAVE_CLASSES)}")
            if save and row["action"] != "selective":
                raise ValueError(f"{row['block']} has `save`, which goes with `selective`")
            yield block, Action(row["action"], tuple(save), segment, moved)
