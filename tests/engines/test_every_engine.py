"""What users do around every engine: other backwards, threads, checkpoints of their own, copies, saved plans."""

from __future__ import annotations

import copy
import functools
import pickle
import threading

import pytest
import torch
from helpers.lanes import DeviceBytes
from helpers.offloading import mover, said
from helpers.steps import assert_frees_everything, assert_near, assert_same, enable, outcome, step, without_cache
from helpers.toys import each_family
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
    "sac": {"policy": "selective", "engine": "sac"},
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


def check(model, moves):
    """Every block ran again, and tensors were moved or not."""
    found = hf_ckpt.describe(model)
    assert found.recomputed.keys() == {block.name for block, _ in found.plan.actions}
    assert all(found.recomputed.values())
    assert bool(found.moved) == moves


def compare(run, family, engine, *, moves=MOVING, **options):
    """`run` gives the same with the engine and without it, and the engine did its work."""
    model = ours(family, engine, **options)
    assert_same(run(tiny_model(family, layers=3, **options)), run(model))
    check(model, engine in moves)
    return model


@each_engine
@two_families
def test_a_graph_without_a_backward_frees_everything(family, engine):
    """With the garbage collector off: no reference cycle holds activations."""
    model = ours(family, engine, dropout=0.1, dtype=torch.bfloat16)
    assert_frees_everything(model, tiny_batch(family), meter=DeviceBytes)
    check(model, engine in MOVING)
    if hf_ckpt.describe(model).moved:
        assert mover(model)._in_use == 0


@pytest.mark.parametrize("engine", [engine for engine in SPECS if engine != "sac"])  # which allows one backward
@each_family
def test_a_second_derivative(family, engine):
    def run(model):
        loss = model(**without_cache(model, tiny_batch(family))).loss
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True, allow_unused=True)
        sum(value.square().sum() for value in first if value is not None).backward()
        return outcome(model, loss)

    compare(run, family, engine)


def _mean_loss(model, batch):
    return model(**batch).loss


def _loss_of_rows(model, batch):
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").mean()


@pytest.mark.compat
@pytest.mark.parametrize(
    ("spec", "loss", "instead"),
    [
        ({"head": 4}, _mean_loss, '"head": "full"'),
        ({"head": 4}, _loss_of_rows, '"head": "full"'),
        ({"policy": "none", "mlp": 4}, _mean_loss, "Leave `mlp` out"),
        ({"policy": "full", "mlp": 4}, _mean_loss, "Leave `mlp` out"),
    ],
    ids=["head", "rows of the head", "mlp", "mlp under full"],
)
def test_a_second_derivative_of_chunks_is_refused(spec, loss, instead):
    """It was wrong in silence: gradients of chunks counted as constants."""
    model = tiny_model("llama", layers=2)
    batch = tiny_batch("llama")
    expected = step(model, batch)
    hf_ckpt.install(model, spec)
    enable(model)
    with pytest.raises(DoubleBackwardError, match=f"`create_graph=True` .*{instead}"):
        torch.autograd.grad(loss(model, batch), list(model.parameters()), create_graph=True)
    assert_near(expected, step(model, batch))


@each_engine
@each_family
def test_an_optimizer_that_steps_inside_backward(family, engine):
    """Parameters change as soon as their gradient is there; nothing that is made again later may read them."""

    def update(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    def run(model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for seed in range(2):
            model(**without_cache(model, tiny_batch(family, seed=seed))).loss.backward()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    compare(run, family, engine)


@each_engine
@two_families
def test_backward_in_another_thread(family, engine):
    def run(model):
        torch.manual_seed(0)
        losses = [model(**without_cache(model, tiny_batch(family, seed=seed))).loss for seed in range(2)]
        for loss in losses:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        return outcome(model, losses[0])

    compare(run, family, engine)


@each_engine
@each_family
def test_the_users_own_checkpoint_around_the_model(family, engine, caplog):
    """Chunked losses and GradCache checkpoint whole forwards; torch lets each packed tensor be asked for once."""

    def run(model):
        torch.manual_seed(3)
        batch = without_cache(model, tiny_batch(family))
        loss = checkpoint(lambda: model(**batch).loss, use_reentrant=False)
        loss.backward()
        return outcome(model, loss)

    compare(run, family, engine, moves=("offload",), dropout=0.1)
    assert ["hooks around the model" in message for message in said(caplog)] == [True] * ("saved" in engine)


@each_engine
def test_the_users_own_checkpoint_inside_a_block(engine):
    """BERT's blocks end in a norm, here under such a checkpoint."""

    def run(model):
        for block in find_blocks(model).modules.values():
            plain = block.output.forward
            block.output.forward = functools.partial(checkpoint, plain, use_reentrant=False)
        found = [step(model, tiny_batch("bert")) for _ in range(2)]
        return {f"{name} {number}": value for number, outcome in enumerate(found) for name, value in outcome.items()}

    compare(run, "bert", engine, dropout=0.1)


@each_engine
@two_families
def test_the_users_saved_tensor_hooks_around_the_model(family, engine):
    def run(model):
        with torch.autograd.graph.save_on_cpu():
            return step(model, tiny_batch(family))

    compare(run, family, engine, moves=("offload",))


# --- models and plans that go elsewhere -----------------------------------------------------------------------------


@pytest.mark.compat
@each_engine
@two_families
def test_copies_work_and_nothing_is_left_behind(family, engine, lanes):
    """Copies have functions and host memory of their own, and count for themselves."""
    model = ours(family, engine)
    expected = step(model, tiny_batch(family))
    before = hf_ckpt.describe(model)
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in twins:
        if before.moved:
            assert mover(twin) is not mover(model)
            assert mover(twin).held_bytes == 0
        assert_same(expected, step(twin, tiny_batch(family)))
        found = hf_ckpt.describe(twin)
        assert found.recomputed == {name: 2 * times for name, times in before.recomputed.items()}
        assert found.moved == before.moved
        assert not found.moved or mover(twin).held_bytes == mover(model).held_bytes
        regions = installation(twin).regions
        assert regions.keys() == installation(model).regions.keys()
        assert all(region is not installation(model).regions[name] for name, region in regions.items())
    assert hf_ckpt.describe(model).recomputed == before.recomputed
    assert len(lanes) == (3 if before.moved else 0)
    for one in (model, *twins):
        hf_ckpt.uninstall(one)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.modules())
        assert_same(expected, step(one, tiny_batch(family)))


@pytest.mark.compat
@each_engine
@pytest.mark.parametrize("name", ["plan.json", "plan.yaml"])
def test_a_saved_plan_comes_back(engine, name, tmp_path):
    model = ours("t5", engine)
    saved = hf_ckpt.describe(model)
    saved.save(tmp_path / name)
    assert ("in host memory" in str(saved.plan)) == ("saved" in engine)
    loaded = hf_ckpt.Plan.load(tmp_path / name)
    assert loaded == saved.plan
    expected = step(model, tiny_batch("t5"))
    for given in (loaded, {"plan": str(tmp_path / name)}):
        again = tiny_model("t5", layers=3)
        hf_ckpt.install(again, given)
        enable(again)
        assert_same(expected, step(again, tiny_batch("t5")))
        check(again, engine in MOVING)
        found, done = hf_ckpt.describe(again), hf_ckpt.describe(model)
        assert (found.plan, found.moved) == (saved.plan, done.moved)
        if engine != "sac":  # which is the spec's choice, not the plan's
            assert found.recomputed == done.recomputed
        assert ("moved to host memory in the last forward: " in str(found)) == (engine in MOVING)
