"""How ranks share a training: the values of `--parallel`, one row each. Does not import torch.

The rows of DeepSpeed say what its own estimators count (`deepspeed/runtime/zero/stage_1_and_2.py` and `stage3.py`): in
bytes a parameter under N ranks and Adam in 16 bits, 2 + 18/N for ZeRO-2, and 18/N with 4 for the largest layer for
ZeRO-3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hf_ckpt.errors import HfCkptError


@dataclasses.dataclass(frozen=True)
class Way:
    """What ranks share, and who does it."""

    title: str
    """Its name in texts."""
    weights: bool = False
    """Whether each rank holds a shard of the weights only."""
    gradients: bool = False
    """Whether it keeps a shard of the gradients only."""
    states: bool = False
    """Whether it holds a shard of the optimizer's state only."""
    deepspeed: bool = False
    """Whether DeepSpeed does it: weights are in the type that is computed in, without autocast, and the optimizer has a
    float32 copy of those that are trained."""
    flat: bool = False
    """Whether the optimizer has flat shards of several parameters, without their dimensions."""
    rebuilds: bool = True
    """Whether what `selective` rebuilds there is what it rebuilds on one rank."""
    more: str = ""
    """The way of the same program that shares more, which is advised where this one does not fit."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The keys of `TrainingArguments` that choose it."""
    left_out: str = ""
    """What it needs beside the figures, for a note."""


def _fsdp(title: str, version: int, **what: Any) -> Way:
    arguments = {"fsdp": True, "fsdp_config": {"version": version}}  # each block by itself, by default
    return Way(title, weights=True, gradients=True, states=True, arguments=arguments, **what)


def _zero(stage: int, **what: Any) -> Way:
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    config |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    arguments = {"deepspeed": config | dict.fromkeys(auto, "auto")}
    return Way(f"ZeRO-{stage}", states=True, deepspeed=True, flat=True, arguments=arguments, **what)


# DeepSpeed's defaults (runtime/zero/config.py) are buckets of 5e8 elements, two under ZeRO-3, whose communication
# overlaps with the backward; and weights of 1e9 elements that stay gathered, as they are needed again soon.
_BUCKETS = "DeepSpeed's buckets of gradients (reduce_bucket_size, by default 0.9 GiB in 16 bits)"
_PREFETCH = "weights that are prefetched or stay gathered (stage3_max_live_parameters, by default up to 1.9 GiB)"

WAYS = {
    "ddp": Way("DDP", more="fsdp2"),
    "fsdp2": _fsdp("FSDP2", 2),
    "fsdp1": _fsdp("FSDP1", 1, flat=True, left_out="weights that are prefetched, if backward_prefetch is set"),
    "zero1": _zero(1, more="zero3", left_out=_BUCKETS),
    "zero2": _zero(2, more="zero3", gradients=True, left_out=_BUCKETS),
    "zero3": _zero(3, weights=True, gradients=True, rebuilds=False, left_out=f"two of {_BUCKETS}, and {_PREFETCH}"),
}
"""Value of `parallel` -> what it means."""


def way_named(text: str) -> str:
    """The name of a way as people spell it: `fsdp` is FSDP1, as for PyTorch and accelerate; `ZeRO-2` is `zero2`.

    Raises `HfCkptError` for an unknown one.
    """
    name = str(text).lower().replace("-", "").replace("_", "")
    name = "fsdp1" if name == "fsdp" else name
    if name not in WAYS:
        raise HfCkptError(f"must be one of {', '.join(WAYS)}, but is {text!r} instead")
    return name
