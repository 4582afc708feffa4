"""Trace models and run them, to compare predicted with real bytes."""

from __future__ import annotations

import contextlib

import torch
import transformers

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.attach import trial
from hf_ckpt.compat.peft import add_lora
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import tiny_model
from hf_ckpt.spec.actions import KEEP
from hf_ckpt.spec.plan import Plan

CPU = DEVICES["cpu"]
TUNINGS = ("everything", "lora")
PEAK = {"layers": 6, "hidden": 64}
"""Shape of models whose peak with `PEAK_BATCH` is mostly activations; many CPUs are slow in 16 bits."""
PEAK_BATCH = {"batch": 4, "tokens": 128}


# --- models and plans -------------------------------------------------------------------------------------------------


def model_of(family, tuning="everything", *, attention="sdpa", **options):
    """A tiny model to train; T5 of transformers 4 has only eager attention."""
    if attention == "sdpa" and family == "t5" and not transformers.T5ForConditionalGeneration._supports_sdpa:
        attention = "eager"
    model = tiny_model(family, attention=attention, **options)
    return add_lora(model, rank=4).train() if tuning == "lora" else model


def plan_of(model, actions):
    """The plan that gives the model's blocks these actions, in order."""
    found = find_blocks(model)
    return Plan(found.family, found.model, tuple(zip(found.blocks, actions, strict=True)))


# --- steps ------------------------------------------------------------------------------------------------------------


def inputs_of(model, batch):
    """The batch, without a cache if the model would build one."""
    return {**batch, "use_cache": False} if compat.wants_use_cache(base_model(model)) else dict(batch)


def loss_of(model, inputs):
    """The loss of a step; returning from this function frees the outputs before the backward, as in a Trainer."""
    return model(**inputs).loss


def micro_steps(model, batch, autocast=None):
    """Peaks of the first and the second micro-step."""
    peaks = []
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(2):
        inputs = inputs_of(model, batch)
        with LiveBytes(model, inputs) as counter:
            with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
                loss = loss_of(model, inputs)
            loss.backward()
        del loss
        peaks.append(counter.peak_bytes)
    for parameter in model.parameters():
        parameter.grad = None
    return peaks


def real_peaks(model, actions, batch, autocast=None):
    """Peaks of the model by `LiveBytes`; checks that every block with an action was recomputed."""
    with trial(model, plan_of(model, actions)):
        peaks = micro_steps(model, batch, autocast=autocast)
        told = hf_ckpt.describe(model)
    wanted = {block.name for block, action in told.plan.actions if action != KEEP}
    assert {name for name, times in told.recomputed.items() if times} == wanted
    return peaks
