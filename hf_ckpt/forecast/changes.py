"""Changes of a training that may make it fit, or make it faster. Pure functions, without torch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from typing import Any

from hf_ckpt.costs.costs import Costs
from hf_ckpt.forecast.devices import Device
from hf_ckpt.forecast.question import Question
from hf_ckpt.forecast.sizes import divisors
from hf_ckpt.units import GIB

Change = Mapping[str, Any]
"""Field of a question -> its value."""
SHORTER = "shorter sequences"
"""The name of the changes to fewer tokens."""

MOST_TOKENS = 2**22
"""Tokens of a micro-step above which no change is tried that runs it in parts."""


def is_quick(training: Question) -> bool:
    """Whether a change to this training is measured within seconds.

    Most steps take as long for any number of tokens. Those that run the head in chunks, or feed-forwards in tiles, run
    each of them. So do the trainers of TRL, whose loss runs in parts.
    """
    in_parts = training.head != "whole" or training.mlp != "whole" or training.trainer is not None
    return not in_parts or training.rows * training.tokens <= MOST_TOKENS


def single_changes(training: Question, costs: Costs, budget: int, device: Device) -> list[tuple[str, Change]]:
    """Return (name, change) for what can be changed. Of one name, the first changes least.

    Args:
        training: on the device.
        costs: of it.
        budget: bytes that plans may need.
        device: where it runs.
    """
    room = costs.static.always < budget  # otherwise, less activations cannot help
    host = room and training.host_budget is None and device.host_bandwidth > 0
    parts = divisors(training.batch)[1:]
    smaller = [{"batch": training.batch // by, "accumulation": training.accumulation * by} for by in parts]
    shorter = room and training.target_tokens is None  # which of the two lengths to halve, only the user knows
    bits = not training.load_in_4bit and not training.sharded
    in_4_bits = {"load_in_4bit": True} | ({"load_in_8bit": False} if training.load_in_8bit else {})
    rows: list[tuple[bool, str, Change]] = [
        (costs.chunks_help, "plan with the head in chunks", {"head": "auto"}),
        (room and training.mlp == "whole", "plan with feed-forwards in tiles", {"mlp": "auto"}),
        (host, "plan with host memory", {"host_budget": 64 * GIB}),
        (room and training.segments is None and not training.sharded, "plan in segments", {"segments": "sqrt"}),
        *((room, "smaller batch", change) for change in smaller),
        (training.ranks > 1 and training.way.more != "", "more shared by ranks", {"parallel": training.way.more}),
        (training.ranks == 1 and bits, "8 ranks under FSDP2", {"ranks": 8, "parallel": "fsdp2"}),
        *((shorter, SHORTER, {"tokens": training.tokens // by}) for by in (2, 4, 8)),
        (training.prepared, "without PEFT's preparation", {"kbit_preparation": False}),
        # Under LoRA, gradients and state are a few MiB: an optimizer or another rank would not change what fits.
        (training.lora is None, "8-bit optimizer", {"optimizer": "adamw_8bit"}),
        (training.lora is None, "LoRA", {"lora": 16}),
        (bits, "LoRA, base in 4 bits", {"lora": training.lora or 16, **in_4_bits}),
    ]
    return [(name, change) for applies, name, change in rows if applies]


def combined_changes(training: Question) -> tuple[list[Change], list[Change], Change]:
    """Return several changes at a time: each has one more than the one before.

    The first list has those with sequences of the same length, the second those with shorter ones. The last change is
    to ranks that share the model, too.
    """
    first: Change = {"mlp": "auto", "head": "auto"}
    if training.sharded:  # the head in chunks needs whole weights
        first = {**first, "parallel": "ddp"}
    steps: list[Change] = [
        {"lora": training.lora or 16},
        {"load_in_4bit": True, "load_in_8bit": False},
        {"batch": 1, "accumulation": training.accumulation * training.batch},
    ]
    if not training.sharded:
        steps.append({"segments": "sqrt"})
    same_length = [*itertools.accumulate(steps, operator.or_, initial=first)]
    lengths = () if training.target_tokens is not None else (2, 4, 8, 16)
    shorter: list[Change] = [{**same_length[-1], "tokens": max(1, training.tokens // by)} for by in lengths]
    shared = {"ranks": 8, "parallel": "fsdp2", "head": "whole", "segments": None}
    shared |= {"load_in_4bit": False, "load_in_8bit": False}
    return same_length, shorter, {**[*same_length, *shorter][-1], **shared}
