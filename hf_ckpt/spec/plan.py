"""`Plan`: one action for every block of a model, with its predicted memory and time.

A plan names blocks by their qualified names. It can be saved, edited, and used in another run of the same model. This
file does not import torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hf_ckpt.errors import PlanMismatchError, shown
from hf_ckpt.spec.actions import ACTIONS, COMPILED, KEEP, Action
from hf_ckpt.spec.files import read_values, write_text
from hf_ckpt.spec.reading import OPTIONS, READERS, one_of, read_keys
from hf_ckpt.units import counted, format_bytes, format_seconds

FORMAT_VERSION = 1
"""Format version of saved plans, which each file contains."""
SUFFIXES = (".json", ".yaml", ".yml")
"""Allowed suffixes of saved plans."""


@dataclasses.dataclass(frozen=True)
class Block:
    """One repeated transformer layer."""

    name: str
    """Qualified name inside the base model, without the segments that wrappers add: `model.layers.0`."""
    stack: str
    """Name of the stack that the block is counted in."""
    index: int
    """Position in the stack, from 0."""
    kind: str
    """Class name of the layer, such as `LlamaDecoderLayer`."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted memory and time of a training step under a plan."""

    peak_bytes: int
    """The most bytes of tensors alive at any moment of a training step."""
    step_seconds: float
    """Seconds of one optimizer step with all its micro-steps."""
    tokens: int
    """Tokens trained on in one optimizer step; 0 if they are not counted."""
    parts: tuple[tuple[str, int], ...]
    """What fills the peak, as (name, bytes)."""
    budget_bytes: int | None = None
    """The budget that the plan was made for; None without one."""
    device: str = ""
    """Name of the device whose speed was assumed."""
    stacks: tuple[tuple[str, int], ...] = ()
    """Bytes that the blocks of each stack keep for their backwards, as (name of the stack, bytes)."""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens trained on per second, as predicted; None if tokens are not counted."""
        return self.tokens / self.step_seconds if self.tokens and self.step_seconds else None

    def __str__(self) -> str:
        within = ""
        if self.budget_bytes is not None:
            budget = format_bytes(self.budget_bytes)
            within = f" within {budget}" if self.peak_bytes <= self.budget_bytes else f" above {budget} (no plan fits)"
        timed = f"step {format_seconds(self.step_seconds)}" if self.step_seconds else "not timed"
        return f"peak {format_bytes(self.peak_bytes)}{within}, {timed}"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict, which `Prediction.from_dict` reads back."""
        return {**dataclasses.asdict(self), "parts": dict(self.parts), "stacks": dict(self.stacks)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prediction:
        """Read the dict that `to_dict` returns. Raises `KeyError`, `TypeError` or `ValueError` if it is invalid."""
        seconds = float(data["step_seconds"])  # YAML reads 2e-05 as a text
        if not 0 <= seconds < math.inf:
            raise ValueError(f"`step_seconds` must be a number of at least 0, but is {shown(seconds)} instead")
        stacks = data.get("stacks", {})
        device = _text({"device": "", **data}, "device")
        sizes = (data["peak_bytes"], data["tokens"], data.get("budget_bytes") or 0)
        for size in (*sizes, *data["parts"].values(), *stacks.values()):
            if type(size) is not int or abs(size) >= 2**63:  # True == 1 in Python
                raise ValueError(f"bytes and tokens of a prediction must be whole numbers, but one is {shown(size)}")
        pairs = {"parts": tuple(data["parts"].items()), "stacks": tuple(stacks.items())}
        return cls(**{**data, **pairs, "device": device, "step_seconds": seconds})


@dataclasses.dataclass(frozen=True)
class Plan:
    """One action for every block of a model.

        plan = hf_ckpt.predict("llama-3.1-8b", 4, tokens=4096, device="h100", budget="60GiB").plan
        plan.save("plan.json")
        hf_ckpt.install(model, hf_ckpt.Plan.load("plan.json"))  # or the spec {"plan": "plan.json"}

    `print(plan)` shows which blocks get which action.
    """

    family: str
    """Name of the family that the model belongs to, or `generic`."""
    model: str
    """Class name of the base model."""
    actions: tuple[tuple[Block, Action], ...]
    """Pairs of a block and its action, stack by stack, in the order in which the blocks run."""
    prediction: Prediction | None = dataclasses.field(default=None, compare=False)
    """Predicted memory and time; None if they were not computed. `==` ignores it."""
    head: int | str = "whole"
    """How the head and its loss run: `whole`, a number (in chunks of so many tokens), or `auto` (in chunks
    whose size is chosen in each call)."""

    def stacks(self) -> dict[str, list[tuple[Block, Action]]]:
        """Return stack name -> its blocks with their actions."""
        groups = itertools.groupby(self.actions, key=lambda pair: pair[0].stack)
        return {stack: list(pairs) for stack, pairs in groups}

    def active(self) -> dict[str, Action]:
        """Return block name -> action, for the blocks whose action is not `keep`."""
        return {block.name: action for block, action in self.actions if action.kind != "keep"}

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict, which `Plan.from_dict` reads back to an equal plan."""

        def row(block: Block, action: Action) -> dict[str, Any]:
            written = {key: getattr(action, key) for key in OPTIONS if getattr(action, key) != getattr(KEEP, key)}
            return {"block": block.name, "kind": block.kind, "action": action.kind, **written}

        stacks = {stack: [row(*pair) for pair in pairs] for stack, pairs in self.stacks().items()}
        plan = {"hf_ckpt_plan": FORMAT_VERSION, "family": self.family, "model": self.model, "stacks": stacks}
        if self.head != "whole":
            plan["head"] = self.head
        if self.prediction is not None:
            plan["prediction"] = self.prediction.to_dict()
        return plan

    @classmethod
    def from_dict(cls, data: Any, source: str = "the plan") -> Plan:
        """Read the dict that `to_dict` returns. Error messages name its `source`.

        Raises `PlanMismatchError` if it is not a plan of this format, or is damaged.
        """
        version = data.get("hf_ckpt_plan") if isinstance(data, Mapping) else None
        if type(version) is not int or version != FORMAT_VERSION:  # True == 1 in Python
            raise PlanMismatchError(f"{source} is not a plan of hf_ckpt (format {FORMAT_VERSION}): {shown(data)}")
        try:
            actions = tuple(_read_rows(data["stacks"]))
            predicted = data.get("prediction")
            prediction = None if predicted is None else Prediction.from_dict(predicted)
            head = data.get("head", "whole")
            head = READERS["head"]("whole" if head == "full" else head)  # the old name, in edited files
            return cls(_text(data, "family"), _text(data, "model"), actions, prediction, head)
        # People edit these files: any value may be of any type. These are what the readers raise for it.
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
            raise PlanMismatchError(f"{source} is damaged: {shown(error, 400)}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON (`.json`) or YAML (`.yaml`, `.yml`) file in an existing folder.

        Raises `FileError` for another suffix, and if the file cannot be written; an existing file is then unchanged.
        """
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        if Path(path).suffix.lower() != ".json":
            text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        write_text(path, text, SUFFIXES)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a JSON or YAML file. Raises `PlanMismatchError` if the file does not hold a plan."""
        try:
            loaded = read_values(path)
        except ValueError as error:
            raise PlanMismatchError(f"cannot read a plan from {shown(str(path))}: {error}") from error
        return cls.from_dict(loaded, source=str(path))

    def summary(self) -> str:
        """Return the actions in one line: `full on blocks 0, 2 of 4`. Several stacks are listed one by one."""
        stacks = self.stacks()
        parts = [(f"{stack}: " if len(stacks) > 1 else "") + _chosen(pairs) for stack, pairs in stacks.items()]
        if self.head != "whole":
            parts.append("head in chunks")
        return "; ".join(parts)

    def __str__(self) -> str:
        blocks = counted(len(self.actions), "block")
        lines = [f"{self.model} (family {self.family}), {len(self.active())} of {blocks} checkpointed"]
        kept_bytes = dict(self.prediction.stacks) if self.prediction else {}
        for stack, pairs in self.stacks().items():
            kinds = ", ".join(dict.fromkeys(block.kind for block, _ in pairs))
            parts = [f"{action} {spans(indices)}" for action, indices in _positions(pairs).items()]
            parts += _made_again(pairs)
            if stack in kept_bytes:
                parts.append(f"{format_bytes(kept_bytes[stack])} kept for backward")
            lines.append(f"  {stack} ({len(pairs)} x {kinds}): {'; '.join(parts)}")
        if self.head != "whole":
            size = self.head if isinstance(self.head, str) else f"{self.head} tokens"
            lines.append(f"  head: planned in chunks ({size})")
        return "\n".join(lines)


def staying(blocks: Iterable[Block]) -> set[str]:
    """Return the names of blocks whose tensors never move to host memory: the last one of each stack.

    Backward begins with it, so moving what it keeps would gain nothing.
    """
    return {block.name for block in {block.stack: block for block in blocks}.values()}


def _positions(pairs: list[tuple[Block, Action]]) -> dict[str, list[int]]:
    """Return action, in words -> the positions of its blocks in their stack. `_made_again` counts those in segments."""
    positions: dict[str, list[int]] = {}
    for block, action in pairs:
        positions.setdefault(str(dataclasses.replace(action, made=False)), []).append(block.index)
    return positions


def _made_again(pairs: list[tuple[Block, Action]]) -> Iterator[str]:
    """Yield how many blocks of a stack do not hold their hidden states, in words; nothing if all do."""
    count = sum(action.made for _, action in pairs)
    if count:
        yield f"{count} of {counted(len(pairs), 'input')} recomputed"


def _chosen(pairs: list[tuple[Block, Action]]) -> str:
    """Return which blocks of one stack have which action, in one line."""
    chosen = _positions(pairs)
    if len(chosen) > 1:
        chosen.pop(str(KEEP), None)
    if [len(places) for places in chosen.values()] == [len(pairs)]:
        every = "all " if len(pairs) > 1 else ""
        text = f"{next(iter(chosen))} on {every}{counted(len(pairs), 'block')}"
    else:
        parts = [f"{action} on block{'s' if len(at) > 1 else ''} {spans(at)}" for action, at in chosen.items()]
        text = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1]))) + f" of {len(pairs)}"
    return "; ".join([text, *_made_again(pairs)])


def spans(indices: list[int]) -> str:
    """Write positions as text: `spans([0, 1, 2, 5]) == "0-2, 5"`, and a long run of equal steps as "0, 2, ... 78"."""
    # Every other block of 80 is 40 numbers: too long for the one line of a plan.
    steps = {later - earlier for earlier, later in itertools.pairwise(indices)}
    if len(indices) > 4 and len(steps) == 1 and steps != {1}:
        return f"{indices[0]}, {indices[1]}, ... {indices[-1]}"
    # Consecutive numbers all differ from their places in the list by the same amount.
    groups = itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0])
    runs = [[index for _, index in group] for _, group in groups]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _read_rows(stacks: Mapping[str, list[Mapping[str, Any]]]) -> Iterator[tuple[Block, Action]]:
    """Read `Plan.actions` from a saved plan. Raises `KeyError` or `ValueError` if a row is invalid."""
    seen: set[str] = set()  # a file that names a block twice would give it the last action, without a word
    for stack, rows in stacks.items():
        for index, row in enumerate(rows):
            name = _text(row, "block")
            if name in seen:
                raise ValueError(f"{name} is named twice")
            seen.add(name)
            yield Block(name=name, stack=str(stack), index=index, kind=_text(row, "kind")), _read_action(row)


def _text(row: Mapping[str, Any], key: str) -> str:
    """Read a text of a saved plan. Raises `KeyError` or `ValueError` without one."""
    if not isinstance(row[key], str):
        raise ValueError(f"`{key}` must be a text, but is {shown(row[key])} instead")
    return str(row[key])


def _read_action(row: Mapping[str, Any]) -> Action:
    """Read the action of a row. Raises `KeyError` or `ValueError`, with all problems, if it is invalid."""
    kind = one_of(*ACTIONS)(row["action"])
    values, problems = read_keys({key: row[key] for key in OPTIONS if key in row}, OPTIONS)
    options = {key: value for key, value in values.items() if value != getattr(KEEP, key)}
    for option in options:
        if option not in ACTIONS[kind].options:
            owners = " or ".join(f"`{record.name}`" for record in ACTIONS.values() if option in record.options)
            problems.append(f"`{option}` goes with {owners}, but its action is `{kind}`.")
    if kind == COMPILED.kind and values.get("share") is None:
        problems.append("it is compiled, so it needs a `share` from 0 to 1.")
    if problems:
        raise ValueError(f"{row['block']}: {' '.join(problems)}")
    return Action(kind, **options)
