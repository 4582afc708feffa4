"""Measures one way to run a step, on one model with an optimizer in its own process: gradients, bytes and times."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import DEVICE, Allocations, seconds_of
from torch import nn
from ways import Way, base_of, ours

import hf_ckpt
from hf_ckpt.errors import HfCkptError

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "models"
Gradients = Mapping[str, torch.Tensor]
LEARNING_RATE = 1e-5
"""So small that random weights stay finite."""
MEASURED_STEPS = 40
"""Most steps of a run before its plan is taken. It needs seven to eighteen."""


def config_for(settings: Namespace, name: str) -> Any:
    """The config of a preset, or of anything that transformers can load, with as many blocks as the settings say."""
    preset = CONFIGS / f"{name}.json"
    config = transformers.AutoConfig.from_pretrained(preset if preset.is_file() else name)
    config.use_cache = False
    for key in ("num_hidden_layers", "num_decoder_layers"):
        if settings.blocks is not None and hasattr(config, key):
            setattr(config, key, settings.blocks)
    return config


def model_for(settings: Namespace, name: str) -> nn.Module:
    """The model of a config with random weights, with adapters if the settings say so, in train mode on `DEVICE`."""
    config = config_for(settings, name)
    with torch.device(DEVICE):
        model = getattr(transformers, config.architectures[0])._from_config(
            config, dtype=getattr(torch, settings.dtype)
        )
        if getattr(settings, "four_bits", False):
            quantise(model)
        if settings.lora is not None:
            from peft import LoraConfig, get_peft_model

            # Random adapters: with PEFT's zeros, half of the gradients are 0.
            adapters = LoraConfig(r=settings.lora, target_modules="all-linear", init_lora_weights=False)
            model = get_peft_model(model, adapters)
    trained: nn.Module = model.to(DEVICE).train()
    return trained


def quantise(model: Any) -> None:
    """Store the linear layers of a model but its head in 4 bits, as QLoRA loads them. It needs bitsandbytes."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not model.get_output_embeddings():
            four_bits = Linear4bit(layer.in_features, layer.out_features, False, layer.weight.dtype, quant_type="nf4")
            four_bits.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            model.set_submodule(name, four_bits.to(DEVICE))
    model.is_loaded_in_4bit = True  # PEFT reads it


def batch_for(settings: Namespace, model: nn.Module) -> dict[str, torch.Tensor]:
    """Random inputs of one step, as keyword arguments of the model's forward. Nothing is masked."""
    base, shape = base_of(model), (settings.batch, settings.tokens)
    classes = base.config.num_labels if type(base).__name__.endswith("ForSequenceClassification") else None
    ids = torch.randint(base.config.vocab_size, shape)
    labels = torch.randint(classes or base.config.vocab_size, shape[:1] if classes else shape)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return {name: value.to(DEVICE) for name, value in inputs.items()}


class Session:
    """Holds the model with the way turned on.

    Raises `HfCkptError` if this machine or this model cannot have the way.
    """

    def __init__(self, settings: Namespace, name: str, way: Way) -> None:
        if "offload" in way.name and DEVICE == "cpu":
            raise HfCkptError("needs an accelerator: a CPU has no host memory beside its own")
        if "compile" in way.group:  # empty caches, but with what torch compiles once per machine
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="hf_ckpt_")
            torch.compile(lambda x: (x.sin() + 1).sum(-1))(torch.ones(8, 64))
        torch.manual_seed(0)
        self.model = model_for(settings, name)
        self.inputs = batch_for(settings, self.model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
        self.way = way.turn_on(self.model)
        self.call, self.recomputed = self.way.__enter__()

    def backward(self) -> None:
        """Compute the gradients."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        self.call(**self.inputs).loss.backward()

    def step(self) -> None:
        """Run one optimizer step."""
        self.backward()
        self.optimizer.step()

    @contextlib.contextmanager
    def under(self, way: Way) -> Iterator[None]:
        """Run steps in another way. The session has been made for `none`."""
        before = self.call, self.recomputed
        try:
            with way.turn_on(self.model) as (self.call, self.recomputed):
                yield
        finally:
            self.call, self.recomputed = before

    def gradients(self) -> Gradients:
        """The gradients, by the name of their parameter."""
        return {name: value.grad for name, value in self.model.named_parameters() if value.grad is not None}

    def timed(self, steps: int = 1) -> float:
        """Seconds of a step: the mean of some, one right after the other."""
        return seconds_of(lambda: [self.step() for _ in range(steps)]) / steps

    def measure(self, path: Path, is_reference: bool) -> dict[str, Any]:
        """Measure the gradients and the bytes of a step, and count what it recomputes.

        The gradients of the first step are compared with those in `path`, or written there. `first_seconds` is the time
        of the first forward and backward, which compile graphs. `repeatable` says whether the reference gives the same
        bits twice: if not, no way can be bit-equal.
        """
        row: dict[str, Any] = {"first_seconds": seconds_of(self.backward)}
        if is_reference:
            torch.save(self.gradients(), path)
            self.backward()
        first, apart = difference(self.gradients(), torch.load(path, mmap=True))
        row |= {"repeatable": first is None} if is_reference else {"first_difference": first, "difference": apart}
        for _ in range(2):
            self.step()
        return row | self.bytes()

    def bytes(self) -> dict[str, int | None]:
        """Peak of one step, what its forward leaves for backward, and how often blocks were recomputed."""
        self.model.zero_grad(set_to_none=True)
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        before = self.recomputed()
        with Allocations(*self.model.parameters(), *self.model.buffers(), *self.inputs.values(), *state) as step:
            self.step()
        after = self.recomputed()
        with Allocations() as forward:
            loss = self.call(**self.inputs).loss
        loss.backward()
        recomputed = None if before is None or after is None else after - before
        peaks = {"allocated_bytes": step.peak_bytes, "reserved_bytes": step.reserved_bytes}
        return {**peaks, "saved_bytes": forward.left_bytes, "recomputed": recomputed}

    def plan_for(self, spec: dict[str, Any], path: Path) -> dict[str, Any]:
        """Save the plan that a run with this spec uses once it has measured enough steps. Returns what it predicts."""
        with ours(self.model, spec):
            for _ in range(MEASURED_STEPS):
                self.step()
                described = hf_ckpt.describe(self.model)
                if described.measured_bytes is not None:
                    break
        if described.measuring is not None:
            raise HfCkptError(f"has no plan after {MEASURED_STEPS} steps: {described.measuring}")
        plan = described.plan
        plan.save(path)
        return {"plan": str(plan), "predicted_peak_bytes": plan.prediction.peak_bytes if plan.prediction else None}


def difference(
    gradients: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> tuple[str | None, float]:
    """The first gradient that is not equal (None if all are), and the relative norm of the difference.

    Raises `HfCkptError` if other parameters have gradients, or none has.
    """
    if not gradients or gradients.keys() != reference.keys():
        raise HfCkptError(f"gives {len(gradients)} gradients against {len(reference)}")
    others = {name: value.to(gradients[name].device).double() for name, value in reference.items()}
    apart = {name: float((value.double() - others[name]).norm()) for name, value in gradients.items()}
    size = math.hypot(*(float(value.norm()) for value in others.values()))
    return next((name for name, distance in apart.items() if distance), None), math.hypot(*apart.values()) / size
