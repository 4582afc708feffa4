"""Models under `budget` and `auto`, and what their steps really need."""

from __future__ import annotations

import weakref

import torch

import hf_ckpt
from helpers.steps import enable, without_cache
from hf_ckpt import compat
from hf_ckpt.compat.peft import add_lora
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import base_model
from hf_ckpt.models.tiny import tiny_model
from hf_ckpt.planner import live

SIZES = {"batch": 4, "tokens": 128}
_TRACED: dict = {}
_KEPT: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def model_of(family="llama", *, lora=False, dropout=0.0, layers=6):
    """A small model to plan for; T5 of transformers 4 has no attention but its own."""
    has_sdpa = family != "t5" or "activation_checkpointing_enable" in compat.ENABLE_NAMES
    attention = "sdpa" if has_sdpa else "eager"
    model = tiny_model(family, layers=layers, hidden=128, attention=attention, dropout=dropout)
    return add_lora(model, rank=4, init_lora_weights=False) if lora else model


def without_state(model):
    """The model, with an optimizer that keeps no state, so that a plan counts none."""
    _KEPT[model] = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    return model


def budgeted(model, budget, **more):
    """Install on a model and enable `budget`."""
    hf_ckpt.install(model)
    enable(model, {"policy": "budget", "budget": budget, **more})


def live_peak(model, batch):
    """Peak of one step by an exact count, with an optimizer that keeps nothing."""
    model.zero_grad(set_to_none=True)
    with LiveBytes(model, batch) as live:
        model(**without_cache(model, batch)).loss.backward()
    model.zero_grad(set_to_none=True)
    return live.peak_bytes


def saved_config(folder):
    """The folder, with the config of a tiny LLaMA of six blocks, as a model is saved."""
    tiny_model("llama", layers=6).config.to_json_file(folder / "config.json", use_diff=False)
    return folder


def like(model):
    """What the traces of a model depend on, to be compared: its modules, its parameters, and its optimizers."""
    config = base_model(model).config
    parameters = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()]
    optimizers = [(str(each), bool(each.state)) for each in compat.optimizers_of(model)]
    return str(model), config.to_json_string(), config._attn_implementation, parameters, optimizers


def tracing_once(original, told=None):
    """`live._traced`, by which models that are alike are traced once for each shape of a batch.

    All traces under a Trainer are made, because a loss may be its own. `told` gets every shape that was asked for.
    """

    def trace(model, spec, shape, layout, call, actions=None):
        if told is not None:
            told.append(str(shape))
        plain = call is None or (call.trainer, call.loss, call.forward) == (None, None, None)
        if layout is not None or not plain:
            return original(model, spec, shape, layout, call, actions)
        asked = [spec.head, spec.mlp, spec.compile, spec.host_budget, shape, call, actions]
        key = repr((like(model), asked, live.actions_for.__qualname__))
        if key not in _TRACED:
            _TRACED[key] = original(model, spec, shape, layout, call, actions)
        return _TRACED[key]

    return trace
