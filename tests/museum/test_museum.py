"""The museum: small copies of public faults that silently made gradients wrong, and whether the watch finds them.

Each row of `EXHIBITS` is a fault: the cause that the watch must name, the setup, the faulty blocks, and public reports.
`docs/watch.md` lists them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.utils.checkpoint
from helpers.adapters import two_adapters, with_lora
from helpers.custom import LAYERS, custom_loss, custom_model, work
from helpers.experts import experts
from helpers.steps import enable, gradients
from helpers.watching import WatchOfOthers
from torch import nn
from torch.nn import functional

from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model


def theirs(**faulty_options):
    """Enable transformers' own checkpointing, with these options if `faulty`, otherwise with correct ones."""
    right = {"use_reentrant": False, "preserve_rng_state": True}
    return lambda model, faulty: enable(model, right | faulty_options if faulty else right)


THEIRS, REDRAWN = theirs(), theirs(preserve_rng_state=False)


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
    blocks: tuple[int, ...] = (1,)
    wrong: str = "gradients"
    """What is wrong: `gradients`, `gradients and buffers`, or only `buffers` or `attributes`."""
    reports: str = ""
    """Public reports, each as repository and number."""


def with_function(faulty_function, right_function=None):
    """Checkpoint all blocks with a function, as transformers itself does with torch's."""
    return lambda model, faulty: model._set_gradient_checkpointing(True, faulty_function if faulty else right_function)


def in_one_block(fault, right=work, at=1):
    """A model in which one block does something else if `faulty`."""
    return lambda faulty: custom_model(fault if faulty else right, at)


# --- checkpointing functions with faults ----------------------------------------------------------------------------


class _OwnCheckpoint(torch.autograd.Function):
    """A hand-written checkpoint as found in many programs; its backward runs the function `again`."""

    @staticmethod
    def forward(ctx, run, again, times, *args):
        ctx.again, ctx.times, ctx.random = again, times, torch.get_rng_state()
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return run(*args)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.random)
            output = ctx.again(*inputs)
        found = torch.autograd.grad(output, inputs, gradient, retain_graph=True)
        for _ in range(ctx.times):
            torch.autograd.backward(output, gradient, retain_graph=True)
        return None, None, None, *found


def own_checkpoint(again=lambda function: function, times=1):
    """A checkpointing function; `again` turns a block's forward into the function that backward runs.

    It adds the gradients of parameters `times` times.
    """
    return lambda function, *args: _OwnCheckpoint.apply(function, again(function), times, *args)


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


def normalises_batches(faulty):
    model = custom_model(lambda block, hidden, shift: work(block, block.extra(hidden), shift), 1)
    model.layers[1].extra = nn.BatchNorm1d(8)
    model.layers[1].extra.train(faulty)
    return model


def counts_its_calls(faulty):
    def counts(block, hidden, shift):
        if faulty or torch._C._current_graph_task_id() < 0:  # not in a backward
            block.calls["forward"] += 1
        return work(block, hidden, shift)

    model = custom_model(counts, 1)
    model.layers[1].calls = {"forward": 0}
    return model


# --- faults between forward and backward ---------------------------------------------------------------------------
# Generators: they run to their `yield` before the backward, to their end after it.


def in_eval_mode(model):
    yield model.eval()
    model.train()


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


def bf16(faulty=True):
    return torch.autocast("cpu", dtype=torch.bfloat16)


@contextlib.contextmanager
def patched(faulty=True):
    """Replace a function that the blocks call."""
    with mock.patch.object(functional, "silu", functional.relu):
        yield


# --- models of transformers ----------------------------------------------------------------------------------------


def adapters_alone(faulty):
    """LoRA in the blocks, and a trained head after them."""
    model = with_lora(tiny_model("llama", layers=LAYERS), "llama", lora_dropout=0.0)
    base_model(model).lm_head.weight.requires_grad_(True)
    return model


def adapters_without_gradients(model, faulty):
    enable(model, {"use_reentrant": faulty})
    if faulty:  # transformers itself makes the embeddings require gradients
        base_model(model).disable_input_require_grads()


def loss_of_llama(model, number):
    return model(**tiny_batch("llama", seed=number), use_cache=False).loss


