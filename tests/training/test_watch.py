"""The watch: how it reacts to differences, how much memory it uses, and that it changes nothing else."""

import copy
import pickle
import random

import numpy
import pytest
import torch
from helpers.custom import LAYERS as CUSTOM_LAYERS
from helpers.custom import custom_loss, custom_model, work
from helpers.planned import live_peak, model_of, without_state
from helpers.steps import assert_frees_everything, assert_same, enable, gradients, planned, step, without_cache
from helpers.trainers import FLAG, trainer
from helpers.watching import WatchOfOthers

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.attach.switches import FUNCTION
from hf_ckpt.engines.check import Check
from hf_ckpt.engines.rebuild import ops
from hf_ckpt.errors import MismatchError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.training import watch as watching

LAYERS = 4
each_policy = pytest.mark.parametrize("policy", ["full", "selective", "full+selective"])


def watched(policy="full", **spec):
    """A small model with dropout; every step is checked."""
    return planned(tiny_model("llama", layers=LAYERS, dropout=0.1), {"policy": policy, "check_every": 1, **spec})


# --- differences ---------------------------------------------------------------------------------------------------


def faulty_trainer(folder, monkeypatch, on_mismatch):
    """A Trainer under faulty checkpointing: an operation is rebuilt as ones."""
    model = tiny_model("llama", layers=LAYERS, dropout=0.1)
    monkeypatch.setitem(ops.OPS, "SiluBackward0", ops.Op("activation", lambda node, metadata: torch.ones_like))
    hf_ckpt.install(model, {"policy": "selective", "check_every": 1, "on_mismatch": on_mismatch})
    return trainer(folder, model, **{f"{FLAG}_kwargs": None})


def test_an_error_comes_before_the_optimizer(tmp_path, monkeypatch):
    training = faulty_trainer(tmp_path, monkeypatch, "raise")
    before = {name: value.clone() for name, value in training.model.named_parameters()}
    with pytest.raises(MismatchError, match="and no optimizer has used them yet: in `model") as raised:
        training.train()
    assert raised.value.block == "model.layers.0"
    assert training.state.global_step == 0
    assert all(torch.equal(value, before[name]) for name, value in training.model.named_parameters())


def test_every_difference_is_counted_and_the_first_is_logged(tmp_path, monkeypatch, caplog):
    training = faulty_trainer(tmp_path, monkeypatch, "warn")
    training.train()
    assert len(hf_ckpt.describe(training.model).watched.differences) == 4
    assert caplog.text.count("gradients of this step are wrong") == 1


def test_wrong_blocks_get_another_action_from_the_next_step_on(tmp_path, monkeypatch, caplog):
    """A faulty rebuild is left to `keep`, one block after the other: each is checked in its turn. Enabling changes
    nothing about that."""
    training = faulty_trainer(tmp_path, monkeypatch, "avoid")
    training.args.max_steps = LAYERS + 1
    training.train()
    described = hf_ckpt.describe(training.model)
    assert len(described.watched.differences) == LAYERS
    assert described.avoided == dict.fromkeys([f"model.layers.{number}" for number in range(LAYERS)], "keep")
    assert caplog.text.count("runs under `keep` from now on, instead of `selective (save linear, attention)`") == LAYERS
    training.model.gradient_checkpointing_disable()
    training.model.gradient_checkpointing_enable()
    described = hf_ckpt.describe(training.model)
    assert not described.plan.active()
    assert "since then, model.layers.3 runs under keep" in str(described)


