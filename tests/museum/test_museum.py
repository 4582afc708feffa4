"""The museum: small copies of public faults that silently made gradients wrong, and whether the watch finds them.

Each row of `exhibits.yaml` is a fault: the cause that the watch must name, the setup, the faulty blocks, and public
reports. `docs/watch.md` lists them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from helpers.adapters import two_adapters
from helpers.custom import custom_loss, custom_model, work
from helpers.experts import experts
from helpers.steps import enable, gradients
from helpers.tables import table
from helpers.watching import WatchOfOthers
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model


def of_transformers(**faulty_options):
    """Enable transformers' own checkpointing, with these options if `faulty`, otherwise with correct ones."""
    right = {"use_reentrant": False, "preserve_rng_state": True}
    return lambda model, faulty: enable(model, right | faulty_options if faulty else right)


THEIRS, REDRAWN = of_transformers(), of_transformers(preserve_rng_state=False)


@dataclasses.dataclass
class Exhibit:
    """A fault. Functions with a parameter `faulty` also set up the same case without it."""

    cause: str
    """Part of the message of the watch."""
    model: Callable[[bool], nn.Module] = lambda faulty: custom_model()
    loss: Callable[[Any, int], torch.Tensor] = custom_loss
    """Runs the forward of the step with this number."""
    _: dataclasses.KW_ONLY
    checkpoint: Callable[[Any, bool], None] = THEIRS
    """Enables checkpointing on a model."""
    between: Callable[[Any], Any] = lambda model: iter(())
    """A generator that changes the model between a forward and its backward."""
    around: Callable[[bool | None], Any] = lambda faulty: contextlib.nullcontext()
    """A context in which the forward runs; called with None for the run without checkpointing."""
    blocks: Sequence[int] = (1,)
    wrong: str = "gradients"
    """What is wrong: `gradients`, or `gradients and buffers`."""
    reports: str = ""
    """Public reports, each as repository and number."""


def with_function(faulty_function, right_function=None):
    """Checkpoint all blocks with a function, as transformers itself does with torch's."""
    return lambda model, faulty: model._set_gradient_checkpointing(True, faulty_function if faulty else right_function)


def in_one_block(fault, right=work, at=1):
    """A model in which one block does something else if `faulty`."""
    return lambda faulty: custom_model(fault if faulty else right, at)


# --- checkpointing functions with faults ----------------------------------------------------------------------------


def own_checkpoint(again=lambda function: function, scale=None):
    """A checkpointing function; `again` turns a block's forward into the function that backward runs.

    It multiplies the gradients of parameters by `scale`.
    """

    def function(run, *args):
        runs = itertools.chain([run], itertools.repeat(again(run)))
        if scale is not None:
            for parameter in run.args[0].parameters():
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: gradient * scale)
        return checkpoint(lambda *args: next(runs)(*args), *args, use_reentrant=False)

    return function


def without_shift(function):
    """A block's forward without a keyword argument, which the engine failed to store."""
    return functools.partial(function.func, *function.args)


def rounding(dtype):
    """A checkpointing function that recomputes nothing and stores activations in another dtype."""

    def store(tensor):
        return tensor.to(dtype, copy=True) if tensor.grad_fn is not None and tensor.shape == (2, 8, 16) else tensor

    def function(run, *args):
        with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor.float()):
            return run(*args)

    return function


# --- faults inside blocks -----------------------------------------------------------------------------------------


def drops(block, hidden, shift):
    return functional.dropout(work(block, hidden, shift), 0.3, block.training)


def draws(number):
    """Multiply the input by a number that is drawn by this function."""
    return lambda block, hidden, shift: work(block, hidden * (1 + number()), shift)


draws_from_torch = draws(lambda: torch.rand(()))


def draws_from_a_generator_of_its_own(faulty):
    generator = torch.Generator().manual_seed(0) if faulty else None
    return custom_model(draws(lambda: torch.rand(16, generator=generator)), 1)


