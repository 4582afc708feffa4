"""`Forecast`: the answer to one question, which the console and the page show; and its sentences and lines.

Importing it does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_ckpt.console import print_plain
from hf_ckpt.forecast.devices import Device
from hf_ckpt.forecast.optimizers import training_arguments
from hf_ckpt.forecast.question import OF_THE_PLAN, Question, command_of
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import GIB, RESERVED, budget_bytes, exact_size, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from hf_ckpt.costs.costs import Timeline

HEADS = ("way to train it", "options to set", "peak", "step", "tokens/s", "fits")
"""Columns of the table of rows."""
NONE = {"policy": "none"}
"""The spec without checkpointing."""
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
"""What makes torch's allocator reserve only a few percent more than tensors need."""


@dataclasses.dataclass(frozen=True)
class ForecastRow:
    """One way to train, with its predicted cost."""

    name: str
    """What it is, in words."""
    options: str
    """Options with which `hf-ckpt plan` plans for it, if they differ from the question's; empty if none do."""
    peak_bytes: int
    """Most bytes of tensors alive at any moment of a step."""
    step_seconds: float
    """Seconds of one optimizer step with all its micro-steps."""
    tokens_per_second: float | None
    """Tokens that one rank trains on in a second; None if they are not counted."""
    fits: bool
    """Whether the peak is within the budget and the device."""
    spec: Mapping[str, Any] | None
    """The checkpointing kwargs of a plan; None for ways of transformers."""

    def cells(self) -> tuple[str, ...]:
        """It as texts, in the columns of `HEADS`."""
        speed = f"{self.tokens_per_second:,.0f}" if self.tokens_per_second else "-"
        fits = "yes" if self.fits else "no"
        return self.name, self.options, format_bytes(self.peak_bytes), format_seconds(self.step_seconds), speed, fits


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The fastest plan within a budget, with its predicted memory and time. `hf_ckpt.predict` returns it.

    forecast = hf_ckpt.predict("llama-3.1-8b", 4, tokens=4096, lora=16, device="h100", budget="60GiB")
    print(forecast.verdict)  # Fits: 59.9 of 79.1 GiB on an H100 SXM, 8,000 tokens per second.
    forecast.plan.save("plan.json")
    forecast.within("50GiB").step_seconds  # another budget; takes milliseconds

    If no plan fits (`predict` then raises an error), the figures are those of the plan with the lowest peak.
    """

    row: ForecastRow
    """The plan as one way to train."""
    verdict: str
    """Whether it fits, in words."""
    assumed: str
    """What was assumed about the training, in one line."""
    budget_bytes: int
    """The peak that is allowed."""
    floor_bytes: int
    """The lowest peak of any plan."""
    parts: Mapping[str, int]
    """What fills the peak: name -> bytes. They add up to `peak_bytes`."""
    allocator_bytes: tuple[int, int]
    """What to leave for the allocator beside the peak: the least and the most of published runs. No part of what fits;
    zeros on a CPU."""
    left: tuple[str, ...]
    """What the peak leaves of the device, and what of it is for the allocator, in lines; none if it does not fit."""
    notes: tuple[str, ...]
    """What else to know."""
    others: tuple[ForecastRow, ...]
    """Other ways to train; if no plan fits, what fits with a change."""
    frontier: tuple[ForecastRow, ...]
    """The fastest plans for other budgets; the lowest peak comes first."""
    write: Mapping[str, str]
    """What to copy: where it goes -> its lines; empty if no plan fits."""
    plan: Plan | None
    """The plan; None if no plan fits."""
    timeline: Timeline = dataclasses.field(repr=False, compare=False)
    """Memory over one step under the plan. `to_dict` leaves this and `within` out."""
    within: Callable[[float | str], Forecast] = dataclasses.field(repr=False, compare=False)
    """Returns the forecast for another budget: bytes, a text such as "20GiB", or a share of the device ("80%" or 0.8).
    Raises `InfeasibleError` if no plan fits, and `UnitError` for an invalid budget."""

    @property
    def rows(self) -> tuple[ForecastRow, ...]:
        """The plan and other ways to train; if no plan fits, what fits with a change."""
        return self.others if self.plan is None else (self.row, *self.others)

    @property
    def usual(self) -> tuple[ForecastRow, ...]:
        """The ways of transformers; `none` comes first."""
        return tuple(row for row in self.others if row.spec is None)

    @property
    def answer(self) -> str:
        """The same as `verdict`."""
        return self.verdict

    @property
    def name(self) -> str:
        """The name of `row`."""
        return self.row.name

    @property
    def options(self) -> str:
        """The options of `row`."""
        return self.row.options

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors alive at any moment of a step."""
        return self.row.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step with all its micro-steps."""
        return self.row.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that one rank trains on in a second; None if they are not counted."""
        return self.row.tokens_per_second

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget and the device."""
        return self.row.fits

    @property
    def spec(self) -> Mapping[str, Any] | None:
        """The checkpointing kwargs of the plan."""
        return self.row.spec

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that can be written as JSON."""
        return {
            **dataclasses.asdict(self.row),
            "answer": self.verdict,
            "assumed": self.assumed,
            "budget_bytes": self.budget_bytes,
            "floor_bytes": self.floor_bytes,
            "parts": dict(self.parts),
            "allocator_bytes": list(self.allocator_bytes),
            "left": list(self.left),
            "notes": list(self.notes),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "frontier": [dataclasses.asdict(row) for row in self.frontier],
            "write": dict(self.write),
            "plan": None if self.plan is None else self.plan.to_dict(),
        }

    def table(self) -> list[tuple[str, ...]]:
        """The rows as texts, in the columns of `HEADS`."""
        return [row.cells() for row in self.rows]