class Rand(torch.nn.Module):
    """Draws from a generator of its own, which no recomputation can put back."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x * torch.rand(x.shape, generator=self.generator)


def test_a_block_that_draws_by_itself_is_left_to_selective():
    model = tiny_model("llama", layers=LAYERS)
    model.model.layers[1].mlp.act_fn = torch.nn.Sequential(model.model.layers[1].mlp.act_fn, Rand())
    planned(model, {"policy": "full", "check_every": 1, "on_mismatch": "avoid"})
    for _ in range(2 * LAYERS):
        step(model, tiny_batch("llama"))
    described = hf_ckpt.describe(model)
    assert described.avoided == {"model.layers.1": "selective (save linear, attention)"}
    assert len(described.watched.differences) == 1
    assert described.plan.summary().startswith(
        "full on blocks 0, 2-3 and selective (save linear, attention) on block 1"
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_of_zero3_avoids_nothing_alone(ranks, monkeypatch, caplog):
    """The others would wait for it, because they would gather other parameters."""
    model = watched(on_mismatch="avoid")
    step(model, tiny_batch("llama"))
    monkeypatch.setattr(compat.distributed, "ranks_recompute_together", lambda model: True)
    monkeypatch.setattr(compat.distributed, "ranks", lambda: ranks)
    record = installation(model)
    record.watch._to_avoid.add("model.layers.1")
    record.watch.avoid(model, record)
    assert set(record.avoided) == ({"model.layers.1"} if ranks == 1 else set())
    assert ("under ZeRO-3, `on_mismatch: avoid` only reports" in caplog.text) == (ranks > 1)


@pytest.mark.long
def test_a_budget_measures_again_around_a_block_that_was_wrong():
    model = without_state(model_of(layers=LAYERS))
    batch = tiny_batch("llama", batch=16, tokens=64)
    planned(model, "full")
    planned(model, {"policy": "budget", "budget": f"{live_peak(model, batch) + 4096}B", "on_mismatch": "avoid"})

    def train(steps):
        for _ in range(steps):
            step(model, batch)
        return hf_ckpt.describe(model).plan.actions[1][1]

    before = train(25)
    record = installation(model)
    first = record.session
    record.watch._to_avoid.add("model.layers.1")
    after = train(25)
    expected = "keep" if before.kind == "selective" else "selective"
    assert after.kind == record.avoided["model.layers.1"].kind == expected
    assert record.session is not first
    assert hf_ckpt.describe(model).measuring is None


@pytest.mark.parametrize(("options", "checks"), [({}, [1]), ({"check_every": 0}, [])])
def test_a_short_run_is_checked_once(options, checks, tmp_path):
    run = trainer(tmp_path, **{f"{FLAG}_kwargs": {"policy": "full", **options}})
    run.train()
    watched = hf_ckpt.describe(run.model).watched
    assert ([watched.checks] if watched else []) == checks


def streams(block, hidden, shift):
    """Copy frozen weights into the tensor that the block computes with, as streaming from a disk does."""
    with torch.no_grad():
        block.frozen.weight.copy_(torch.eye(16))
    return work(block, block.frozen(hidden), shift)


def grows(block, hidden, shift):
    block.extra.append(0.5)
    return work(block, hidden, shift)


def normalises(block, hidden, shift):
    return work(block, block.extra(hidden), shift)


WRITES = {
    streams: (lambda: None, 1),
    grows: (list, 1),
    normalises: (lambda: torch.nn.BatchNorm1d(8), 2),
}
"""What blocks write in each run -> their part for that; and forwards before one backward."""


@pytest.mark.parametrize("whose", ["ours", "theirs"])
@pytest.mark.parametrize("writes", WRITES, ids=lambda writes: writes.__name__)
def test_what_blocks_write_is_a_difference_only_if_backward_is_given_other_values(writes, whose):
    (make, forwards), watch, found = WRITES[writes], WatchOfOthers("raise"), []
    for checkpointed in (False, True):
        calls = []
        model = custom_model(lambda *args, calls=calls: calls.append(1) or writes(*args))
        for layer in model.layers:
            layer.extra = make()
        if checkpointed and whose == "ours":
            planned(model, {"policy": "full", "check_every": 0})
        elif checkpointed:
            enable(model, {"use_reentrant": False})
        if checkpointed:
            watch.check_next(model)
        sum(custom_loss(model, number) for number in range(forwards)).backward()
        assert len(calls) == CUSTOM_LAYERS * forwards * (1 + checkpointed)
        found.append(gradients(model))
    assert_same(*found)
    assert watch.report().compared > 0
    assert not watch.differences


def test_only_tensors_that_can_differ_are_counted():
    """Not those that are the same memory on both sides, as with a function that recomputes and stores nothing."""
    model, watch = custom_model(), WatchOfOthers()

    def passes_on(run, *args):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return run(*args)

    model._set_gradient_checkpointing(True, passes_on)
    watch.check_next(model)
    custom_loss(model).backward()
    assert (watch.report().checks, watch.report().compared) == (1, 0)


@pytest.mark.long
def test_a_trainer_that_compiles_its_model_compiles_it_once(tmp_path):
    """The watch adds nothing to a compiled model's blocks."""
    found, counters = [], torch._dynamo.utils.counters
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 2}
    for every in (1, 0):
        torch._dynamo.reset()
        counters.clear()
        spec = {f"{FLAG}_kwargs": {"policy": "full", "check_every": every}}
        model = tiny_model("llama", layers=1)
        hf_ckpt.install(model)
        trainer(tmp_path, model, **spec, **compiled).train()
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
        found.append(counters["frames"]["ok"])
    assert found[0] == found[1]