def breaks_ties_by_rounding(faulty):
    """Scores of two experts differ only by rounding, and the rounding changes in every other run."""
    rounding = itertools.cycle((1e-7, -1e-7) if faulty else (1e-7,))

    def sends_to_experts(block, hidden, shift):
        chosen = hidden.new_tensor([0.0, next(rounding)]).expand(2, 8, 2).topk(1, -1).indices
        return torch.where(chosen == 0, functional.silu(block.one(hidden)), block.two(hidden).square())

    return custom_model(sends_to_experts, 1)


def ends_with_rrelu(block, hidden, shift):
    return functional.rrelu(work(block, hidden, shift), training=True)


def begins_with_rrelu(block, hidden, shift):
    return work(block, functional.rrelu(hidden, training=True), shift)


def decays(faulty):
    """The block overwrites a buffer, and multiplies its input by that."""

    def multiplies(block, hidden, shift):
        if faulty or torch._C._current_graph_task_id() < 0:
            block.decay.mul_(0.9)
        return work(block, hidden, shift) * block.decay

    model = custom_model(multiplies, 1)
    model.layers[1].register_buffer("decay", torch.tensor([2.0]))
    return model


def changes_its_shift(block, hidden, shift):
    return work(block, hidden, shift.add_(0.5))


def adds_a_shift(block, hidden, shift):
    return work(block, hidden, shift + 0.5)


# --- faults between forward and backward ---------------------------------------------------------------------------
# Generators: they run to their `yield` before the backward, to their end after it.


def with_the_other_adapter(model):
    yield model.set_adapter("critic")
    model.set_adapter("default")


def with_a_changed_weight(model):
    with torch.no_grad():
        model.layers[1].one.weight.mul_(2)
    yield
    with torch.no_grad():
        model.layers[1].one.weight.div_(2)


def with_offsets_by_hooks(model, number):
    """An adapter whose offsets come from hooks that stay on the model for one forward only."""
    model.handle = model.layers[1].one.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    return custom_loss(model, number)


def without_hooks(model):
    yield model.handle.remove()


@contextlib.contextmanager
def patched(faulty=True):
    """Replace a function that the blocks call."""
    with mock.patch.object(functional, "silu", functional.relu):
        yield


# --- models of transformers ----------------------------------------------------------------------------------------


def loss_of_llama(model, number):
    return model(**tiny_batch("llama", seed=number), use_cache=False).loss


# Models in which one block does something else if it is faulty, and sound ones.
drops_again = in_one_block(drops, drops)
draws_from_python = in_one_block(draws(random.random), draws_from_torch)
draws_from_numpy = in_one_block(draws(numpy.random.rand), draws_from_torch)
changes_its_first_shift = in_one_block(changes_its_shift, adds_a_shift, at=0)
ends_with_unwritten_memory = in_one_block(ends_with_rrelu, begins_with_rrelu)

loses_the_shift = with_function(own_checkpoint(without_shift), own_checkpoint())
is_patched_in_the_forward = with_function(own_checkpoint(), own_checkpoint(patched()))
stores_16_bits = with_function(rounding(torch.bfloat16), rounding(torch.float32))


def chooses_experts(faulty):
    return experts("mixtral", implementation="batched_mm")


def has_two_adapters(faulty):
    return two_adapters(tiny_model("llama"))


def exhibit_of(row):
    """A row of `exhibits.yaml`, which names functions of this module."""
    functions = ("model", "loss", "checkpoint", "between", "around")
    return Exhibit(**{key: globals()[value] if key in functions else value for key, value in row.items()})


TABLE = table(__file__, "exhibits.yaml")
EXHIBITS = {f"{kind}: {name}": exhibit_of(row) for kind, rows in TABLE.items() for name, row in rows.items()}
"""Kind of the cause, as on the page, and the name of the fault -> the fault."""
NOT_CAUGHT = {
    "checkpointing that drops gradients of weights": ("recomputed tensors are right", own_checkpoint(scale=0.0)),
    "checkpointing that counts gradients of weights twice": ("recomputed tensors are right", own_checkpoint(scale=2.0)),
}
"""Faults that the watch cannot find, and why."""


