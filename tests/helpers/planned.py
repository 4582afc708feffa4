"""Models under `budget` and `auto`, and the memory that their steps need."""

from __future__ import annotations

import weakref

import torch
from peft import LoraConfig, get_peft_model

import hf_ckpt
from helpers.steps import enable, without_cache
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_model

_KEPT: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def model_of(family="llama", *, lora=False, dropout=0.0, layers=6):
    """A small model to plan for; T5 of transformers 4 has only eager attention."""
    has_sdpa = family != "t5" or "activation_checkpointing_enable" in compat.transformers.ENABLE_NAMES
    attention = "sdpa" if has_sdpa else "eager"
    model = tiny_model(family, layers=layers, hidden=128, attention=attention, dropout=dropout)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config) if lora else model


def without_state(model):
    """The model, with an optimizer that keeps no state, so that plans count none."""
    _KEPT[model] = known(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0))
    return model


def known(optimizer):
    """Register the optimizer with hf_ckpt, as its first step would."""
    compat.optimizers.remember(optimizer)
    return optimizer


def budgeted(model, budget, **more):
    """Install hf_ckpt on a model and enable `budget`."""
    hf_ckpt.install(model)
    enable(model, {"policy": "budget", "budget": budget, **more})


def live_peak(model, batch):
    """Exact peak of one step, with an optimizer that keeps no state."""
    model.zero_grad(set_to_none=True)
    with LiveBytes(model, batch) as live:
        model(**without_cache(model, batch)).loss.backward()
    model.zero_grad(set_to_none=True)
    return live.peak_bytes


def raced(model):
    """The kinds of actions of each plan that could have won the race for the last batch."""
    entrants = installation(model).session.planning.entered.entrants
    return [{action.kind for _, action in entrant.plan.actions} for entrant in entrants]