# --- how much memory, and when -------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [None, 0, 3_000, 30_000, 1 << 30])
def test_a_check_keeps_to_its_room(room, monkeypatch, caplog):
    """A check uses no more memory than its room, by an exact count of the peak with and without it."""
    monkeypatch.setattr(watching, "spare_bytes", lambda devices: room)
    batch = tiny_batch("llama")
    peaks = {}
    for every in (0, 1):
        model = watched(check_every=every)
        step(model, batch)
        model.zero_grad(set_to_none=True)
        with LiveBytes(model, batch) as live:
            model(**without_cache(model, batch)).loss.backward()
        peaks[every] = live.peak_bytes
    found = hf_ckpt.describe(model).watched
    reasons = {None: "torch does not report how much memory the model leaves on cpu", 0: "the plan leaves no room"}
    assert [*found.not_checked.values()] == [reasons[room]] if room in reasons else not found.not_checked
    assert caplog.text.count("are not checked") == (room is None)
    room = room or 0
    assert peaks[1] - peaks[0] <= room
    assert (found.checks > 0) == (room > 0)
    assert peaks[1] > peaks[0] or room < 1 << 30


@each_policy
def test_a_graph_that_is_dropped_frees_everything(policy):
    """Dropping a step's graph frees its check: there is no reference cycle."""
    assert_frees_everything(watched(policy), tiny_batch("llama"))


def test_the_third_forward_and_every_n_th_one_after_it():
    """No check adds to the memory of the first two steps, which users measure."""
    model = watched(check_every=4)
    checked = []
    for number in range(11):
        if number == 8:
            planned(model, {"policy": "selective", "check_every": 4})
        step(model, tiny_batch("llama", seed=number))
        checked.append(hf_ckpt.describe(model).watched.checks)
        assert ("all equal" in str(hf_ckpt.describe(model))) == (checked[-1] > 0)
    assert checked == [0, 0, 1, 1, 1, 1, 2, 2, 0, 0, 1]


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ({"compile": "blocks"}, "compiled blocks"),
        ({"check_every": 1, "rules": [{"layers": "0", "policy": "none"}]}, "blocks under `keep`"),
    ],
)
def test_what_the_watch_cannot_check_it_names(spec, what, graphs, nothing_compiled):
    model = planned(tiny_model("llama", layers=1), spec)
    for _ in range(3):
        step(model, tiny_batch("llama"))
    watched = hf_ckpt.describe(model).watched
    assert watched.checks == 0
    assert [*watched.not_checked] == [what]


def test_what_was_checked_later_is_not_named(monkeypatch):
    model = watched(check_every=1)
    with monkeypatch.context() as patch:
        patch.setattr("hf_ckpt.training.watch.spare_bytes", lambda devices: 0)
        step(model, tiny_batch("llama"))
    assert hf_ckpt.describe(model).watched.not_checked
    step(model, tiny_batch("llama"))
    assert not hf_ckpt.describe(model).watched.not_checked


def test_nothing_is_checked_in_a_cuda_graph(monkeypatch):
    """Nothing is checked during CUDA graph capture, because a check waits for the device; the next forward is."""
    model = planned(
        tiny_model("llama", layers=LAYERS), {"policy": "full", "check_every": 100, "preserve_rng_state": False}
    )
    checks = []
    for captures in (True, True, False, False):
        monkeypatch.setattr(compat.devices, "is_capturing", lambda captures=captures: captures)
        step(model, tiny_batch("llama"))
        checks.append(hf_ckpt.describe(model).watched.checks)
    assert checks == [0, 0, 1, 1]