class Printer:
    """Prints an answer as its parts come. Long lines are not wrapped.

    Args:
        console: where it is printed.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._heading: tuple[str, ...] = ()
        """What is printed before the next row."""
        self._notes: tuple[str, ...] = ()
        """The notes that are printed already."""

    def show(self, forecast: Forecast) -> None:
        """Print whether it fits, what to copy, the plan, what fills its peak, and the rows so far."""
        print_plain(self._console, forecast.verdict, style="bold")
        lines = [forecast.assumed, *(f"note: {note}" for note in forecast.notes)]
        for title, text in forecast.write.items():
            lines += ["", f"{title}:", *(f"  {line}" for line in text.splitlines())]
        if forecast.plan:
            lines += ["", str(forecast.plan)]
        parts = [f"  {format_bytes(size):>10}  {name}" for name, size in forecast.parts.items() if size]
        lines += ["", f"{'' if forecast.plan else 'lowest '}peak: {format_bytes(forecast.peak_bytes)}", *parts]
        lines += [*forecast.left, ""]
        print_plain(self._console, *lines)
        self._notes = forecast.notes
        heading = "ways to train it; all figures are predicted"
        if not forecast.plan:
            budget = format_bytes(forecast.budget_bytes)
            heading = f"what fits into {budget} with a change; each row is the fastest plan"
        self._heading = heading, _line(HEADS)
        for row in forecast.rows:
            self.add(row)
        self._console.file.flush()  # to a pipe, too: what follows may take longer

    def add(self, row: ForecastRow) -> None:
        """Print a row."""
        print_plain(self._console, *self._heading, _line(row.cells()))
        self._heading = ()
        self._console.file.flush()

    def end(self, forecast: Forecast) -> None:
        """Print the notes that are known only at the end."""
        print_plain(self._console, *(f"note: {note}" for note in forecast.notes if note not in self._notes))


def _line(cells: Sequence[str]) -> str:
    """The columns of `HEADS` as a line. Names and options, whose longest is not known before, are at the end."""
    name, options, peak, step, speed, fits = cells
    return f"  {peak:>10}  {step:>9}  {speed:>9}  {fits:>4}  {name}{': ' if options else ''}{options}"


def print_comparison(comparison: Mapping[str, Any], console: Console) -> None:
    """Print what `forecast.comparison` returns: what fills two peaks, and how far each change leads to the other."""
    from rich.table import Column, Table

    for heading, names in (("what fills the lowest peak", "parts"), ("the first with one change", "changes")):
        rows = comparison[names]
        if not rows:
            continue
        print_plain(console, heading)
        titles = ("first", "second", "difference") if names == "parts" else ("lowest peak", "difference")
        table = Table("", *(Column(title, justify="right") for title in titles))
        for name, *sizes in rows:
            first = comparison["peaks"][0] if names == "changes" else sizes[0]
            table.add_row(name, *map(format_bytes, sizes), format_bytes(sizes[-1] - first))
        console.print(table)


def verdict_of(training: Question, device: Device, row: ForecastRow, budget_bytes: int, memory_bytes: int) -> str:
    """Whether the plan of a row fits, in one line: "Fits: 21.3 of 23.5 GiB on an RTX 4090, 4,100 tokens per second."

    `memory_bytes` is the memory of the device, or of the machine for a CPU.
    """
    # "an A100", "an L4", "an RTX 4090", "an 80 GB ...": read aloud, these begin with a vowel.
    article = "an" if device.title[0] in "AEFHILMNORSX8" else "a"
    name = device.title if device.memory_bytes is None else f"{article} {device.title}"
    # A tiny model's figures in GiB would all be 0.0.
    sizes = (row.peak_bytes, budget_bytes, memory_bytes)
    peak, budget, memory = (f"{size / GIB:.{1 if size >= GIB else 3}f}" for size in sizes)
    if row.fits:
        tokens = f", {row.tokens_per_second:,.0f} tokens per second" if row.tokens_per_second else ""
        each = f" on each of {training.ranks} ranks" if training.ranks > 1 else ""
        return f"Fits: {peak} of {memory} GiB on {name}{tokens}{each}."
    needs = f"every plan needs {peak} GiB or more" if row.peak_bytes > budget_bytes else f"the plan needs {peak} GiB"
    return f"Does not fit: {needs}. The budget is {budget} GiB, and {name} has {memory}."


def allocator_bytes_of(device: Device, row: ForecastRow) -> tuple[int, int]:
    """What torch's allocator may reserve beside the tensors of a row: the least and the most of published runs."""
    if device.memory_bytes is None:
        return 0, 0
    least, most = (round((share - 1) * row.peak_bytes) for share in RESERVED)
    return least, most


