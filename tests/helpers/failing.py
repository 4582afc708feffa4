"""Allocators that fail on purpose, and steps and Trainers that run out of memory."""

from __future__ import annotations

import functools
import random

import numpy
import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer

import hf_ckpt
from helpers.steps import gradients, without_cache
from helpers.trainers import FLAG, arguments
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch, tiny_model

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."
SELECTIVE = "selective (save linear, attention)"
FULL = "full"
OFFLOAD = "offload"
HEAD = "the head in chunks"


class Failing(TorchDispatchMode):
    """Counts operations, and runs out of memory at some of them."""

    def __init__(self, *at):
        super().__init__()
        self.at, self.operations = set(at), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        if self.operations - 1 in self.at:
            run_out()
        return func(*args, **(kwargs or {}))


class Limited(LiveBytes):
    """Runs out of memory when live bytes exceed the limit."""

    def __init__(self, limit, *holders):
        super().__init__(*holders)
        self.limit = limit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.current_bytes > self.limit:
            run_out()
        return result


def forward_and_backward(model, batch, share=0.5):
    """A micro-step that draws from every source of random numbers."""
    scale = 1 + 0.01 * (random.random() + float(numpy.random.rand()) + float(torch.rand(())))
    loss = model(**without_cache(model, batch)).loss * scale * share
    loss.backward()
    return loss.detach()


def bytes_of(model):
    """Bytes that a model holds before its first step."""
    return LiveBytes(model).start_bytes


def seed(number=3):
    """Seed every source of random numbers."""
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def draws():
    """One draw from every source of random numbers."""
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def one_step(model, family, run=None, at=(), **sizes):
    """Gradients of two micro-steps, random draws after them, and the number of operations."""
    run = run or (lambda step, *args: step(*args))
    model.zero_grad(set_to_none=True)
    seed()
    allocator = Failing(*at)

    def step(*args):
        with allocator:  # not around the guard
            return forward_and_backward(*args)

    losses = [run(step, model, tiny_batch(family, seed=number, **sizes)) for number in range(2)]
    return {"loss": torch.stack(losses), **gradients(model)}, draws(), allocator.operations


@functools.cache
def plain(family):
    """Gradients of `one_step` without hf_ckpt, and random draws after it."""
    return one_step(tiny_model(family, layers=2, dropout=0.1), family)[:2]


ROWS = 24


class FailsAt:
    """A `compute_loss` that runs out of memory in some calls: after the forward, or in the backward."""

    calls = 0
    at: frozenset[int] = frozenset()

    def compute_loss(self, model, inputs, *args, **kwargs):
        type(self).calls += 1
        number = type(self).calls - 1
        labels = inputs.pop("labels")  # as Trainer itself does for label smoothing
        loss = super().compute_loss(model, {**inputs, "labels": labels}, *args, **kwargs)
        if number in self.at and number % 2 == 0:
            run_out()
        elif number in self.at:  # in the backward, after some gradients
            left, watched = [0], loss if number % 4 == 1 else model.get_input_embeddings().weight
            watched.register_hook(lambda gradient: run_out() if left and left.pop() == 0 else None)
        return loss


def run_out(*_):
    """Raise an out-of-memory error."""
    raise torch.OutOfMemoryError(MESSAGE)


def train(folder, bases, at=(), spec=None, **options):
    """Train a Trainer of these classes for 6 steps, out of memory in some calls; returns it, its history and
    weights."""
    kind = type("Tested", (*bases, FailsAt, Trainer), {"at": frozenset(at), "calls": 0})
    rows = [{name: value[0] for name, value in tiny_batch("llama", batch=1, seed=n).items()} for n in range(ROWS)]
    model = tiny_model("llama", dropout=0.1)
    model.config.use_cache = False
    if spec:
        hf_ckpt.install(model, spec)
    asked = {FLAG: spec is not None, f"{FLAG}_kwargs": None}
    args = arguments(folder, max_steps=6, gradient_accumulation_steps=2, **asked, **options)
    figures = hf_ckpt.MemoryTimeCallback()
    trainer = kind(model=model, args=args, train_dataset=Dataset.from_list(rows), callbacks=[figures])
    trainer.train()
    keys = ("loss", "grad_norm", "learning_rate", "epoch", "step")
    history = [{key: row[key] for key in keys if key in row} for row in trainer.state.log_history]
    return trainer, history, {name: value.clone() for name, value in model.state_dict().items()}
