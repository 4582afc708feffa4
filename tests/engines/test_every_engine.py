"""Ways of training that every engine supports: unusual backwards, threads, checkpoints, hooks, copies, saved plans."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import threading

import pytest
import torch
from helpers.lanes import DeviceBytes
from helpers.offloading import mover, said
from helpers.steps import (
    CACHED_BYTES,
    assert_frees_everything,
    assert_near,
    assert_same,
    enable,
    outcome,
    step,
    without_cache,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import DoubleBackwardError
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model

SPECS = {
    "full": {"policy": "full"},
    "full+selective": {"policy": "full+selective"},
    "selective": {"policy": "selective"},
    "save attention": {"policy": "selective", "save": ["attention"]},
    "save linear": {"policy": "selective", "save": ["linear"]},
    "segments": {"segments": 2},
    "offload": {"policy": "offload"},
    "saved": {"policy": "selective", "offload": "saved"},
    "saved, save attention": {"policy": "selective", "offload": "saved", "save": ["attention"]},
}
MOVING = ("offload", "saved", "saved, save attention")
each_engine = pytest.mark.parametrize("engine", SPECS)
two_families = pytest.mark.parametrize("family", ["llama", "t5"])
pytestmark = pytest.mark.usefixtures("lanes")


def ours(family, engine, **options):
    """A small model with the engine on every block."""
    model = tiny_model(family, layers=3, **options)
    hf_ckpt.install(model, SPECS[engine])
    enable(model)
    return model


def check(model, moves, recomputes=True):
    """Check whether every block was recomputed, and whether tensors were moved."""
    found = hf_ckpt.describe(model)
    assert found.recomputed.keys() == {block.name for block, _ in found.plan.actions}
    assert set(map(bool, found.recomputed.values())) == {recomputes}
    assert bool(found.moved) == moves


# --- ways of training -----------------------------------------------------------------------------------------------


def loss_of(model, family, seed=0):
    return model(**without_cache(model, tiny_batch(family, seed=seed))).loss


def second_derivative(model, family):
    loss = loss_of(model, family)
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True, allow_unused=True)
    sum(value.square().sum() for value in first if value is not None).backward()
    return outcome(model, loss)


def optimizer_inside_backward(model, family):
    """Parameters change as soon as their gradient exists; later recomputations must not read them."""

    def update(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for seed in range(2):
        loss_of(model, family, seed).backward()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def backward_in_another_thread(model, family):
    torch.manual_seed(0)
    losses = [loss_of(model, family, seed) for seed in range(2)]
    for loss in losses:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    return outcome(model, losses[0])


def forwards_in_two_threads(model, family):
    """Two threads run the same block at once and share its function, like replicas of nn.DataParallel."""
    barrier, losses = threading.Barrier(2), {}

    def run(seed):
        losses[seed] = loss_of(model, family, seed)

    def meet(module, args):
        if threading.current_thread() in threads:  # only in the forward
            barrier.wait(timeout=20)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(meet)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(2):
        losses[seed].backward()
    return outcome(model, losses[0])


def other_parameters(model, family):
    """The forward runs under `functional_call`, and the backward after the model has its own parameters again."""
    leaves = {name: (1.5 * value.detach()).requires_grad_() for name, value in model.named_parameters()}
    loss = torch.func.functional_call(model, leaves, (), without_cache(model, tiny_batch(family))).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def own_checkpoint_around_the_model(model, family):
    """Chunked losses and GradCache checkpoint whole forwards; torch then unpacks each saved tensor only once."""
    torch.manual_seed(3)
    loss = checkpoint(lambda: loss_of(model, family), use_reentrant=False)
    loss.backward()
    return outcome(model, loss)


def own_checkpoint_inside_a_block(model, family):
    """The norm at the end of BERT's blocks runs under a checkpoint."""
    for block in find_blocks(model).modules.values():
        block.output.forward = functools.partial(checkpoint, block.output.forward, use_reentrant=False)
    step(model, tiny_batch(family))
    return step(model, tiny_batch(family))


def own_hooks_around_the_model(model, family):
    with torch.autograd.graph.save_on_cpu():
        return step(model, tiny_batch(family))


RUNS = {
    second_derivative: ("llama", "gpt2", "bert", "t5"),
    optimizer_inside_backward: ("llama", "gpt2", "bert", "t5"),
    backward_in_another_thread: ("llama", "t5"),
    forwards_in_two_threads: ("llama",),
    other_parameters: ("llama",),
    own_checkpoint_around_the_model: ("gpt2", "t5"),
    own_checkpoint_inside_a_block: ("bert",),
    own_hooks_around_the_model: ("llama", "bert"),
}
"""Way of training -> families. Under hooks around the model, nothing is moved, and `selective` drops nothing."""
CASES = [
    pytest.param(engine, run, family, id=f"{engine}-{run.__name__}-{family}")
    for engine in SPECS
    for run, families in RUNS.items()
    for family in families
]