def left_of(device: Device, row: ForecastRow) -> tuple[str, ...]:
    """What the peak of a row leaves of the device, and what of it is for the allocator, in lines."""
    if device.memory_bytes is None or not row.fits:
        return ()
    least, most = map(format_bytes, allocator_bytes_of(device, row))
    least_share, most_share = (share - 1 for share in RESERVED)
    memory = device.memory_bytes
    spared = format_bytes(memory - budget_bytes(None, memory))
    lacks = ", more than is free" if allocator_bytes_of(device, row)[0] > memory - row.peak_bytes else ""
    return (
        f"free beside the peak: {format_bytes(memory - row.peak_bytes)} of {format_bytes(memory)}; "
        f"`auto` leaves {spared}",
        f"  the allocator takes {least} to {most}{lacks}: {least_share:.0%} to {most_share:.0%} of the peak in "
        f"published runs, or a few percent with {EXPANDABLE}, which helps if lengths vary",
    )


def notes_on_allocator(device: Device, row: ForecastRow) -> Iterator[str]:
    """A note on fragmentation, if the plan of a row fits, but perhaps not with what the allocator adds to tensors."""
    least, most = (row.peak_bytes + more for more in allocator_bytes_of(device, row))
    if device.memory_bytes is not None and row.fits and most > device.memory_bytes:
        yield (
            f"with what torch's allocator may add, this needs {format_bytes(least)} to {format_bytes(most)}: where "
            f"lengths vary, set {EXPANDABLE}, or --budget {int(100 / RESERVED[1])}%"
        )


def assumed_of(training: Question, model: str, device: Device, budget_bytes: int) -> str:
    """What was assumed about a training, in one line. `model` is the class of the model."""
    training = dataclasses.replace(training, **OF_THE_PLAN, autocast=training.autocast_name or "none")
    shown = ["batch", "tokens", "dtype", "optimizer", "attention"]
    shown += ["lora_targets"] if training.lora else []
    shown += ["double_quant"] if training.load_in_4bit else []
    command = command_of(training, shown)
    eight = "; 8-bit products as in bitsandbytes' source, without outlier columns" if training.load_in_8bit else ""
    return f"assumed: {command}; {model} on {device.title}, budget {format_bytes(budget_bytes)}{eight}"