EVERY = (0, 1, 2)
FROM_OTHER_INPUTS = "recomputed from other inputs than it had: `shift`"
DRAWN_ANEW = "Random numbers are drawn anew: set preserve_rng_state to True"
CHANGED = "parameters, settings of the block (train or eval mode, adapters, hooks, attributes) or autocast changed"
FOUND_BY_THE_FORWARD_ONLY = "a patched function or state of the process. `selective` runs no block twice."
EXHIBITS = {
    "random numbers drawn again: dropout": Exhibit(
        DRAWN_ANEW,
        in_one_block(drops, drops),
        checkpoint=REDRAWN,
        reports="OLMo-core#828, torchtitan#1323",
    ),
    "random numbers drawn again: other experts chosen": Exhibit(
        DRAWN_ANEW,
        lambda faulty: experts("mixtral", implementation="batched_mm"),
        loss_of_llama,
        checkpoint=REDRAWN,
        blocks=(0, 1),
        reports="transformers#47467, torchtitan#1117",
    ),
    "random numbers drawn again: Python's": Exhibit(DRAWN_ANEW, in_one_block(draws(random.random), draws_from_torch)),
    "random numbers drawn again: numpy's": Exhibit(
        DRAWN_ANEW, in_one_block(draws(numpy.random.rand), draws_from_torch)
    ),
    "adapters without gradients (reentrant)": Exhibit(
        "set use_reentrant to False",
        adapters_alone,
        loss_of_llama,
        checkpoint=adapters_without_gradients,
        blocks=EVERY,
        reports="Megatron-Bridge#5586, peft#137",
    ),
    "inputs changed, lost or stored wrongly: an argument changed in place": Exhibit(
        FROM_OTHER_INPUTS, in_one_block(changes_its_shift, adds_a_shift, at=0), blocks=(0,)
    ),
    "inputs changed, lost or stored wrongly: an argument left out of the recomputation": Exhibit(
        FROM_OTHER_INPUTS,
        checkpoint=with_function(own_checkpoint(without_shift), own_checkpoint()),
        blocks=EVERY,
        reports="Megatron-LLM#86, LlamaFactory#7699",
    ),
    "parameters, settings or autocast changed before backward: eval()": Exhibit(
        CHANGED,
        in_one_block(drops, drops),
        checkpoint=lambda model, faulty: enable(model, {"use_reentrant": True}),
        between=in_eval_mode,
    ),
    "parameters, settings or autocast changed before backward: another adapter": Exhibit(
        CHANGED,
        lambda faulty: two_adapters(tiny_model("llama")),
        loss_of_llama,
        between=with_the_other_adapter,
        blocks=(0, 1, 2, 3),
    ),
    "parameters, settings or autocast changed before backward: hooks that lie on the model for a forward": Exhibit(
        CHANGED, loss=with_offsets_by_hooks, between=without_hooks, reports="peft#2826"
    ),
    "parameters, settings or autocast changed before backward: a weight": Exhibit(
        CHANGED, between=with_a_changed_weight
    ),
    "parameters, settings or autocast changed before backward: autocast": Exhibit(
        CHANGED,
        checkpoint=with_function(own_checkpoint(), own_checkpoint(bf16())),
        around=bf16,
        blocks=EVERY,
        reports="pytorch#71124, TransformerEngine#787",
    ),
    "buffers or attributes updated twice: a batch norm's": Exhibit(
        "The block updates it in every run",
        normalises_batches,
        wrong="buffers",
        reports="pytorch#96136, fairscale#1035",
    ),
    "buffers or attributes updated twice: one that the gradients depend on": Exhibit(
        "The block updates `decay` in every run", decays, wrong="gradients and buffers"
    ),
    "buffers or attributes updated twice: a counter": Exhibit(
        "The block updates it in every run", counts_its_calls, wrong="attributes"
    ),
    "unknown, with a list of these: a random generator of the block's own": Exhibit(
        "random generator of its own", draws_from_a_generator_of_its_own
    ),
    "unknown, with a list of these: kernels that do not repeat themselves": Exhibit(
        "a nondeterministic kernel", breaks_ties_by_rounding, reports="Liger-Kernel#1255, torchtitan#3146"
    ),
    "unknown, with a list of these: memory that is not written yet (RReLU at a block's end)": Exhibit(
        "(RReLU as the last operation of a block",
        in_one_block(ends_with_rrelu, begins_with_rrelu),
        reports="pytorch#193671",
    ),
    "unknown, with a list of these: functions patched, or process state changed, for the forward": Exhibit(
        FOUND_BY_THE_FORWARD_ONLY,
        checkpoint=with_function(own_checkpoint(), own_checkpoint(patched())),
        around=patched,
        blocks=EVERY,
    ),
    "saved tensors stored wrongly, such as by offloading": Exhibit(
        "or a smaller type",
        checkpoint=with_function(rounding(torch.bfloat16), rounding(torch.float32)),
        blocks=EVERY,
        reports="trl#7195, axolotl#3833",
    ),
}
"""Kind of the cause, as on the page, and perhaps the name of the fault -> the fault."""
NOT_CAUGHT = {
    "an engine that leaves weights out": ("what it recomputes is right", own_checkpoint(times=0)),
    "an engine that counts weights twice": ("what it recomputes is right", own_checkpoint(times=2)),
}
"""Faults that the watch cannot find, and why."""


def run(exhibit, faulty, checkpointed):
    """Run as many steps as there are blocks; returns loss, gradients and buffers after each, and the watch."""
    torch.manual_seed(0)
    model = exhibit.model(faulty)
    if checkpointed:
        exhibit.checkpoint(model, faulty)
    base, watch, found = base_model(model), WatchOfOthers(), []
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
        found.append((loss.detach(), {k: v for k, v in gradients(model).items() if v is not None}, buffers))
    return found, watch


def same(expected, got):
    return expected.keys() == got.keys() and all(torch.equal(value, got[name]) for name, value in expected.items())


def places(watch):
    """Places of the blocks that the watch has found different."""
    return [int(found.block.rpartition(".")[2]) for found in watch.differences]


def updated(watch):
    """Place of each block in which something was updated once more -> that, in words."""
    return {int(name.split(".")[1]): text for name, text in watch.updated.items()}


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
    (loss, plain, plain_buffers), (their_loss, theirs, buffers) = expected[0], got[0]
    assert torch.equal(loss, their_loss)
    assert same(plain, theirs) == ("gradients" not in exhibit.wrong)
    assert same(plain_buffers, buffers) == ("buffers" not in exhibit.wrong)
    assert watch.report().checks == len(got)
    if "gradients" in exhibit.wrong:
        assert places(watch) == [*exhibit.blocks]
        assert all(exhibit.cause in found.cause for found in watch.differences)
    else:  # an update that the gradients do not depend on is no difference
        assert not watch.differences
        assert [*updated(watch)] == [*exhibit.blocks]
        assert all("once more" in text and exhibit.cause in text for text in updated(watch).values())

    expected, _ = run(exhibit, faulty=False, checkpointed=False)
    got, watch = run(exhibit, faulty=False, checkpointed=True)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one[0], other[0])
        assert same(one[1], other[1])
    assert watch.report().checks == len(got)
    assert watch.report().compared > 0
    assert not watch.differences
    assert not watch.updated


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