@pytest.mark.parametrize(("engine", "run", "family"), CASES)
def test_gradients_of_other_ways_of_training(engine, run, family, caplog):
    dropout = 0.1 if "checkpoint" in run.__name__ else 0.0
    model = ours(family, engine, dropout=dropout)
    assert_same(run(tiny_model(family, layers=3, dropout=dropout), family), run(model, family))
    hooked = "around" in run.__name__
    drops_nothing = hooked and SPECS[engine].get("policy") == "selective"
    check(model, engine in MOVING and not hooked, recomputes=not drops_nothing)
    told = ["hooks around the model" in message for message in said(caplog)]
    assert told == [True] * (hooked and engine == "offload")


@each_engine
@two_families
def test_a_graph_without_a_backward_frees_everything(family, engine):
    """A forward without a backward leaves nothing, with the garbage collector off: no cycle holds activations."""
    model = ours(family, engine, dropout=0.1, dtype=torch.bfloat16)
    assert_frees_everything(model, tiny_batch(family), meter=DeviceBytes)
    check(model, engine in MOVING)
    if hf_ckpt.describe(model).moved:
        assert mover(model).held_bytes == 0


@each_engine
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_in_a_block_leaves_nothing(engine, place):
    """Training can continue after an error inside a block, such as running out of memory."""
    model, batch = ours("llama", engine), without_cache(tiny_model("llama"), tiny_batch("llama"))
    expected, before = step(model, batch), hf_ckpt.describe(model).recomputed

    raised = []

    def broken(hidden):
        raised.append(place)
        raise RuntimeError("out of memory")

    gc.collect()
    gc.disable()
    try:
        with DeviceBytes(model) as live:
            model.model.layers[place].mlp.down_proj.forward = broken
            with contextlib.suppress(RuntimeError):
                model(**batch)
            del model.model.layers[place].mlp.down_proj.forward
            assert live.current_bytes - live.start_bytes <= CACHED_BYTES
    finally:
        gc.enable()
    assert raised == [place]
    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()  # no hooks are left behind
    assert_same(expected, step(model, batch))
    assert hf_ckpt.describe(model).recomputed == {name: 2 * times for name, times in before.items()}
    assert all(before.values())


def _mean_loss(model, batch):
    return model(**batch).loss


def _loss_of_rows(model, batch):
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").mean()


@pytest.mark.compat
@pytest.mark.parametrize("loss", [_mean_loss, _loss_of_rows], ids=["head", "rows of the head"])
def test_a_second_derivative_of_chunks_is_refused(loss):
    """Second derivatives of chunks are refused, because gradients of chunks would count as constants."""
    model = tiny_model("llama", layers=2)
    batch = tiny_batch("llama")
    expected = step(model, batch)
    hf_ckpt.install(model, {"head": 4})
    enable(model)
    with pytest.raises(DoubleBackwardError, match=r"`create_graph=True` .*Leave `head` out"):
        torch.autograd.grad(loss(model, batch), list(model.parameters()), create_graph=True)
    assert_near(expected, step(model, batch))


# --- copies and saved plans -----------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("engine", [*SPECS, "chunks"])
def test_copies_and_saved_plans_work_by_themselves(engine, lanes, tmp_path):
    """Copies, and models with a plan from a file, have their own functions, weights and host memory."""
    spec = {**SPECS, "chunks": {"policy": "full", "head": 5}}[engine]
    model = tiny_model("t5", layers=3)
    hf_ckpt.install(model, spec)
    enable(model)
    expected = step(model, tiny_batch("t5"))
    before = hf_ckpt.describe(model)
    model.zero_grad(set_to_none=True)
    before.save(tmp_path / "plan.json")
    loaded = tiny_model("t5", layers=3)
    hf_ckpt.install(loaded, {"plan": str(tmp_path / "plan.json")})
    enable(loaded)
    for twin, times in ((copy.deepcopy(model), 2), (pickle.loads(pickle.dumps(model)), 2), (loaded, 1)):
        regions = installation(twin).regions
        assert regions.keys() == installation(model).regions.keys()
        assert all(region is not installation(model).regions[name] for name, region in regions.items())
        if before.moved:
            assert mover(twin) is not mover(model)
        assert_same(expected, step(twin, tiny_batch("t5")))
        found = hf_ckpt.describe(twin)
        assert found.plan == before.plan
        assert ("in host memory" in str(found.plan)) == ("saved" in engine)
        assert ("moved to host memory in the last forward: " in str(found)) == (engine in MOVING)
        assert found.moved == before.moved
        assert found.chunked_heads == times * before.chunked_heads
        assert bool(found.chunked_heads) == (engine == "chunks")
        assert found.recomputed == {name: times * count for name, count in before.recomputed.items()}
        hf_ckpt.uninstall(twin)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in twin.modules())
        (assert_near if engine == "chunks" else assert_same)(expected, step(twin, tiny_batch("t5")))
        assert all(parameter.grad is None for parameter in model.parameters())
    assert hf_ckpt.describe(model).recomputed == before.recomputed
    assert len(lanes) == (4 if before.moved else 0)