def shortest_spec(plan: Plan, budget_bytes: int, host_budget: int | None) -> dict[str, Any]:
    """The shortest spec with which a training makes this plan by itself, for the peak and host memory allowed.

    A plan in segments recomputes all blocks in one way, so its spec is that way, with nothing to measure.
    """
    head = {} if plan.head == "whole" else {"head": plan.head}
    tile = next((action.tile for _, action in plan.actions if action.tile is not None), None)
    tiles = {} if tile is None else {"mlp": tile}
    # Nothing to do: with the kwargs of a plan, a training would measure steps under `full` to find that out.
    if all(action.kind == "keep" for _, action in plan.actions):
        return {**NONE, **head}
    segmented = next((action for _, action in plan.actions if action.made), None)
    if segmented is not None:
        policy = "full" if segmented.tile is not None else segmented.kind
        recomputed = {
            stack: [a.made for _, a in pairs if a.kind == segmented.kind] for stack, pairs in plan.stacks().items()
        }
        numbers = {stack: inputs.count(False) for stack, inputs in recomputed.items() if True in inputs}
        alike = len(set(numbers.values())) == 1 and len(numbers) == len(recomputed)
        return {"policy": policy, "segments": next(iter(numbers.values())) if alike else numbers, **head, **tiles}
    host = {"host_budget": exact_size(host_budget)} if host_budget else {}
    # Rounded up: the plan may need every byte of the budget.
    return {"policy": "budget", "budget": f"{-(-budget_bytes // 2**20)}MiB", **head, **tiles, **host}


def to_write(training: Question, spec: Mapping[str, Any], model: str) -> dict[str, str]:
    """What to copy: where it goes -> its lines. Values are written as JSON, which YAML includes.

    These are fields of `TrainingArguments` or of a config of TRL, and Python. `model` is the class of the model;
    empty for one that is there already.
    """
    trainer = training.trainer
    computing = training.dtype if training.way.deepspeed else training.autocast_name
    bf16: bool | None = computing == "bfloat16"
    if not bf16 and (trainer is None or computing == "float16"):
        bf16 = None  # left out, which otherwise means true to TRL's configs (trl/trainer/base_config.py)
    checkpoints = spec != NONE
    arguments = {
        "per_device_train_batch_size": training.batch,
        "gradient_accumulation_steps": training.accumulation if training.accumulation > 1 else None,
        "max_length": training.tokens if trainer in ("sft", "dpo") else None,
        "packing": True if training.packing and trainer == "sft" else None,
        **training_arguments(training.optimizer),
        "bf16": bf16,
        "fp16": True if computing == "float16" else None,
        **training.way.arguments,
        "gradient_checkpointing": checkpoints,
        "gradient_checkpointing_kwargs": dict(spec) if checkpoints else None,
    }
    yaml = "\n".join(f"{key}: {json.dumps(value)}" for key, value in arguments.items() if value is not None)
    program = "python" if training.ranks == 1 else f"torchrun --nproc-per-node {training.ranks}"
    lines = {
        **(_lines_of_model(training, model) if model else {}),
        "data_collator=DataCollatorWithFlattening()  # from transformers": training.packing and trainer != "sft",
        f"hf_ckpt.install(model)  # or start the script with: {program} -m hf_ckpt train.py": checkpoints,
    }
    python = "\n".join(line for line, applies in lines.items() if applies)
    return {"Training arguments (YAML)": yaml, **({"With the model (Python)": python} if python else {})}


def _lines_of_model(training: Question, model: str) -> dict[str, bool]:
    """Python that makes the model that was planned for: line -> whether it applies. `NAME` is the model's name.

    A model with other types, bits or adapters would need other bytes than the answer says.
    """
    dtype = json.dumps(training.dtype)
    options = f"dtype={dtype}, attn_implementation={json.dumps(training.attention)}"
    four = f'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype={dtype}'
    double = f"bnb_4bit_use_double_quant={training.double_quant}"
    targets = training.lora_targets if isinstance(training.lora_targets, str) else list(training.lora_targets)
    adapters = f"target_modules={json.dumps(targets)}, lora_dropout={training.lora_dropout}"
    lora = f"LoraConfig(r={training.lora}, {adapters})"
    prepared = "model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)"
    bits = training.bits is not None
    config = f"{four}, {double}" if training.load_in_4bit else "load_in_8bit=True"
    has_trainer = training.trainer is not None
    return {
        f"bits = BitsAndBytesConfig({config})": bits,
        f"model = {model}.from_pretrained(NAME, {options}{', quantization_config=bits' if bits else ''})": True,
        f"{prepared}  # from peft; assumed here unless --no-kbit-preparation": training.prepared,
        f"model = get_peft_model(model, {lora})": training.lora is not None and not has_trainer,
        f"peft_config={lora}  # argument of the trainer": training.lora is not None and has_trainer,
    }