def test_a_trained_block_may_use_none_of_its_parameters():
    """Missing gradients of unused parameters are not a difference: without checkpointing they are missing, too."""
    model = custom_model().requires_grad_(False)
    for layer in model.layers:
        layer.expert = torch.nn.Linear(16, 16)  # unused
    model.last.requires_grad_(True)
    planned(model, {"policy": "full", "check_every": 1, "on_mismatch": "raise"})
    custom_loss(model).backward()
    assert model.last.weight.grad.any()
    assert not hf_ckpt.describe(model).watched.differences


@pytest.mark.parametrize("factor", [1.0, 1.5], ids=["moved", "changed"])
def test_parameters_that_are_moved_are_no_difference(factor):
    """Moving parameters between forward and backward, as weight offloading does, is not a difference."""
    model, watch = custom_model(), WatchOfOthers()
    enable(model, {"use_reentrant": False})
    watch.check_next(model)
    loss = custom_loss(model, 0)
    for parameter in model.parameters():
        parameter.data = parameter.data * factor
    loss.backward()
    assert watch.report().checks == 1
    assert bool(watch.differences) == (factor > 1)


# --- nothing is changed --------------------------------------------------------------------------------------------


def has_check(model):
    return any(isinstance(value, Check) for module in model.modules() for value in vars(module).values())


@each_policy
def test_a_model_is_copied_and_taken_off_while_a_check_is_pending(policy):
    """A model can be copied, pickled and uninstalled with a check pending, before or after the block's forward."""
    model = watched(policy)
    keys = list(model.state_dict())
    raises = model.model.embed_tokens.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, tiny_batch("llama"))
    raises.remove()
    assert has_check(model)
    assert hf_ckpt.describe(model).plan.actions  # looks for lost blocks
    assert list(model.state_dict()) == keys
    batch = tiny_batch("llama")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not has_check(copied)
        assert_same(step(watched(policy), batch), step(copied, batch))
        assert hf_ckpt.describe(copied).watched.checks == 1
    loss = model(**without_cache(model, batch)).loss  # the pending check is undone, and the next block is checked
    assert not has_check(model)
    copy.deepcopy(model), pickle.dumps(model)
    hf_ckpt.uninstall(model)
    loss.backward()
    assert installation(model) is None
    assert not any(FUNCTION in vars(module) for module in model.modules())
    assert_same(step(tiny_model("llama", layers=LAYERS, dropout=0.1), batch), step(model, batch))


def loss_of(model, seed):
    torch.manual_seed(seed)
    return model(**without_cache(model, tiny_batch("llama", seed=seed))).loss


def one_step(model):
    loss_of(model, 0).backward()


def backward_in_another_order(model):
    losses = [loss_of(model, 0), loss_of(model, 1)]
    losses[0].backward()
    losses[1].backward()


def keeps_its_graph(model):
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    loss.backward()


def asks_for_gradients(model):
    loss = loss_of(model, 0)
    weights = [model.lm_head.weight, model.model.layers[0].mlp.up_proj.weight]
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient


def fails_in_forward(model):
    handle = model.model.layers[2].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 0).backward()
    handle.remove()
    loss_of(model, 1).backward()


def fails_in_backward(model):
    handle = model.model.layers[1].register_forward_hook(
        lambda module, args, output: output.register_hook(lambda gradient: 1 / 0) and None
    )
    loss = loss_of(model, 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    model.zero_grad(set_to_none=True)
    loss_of(model, 1).backward()


STEPS = {
    one_step: 1,
    backward_in_another_order: 2,
    keeps_its_graph: 1,
    asks_for_gradients: 1,
    fails_in_forward: 1,
    fails_in_backward: 1,
}
"""A step -> number of checks that end in it."""


def random_state():
    state = numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), state[1].tobytes(), state[2]


@each_policy
@pytest.mark.parametrize("run", STEPS, ids=lambda run: run.__name__)
def test_a_watched_run_is_the_same_run(policy, run):
    """The same gradients and random state, whatever a step does."""
    plain, model = tiny_model("llama", layers=LAYERS, dropout=0.1), watched(policy)
    times = LAYERS + 1 if run is one_step else 2  # so that the first block has its turn again
    for _ in range(times):
        states = []
        for each in (plain, model):
            each.zero_grad(set_to_none=True)
            run(each)
            states.append(random_state())
        assert_same(gradients(plain), gradients(model))
        assert states[0] == states[1]
    report = hf_ckpt.describe(model).watched
    assert not report.differences
    assert report.checks == times * STEPS[run]
    assert report.compared > 0
