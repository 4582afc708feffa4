"""The sentences of an answer: whether a training fits, what was assumed, and what else to know."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hf_ckpt.costs.costs import Costs
from hf_ckpt.forecast.batches import without_effect
from hf_ckpt.forecast.devices import Device
from hf_ckpt.forecast.model import ShallowModel, kv_bytes
from hf_ckpt.forecast.question import OF_THE_PLAN, Question, command_of
from hf_ckpt.forecast.ranks import sent_bytes
from hf_ckpt.forecast.result import ForecastRow
from hf_ckpt.planner.planner import Selection
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import GIB, RESERVED, budget_bytes, format_bytes

EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
"""What makes torch's allocator reserve only a few percent more than tensors need."""
ON_COMPILED = (
    'compiled blocks are not predicted: {{"compile": "blocks", "share": 0}} needs at most about the {peak} of `full`, '
    "and was faster than every eager plan on an H200 (docs/comparison.md)"
)
NEEDS_PLAN = (
    "a budget measures its first steps without host memory, and they do not fit: save the plan with `--out {plan}`, or "
    "`forecast.plan.save`, and train with it"
)


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


def on_allocator(device: Device, row: ForecastRow) -> Iterator[str]:
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


def parts_of(selection: Selection, training: Question) -> dict[str, int]:
    """Return what fills the peak of a plan: name -> bytes."""
    (_, resident), *moving = selection.timeline.worst.parts().items()
    static = selection.costs.static
    buffers = "shards of gradients" if training.way.deepspeed else "copies of gradients in DDP's buckets"
    parts = {
        "weights": static.parameters,
        "optimizer state": static.optimizer,
        "the optimizer's copy of the weights in float32": static.master,
        buffers: static.buckets,
        "weights gathered from other ranks": static.gathered,
    }
    parts["buffers and batch"] = resident - sum(parts.values())
    return {**parts, **dict(moving)}


def on_compiled_blocks(training: Question, device: Device, plan: Plan, full: Plan) -> Iterator[str]:
    """A note on compiled blocks, for which no figures are predicted, if the plan recomputes something."""
    if plan.active() and full.prediction and device.name != "cpu" and not training.sharded:
        yield ON_COMPILED.format(peak=format_bytes(full.prediction.peak_bytes))


def beside(training: Question, model: ShallowModel, costs: Costs, budget_bytes: int) -> Iterator[str]:
    """Notes on options without effect, and on what the figures leave out, such as the cache of generation."""
    yield from training.without_effect()
    yield from without_effect(training, model.base)
    if training.generation:
        size = len(costs.calls) * kv_bytes(model.base.config, training)
        alone = costs.static.always + size
        fits = "fits" if alone <= budget_bytes else "does not fit"
        yield (
            f"while completions are generated, a KV cache of {training.generation} tokens takes at most "
            f"{format_bytes(size)}; with weights and optimizer, {format_bytes(alone)}, which {fits}"
        )
    if training.load_in_8bit:
        yield "8-bit layers hold their inputs until the backward ends, under any plan; 4-bit layers do not"
    if training.ranks > 1:
        size = sent_bytes(model, training)
        yield f"each rank sends about {format_bytes(size)} a step to others; the time for that is not predicted"
        if training.way.left_out:
            yield f"the figures leave out {training.way.left_out}"
