"""Ways of going backward through rebuilt blocks: several times, in parts, in threads, with other parameters."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers.steps import assert_same, gradients, outcome, without_cache
from helpers.toys import SCALE, WEIGHT, Norm, each_family, each_save, plain_and_ours, rebuilt, same_steps
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch


@each_save
@each_family
def test_a_graph_that_is_kept_gives_the_same_twice_and_grows_no_more(family, save):
    def run(model):
        model.zero_grad()
        loss = model(**without_cache(model, tiny_batch(family))).loss
        with LiveBytes() as live:
            for _ in range(2):
                loss.backward(retain_graph=True)
                used = live.current_bytes
            loss.backward(retain_graph=True)
            assert live.current_bytes == used
        return outcome(model, loss)

    same_steps(run, family, save)


@each_save
def test_parts_of_a_graph_one_after_another(save):
    """Gradients are asked of one parameter at a time, in both orders."""

    def run(model):
        loss = model(**without_cache(model, tiny_batch("llama"))).loss
        named = dict(model.named_parameters())
        found = {"loss": loss.detach()}
        for turn, names in enumerate((list(named), list(named)[::-1])):
            for name in names:
                found[f"{name} {turn}"] = torch.autograd.grad(loss, named[name], retain_graph=True)[0]
        return found

    same_steps(run, save=save, layers=1)


@each_save
def test_two_threads_inside_one_block_at_once(save):
    """nn.DataParallel runs replicas in threads that share their region; both are inside the block at the same time."""
    norm = Norm()
    region, barrier = RebuildRegion("toy", save=tuple(save)), threading.Barrier(2)

    def block(x, wait=False):
        hidden = norm(functional.silu(x) * x)
        if wait:
            barrier.wait(timeout=10)
        hidden = functional.silu(hidden @ WEIGHT) * hidden
        if wait:
            barrier.wait(timeout=10)
        return norm(hidden) * SCALE

    found = {}

    def run(seed):
        torch.manual_seed(seed)
        x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        region(lambda x: block(x, wait=True), x * 1).square().sum().backward()
        found[seed] = x.grad

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (0, 1):
        x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        block(x * 1).square().sum().backward()
        assert torch.equal(found[seed], x.grad)
    assert region.forwards == 2
    assert region.recomputed > 0


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.compat
@each_save
@pytest.mark.parametrize("leaf", [False, True], ids=["computed", "leaf"])
def test_nothing_from_before_the_block_runs_again(save, leaf):
    """Embeddings that the user computed stay as they are, and so do those that are leaves (soft prompts)."""
    found, sines = [], []
    for model in plain_and_ours(save=save):
        torch.manual_seed(0)
        inputs = torch.randn(2, 8, 32).requires_grad_()
        # mish is nothing that the model itself uses, and has a row.
        embeds = inputs if leaf else functional.mish(functional.mish(inputs))
        loss = model(inputs_embeds=embeds, labels=torch.ones(2, 8, dtype=torch.long), use_cache=False).loss
        with _Operations() as operations:
            loss.backward()
        sines.append(operations.ran.count("aten.mish.default"))
        found.append({"loss": loss.detach(), "inputs": inputs.grad, **gradients(model)})
    assert_same(*found)
    assert sines == [0, 0]
    assert rebuilt(model) > 0
