"""Forwards, backwards and accidents in random order while blocks are moved, and that nothing of them stays."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import random

import pytest
import torch
from helpers.lanes import DeviceBytes
from helpers.offloading import each_kind, mover, ours
from helpers.steps import step

from hf_ckpt.engines.host import Group
from hf_ckpt.models.tiny import tiny_batch, tiny_model


class Stress:
    """Forwards, backwards and accidents in random order; gradients must always be those of the reference."""

    SHAPES = ((1, 5), (2, 16), (3, 9))
    PENDING = 4

    def __init__(self, model, reference, lanes, seed):
        self.model, self.random, self.lanes = model, random.Random(seed), lanes
        self.pending = []
        self.expected = {}
        self.backwards = 0
        self.reference = {
            key: {name: value for name, value in self._step(reference, key).items() if name != "loss"}
            for key in itertools.product(range(len(self.SHAPES)), range(2))
        }

    def _batch(self, key):
        (batch, tokens), seed = self.SHAPES[key[0]], key[1]
        return {**tiny_batch("llama", batch=batch, tokens=tokens, seed=seed), "use_cache": False}

    def _step(self, model, key):
        return step(model, self._batch(key), seed=sum(key))

    def forward(self, key=None):
        if len(self.pending) < self.PENDING:
            key = key or self.random.choice(list(self.reference))
            torch.manual_seed(sum(key))
            self.pending.append((self.model(**self._batch(key)).loss, key))

    def take(self):
        return self.pending.pop(self.random.randrange(len(self.pending)))

    def backward(self):
        if self.pending:
            loss, key = self.take()
            loss.backward()
            self._count(self.reference[key])

    def backward_of_two(self):
        if len(self.pending) > 1:
            (one, first), (other, second) = self.take(), self.take()
            (one + other).backward()
            self._count({name: value + self.reference[second][name] for name, value in self.reference[first].items()})

    def backward_twice(self):
        if self.pending:
            loss, key = self.take()
            loss.backward(retain_graph=True)
            self._count(self.reference[key])
            if self.random.random() < 0.5:
                loss.backward()
                self._count(self.reference[key])

    def part_of_a_backward(self):
        if self.pending:
            loss, _ = self.random.choice(self.pending)
            torch.autograd.grad(loss, self.model.model.layers[1].mlp.up_proj.weight, retain_graph=True)

    def drop(self):
        if self.pending:
            self.take()

    def _count(self, made):
        self.backwards += 1
        for name, value in made.items():
            self.expected[name] = value if name not in self.expected else self.expected[name] + value

    def raises(self):
        if len(self.pending) < self.PENDING:
            place = self.random.choice(["self_attn", "mlp"])
            module = getattr(self.random.choice(self.model.model.layers), place)
            handle = module.register_forward_pre_hook(lambda *_: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                self.model(**self._batch((1, 0)))
            handle.remove()

    def without_gradients(self):
        self.model.train(self.random.random() < 0.5)
        with torch.no_grad():
            assert math.isfinite(self.model(**self._batch((0, 0))).loss)
        self.model.train()

    def zero(self):
        self.model.zero_grad(set_to_none=True)
        self.expected.clear()

    def drain(self):
        self.lanes[0].drain(self.random.randrange(6))

    def any(self):
        actions = (self.forward, self.backward, self.drain, self.drop, self.backward_of_two, self.backward_twice)
        rare = (self.part_of_a_backward, self.raises, self.without_gradients, self.zero)
        self.random.choices((*actions, *rare), weights=(9, 5, 4, 1, 2, 1, 1, 1, 1, 1))[0]()
        for name, parameter in self.model.named_parameters():
            expected = self.expected.get(name)
            assert (expected is None) == (parameter.grad is None)
            assert expected is None or torch.equal(expected, parameter.grad), name


def groups():
    """How many groups of moved tensors are alive."""
    gc.collect()
    return sum(type(thing) is Group for thing in gc.get_objects())


@pytest.mark.slow
@each_kind
def test_two_hundred_steps_in_any_order(spec, lanes, caplog, recwarn):
    before = groups()
    options = {"layers": 3, "dropout": 0.1}
    stress = Stress(ours(spec=spec, **options), tiny_model("llama", **options), lanes, seed=3)
    step(stress.model, stress._batch((1, 0)))
    stress.zero()
    gc.collect()
    gc.disable()
    try:
        with DeviceBytes(stress.model) as live:
            for shape in range(len(Stress.SHAPES)):  # as much of everything as there will ever be
                for _ in range(Stress.PENDING):
                    stress.forward((shape, 0))
                while stress.pending:
                    stress.drop()
            held = mover(stress.model).held_bytes
            for _ in range(200):
                stress.any()
                assert mover(stress.model).held_bytes == held
            stress.pending.clear()
            stress.zero()
            assert abs(live.current_bytes - live.start_bytes) <= 2048  # what transformers caches
    finally:
        gc.enable()
    assert mover(stress.model)._in_use == 0
    assert groups() == before
    assert stress.backwards > 30
    assert len(lanes) == 1
    assert not recwarn.list
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
