"""What users ask for and do around blocks that are moved: several backwards, threads, hooks, blocks left out."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from helpers.offloading import SAVED, each_kind, moved, mover, ours, said
from helpers.steps import assert_same, enable, gradients, step, without_cache
from torch import nn

import hf_ckpt
from hf_ckpt.engines.host import Mover
from hf_ckpt.engines.offload import OffloadRegion
from hf_ckpt.models.tiny import tiny_batch, tiny_model


def test_two_threads_in_one_graph(lanes):
    """Two backwards through one graph may share hidden states that came back; none are let go too early."""
    blocks = [OffloadRegion(str(number), mover) for mover in [Mover()] for number in range(6)]
    x = torch.randn(4, 8, requires_grad=True)
    out = functools.reduce(lambda hidden, block: block(torch.sin, hidden), blocks, x * 1)
    (expected,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    found = []
    work = [lambda: found.append(torch.autograd.grad(out.sum(), x, retain_graph=True)[0])] * 4
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(expected, each) for each in found)


@each_kind
def test_blocks_that_are_left_out(spec, lanes):
    """As LayerDrop leaves blocks out: copies come back in order, whichever blocks did not run."""

    def run(model):
        layers = list(model.model.layers)
        torch.manual_seed(0)
        for kept in ([0, 2, 4], [1, 2, 3, 4, 5], [0, 5], [5]):
            model.model.layers = nn.ModuleList(layers[place] for place in kept)
            model.config.num_hidden_layers = model.model.config.num_hidden_layers = len(kept)
            model(**without_cache(model, tiny_batch("llama"))).loss.backward()
        return {name: value for name, value in gradients(model).items() if value is not None}

    model, plain = ours(spec=spec, layers=6), tiny_model("llama", layers=6)
    assert_same(run(plain), run(model))
    assert mover(model)._in_use == 0
    assert mover(model).held_bytes > 0


def test_the_users_hooks_get_what_selective_keeps(lanes, caplog):
    packed = []

    def run(model):
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.nbytes) or x.clone(), lambda x: x):
            loss = model(**without_cache(model, tiny_batch("llama"))).loss
        loss.backward()
        return gradients(model)

    model = ours(spec=SAVED)
    assert_same(run(tiny_model("llama")), run(model))
    packed.clear()
    run(model)
    inside = sum(packed)
    packed.clear()
    run(ours(spec={"policy": "selective"}))
    assert inside == sum(packed)
    assert moved(model) == {}
    (message,) = said(caplog)
    assert "hooks around the model" in message


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize(
    "call",
    [
        lambda model, hook: getattr(model, hook)({"policy": "full"}, offload=True),
        lambda model, hook: getattr(model, hook)(offload=True),
        lambda model, hook: getattr(model, hook)({"offload": True, "use_reentrant": False}),
        lambda model, hook: getattr(model, hook)({"policy": "selective"}, 1, "saved"),
    ],
)
def test_the_call_of_transformers(call, lanes):
    for hook in hf_ckpt.compat.ENABLE_NAMES:
        model = tiny_model("llama")
        hf_ckpt.install(model)
        call(model, hook)
        assert_same(step(tiny_model("llama"), tiny_batch("llama")), step(model, tiny_batch("llama")))
        assert len(moved(model)) == 3
        enable(model, {"use_reentrant": False})  # as a Trainer would once more
        step(model, tiny_batch("llama"))
        assert len(moved(model)) == 3