def run(exhibit, faulty, checkpointed):
    """Run as many steps as there are blocks; returns loss, gradients and buffers after each, and the watch."""
    torch.manual_seed(0)
    model = exhibit.model(faulty)
    if checkpointed:
        exhibit.checkpoint(model, faulty)
    base, watch, results = base_model(model), WatchOfOthers(), []
    for number in range(len(find_blocks(base).modules)):
        model.zero_grad(set_to_none=True)
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(number)
        if checkpointed:
            watch.check_next(base)
        with exhibit.around(faulty if checkpointed else None):
            loss = exhibit.loss(model, number)
        change = exhibit.between(model) if faulty and checkpointed else iter(())
        next(change, None)
        loss.backward()
        next(change, None)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        results.append((loss.detach(), {k: v for k, v in gradients(model).items() if v is not None}, buffers))
    return results, watch


def same(expected, got):
    return expected.keys() == got.keys() and all(torch.equal(value, got[name]) for name, value in expected.items())


def places(watch):
    """Places of the blocks that the watch has found different."""
    return [int(results.block.rpartition(".")[2]) for results in watch.differences]


def shown(mark):
    """Cells of the page's table between two marks."""
    page = (Path(__file__).parents[2] / "docs" / "watch.md").read_text(encoding="utf-8")
    table = page.partition(f"<!-- {mark} -->\n")[2].partition(f"\n<!-- end of {mark} -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_page_shows_the_museum():
    kinds = {}
    for name, exhibit in EXHIBITS.items():
        kinds.setdefault(name.partition(":")[0], []).append(exhibit.reports)
    rows = [[k, str(len(each)), ", ".join(filter(None, each)) or "tests of hf_ckpt"] for k, each in kinds.items()]
    assert shown("museum") == rows
    assert shown("not caught") == [[name, reason] for name, (reason, _) in NOT_CAUGHT.items()]


@pytest.mark.parametrize("name", EXHIBITS)
def test_the_watch_finds_the_fault_and_nothing_without_it(name):
    exhibit = EXHIBITS[name]
    expected, _ = run(exhibit, faulty=True, checkpointed=False)
    got, watch = run(exhibit, faulty=True, checkpointed=True)
    (loss, plain, plain_buffers), (their_loss, of_transformers, buffers) = expected[0], got[0]
    assert torch.equal(loss, their_loss)
    assert not same(plain, of_transformers)
    assert same(plain_buffers, buffers) == ("buffers" not in exhibit.wrong)
    assert watch.report().checks == len(got)
    assert places(watch) == [*exhibit.blocks]
    assert all(exhibit.cause in results.cause for results in watch.differences)

    expected, _ = run(exhibit, faulty=False, checkpointed=False)
    got, watch = run(exhibit, faulty=False, checkpointed=True)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one[0], other[0])
        assert same(one[1], other[1])
    assert watch.report().checks == len(got)
    assert watch.report().compared > 0
    assert not watch.differences


class _Attention(torch.autograd.Function):
    """An attention kernel that saves random state, which it writes only if it drops something."""

    memory = itertools.count()

    @staticmethod
    def forward(ctx, hidden, dropout):
        ctx.dropout_p = dropout
        ctx.save_for_backward(torch.tensor(next(_Attention.memory)))
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        (_,) = ctx.saved_tensors
        return gradient, None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_random_state_of_an_attention_without_dropout_may_be_unwritten(dropout):
    """As the kernels on CUDA do, and the package flash-attn."""

    def attends(block, hidden, shift):
        return work(block, _Attention.apply(hidden, dropout), shift)

    _, watch = run(Exhibit("", in_one_block(attends)), faulty=True, checkpointed=True)
    assert places(watch) == ([1] if dropout else [])


@pytest.mark.parametrize("name", NOT_CAUGHT)
def test_what_the_watch_cannot_find(name):
    reason, function = NOT_CAUGHT[name]
    exhibit = Exhibit("", checkpoint=with_function(function))
    expected, _ = run(exhibit, faulty=True, checkpointed=False)
    got, watch = run(exhibit, faulty=True, checkpointed=True)
    assert torch.equal(expected[0][0], got[0][0])
    assert not same(expected[0][1], got[0][1])
    assert not watch.differences, f"It is found: {reason!r} is not so."
