"""The watch: how it reacts to differences, how much memory it uses, and that it changes nothing else."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import random

import numpy
import pytest
import torch
from helpers.museum import ExhibitBlock, ExhibitConfig, ExhibitModel, exhibit_loss, exhibit_model, work
from helpers.steps import assert_frees_everything, assert_same, enable, gradients, outcome, step, without_cache
from helpers.trainers import FLAG, metrics, trainer

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.attach import exchange, put_check
from hf_ckpt.attach.record import FUNCTION, installation
from hf_ckpt.engines.check import Check
from hf_ckpt.engines.rebuild import masks
from hf_ckpt.errors import MismatchError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.actions import KEEP, SELECTIVE
from hf_ckpt.training import watch as watching
from hf_ckpt.training.callback import MemoryTimeCallback
from hf_ckpt.training.watch import Watch

LAYERS = 4
POLICIES = {
    "full": {"policy": "full"},
    "selective": {"policy": "selective"},
    "full+selective": {"policy": "full+selective"},
    "segments": {"policy": "full", "segments": 2},
}
each_policy = pytest.mark.parametrize("policy", POLICIES)


def watched(policy="full", **spec):
    """A small model with dropout; every step is checked."""
    model = tiny_model("llama", layers=LAYERS, dropout=0.1)
    hf_ckpt.install(model, {**POLICIES[policy], "check_every": 1, **spec})
    enable(model)
    return model


def differences(model):
    return installation(model).watch.differences


def masks_of_ones(patch):
    """Plant a fault in `selective`: rebuilt results lack dropout."""
    unpack = masks.unpack
    patch.setattr(masks, "unpack", lambda *args, **options: torch.ones_like(unpack(*args, **options)))


# --- differences ---------------------------------------------------------------------------------------------------

OURS = {f"{FLAG}_kwargs": {"policy": "selective", "check_every": 1, "on_mismatch": "raise"}}
THEIRS = {f"{FLAG}_kwargs": {"use_reentrant": False, "preserve_rng_state": False}}


def faulty_trainer(folder, monkeypatch, whose, on_mismatch):
    model = tiny_model("llama", layers=LAYERS, dropout=0.1)
    callback = MemoryTimeCallback(summary=False, check_every=1, on_mismatch=on_mismatch)
    if whose == "theirs":
        return trainer(folder, model, callbacks=[callback], **THEIRS)
    masks_of_ones(monkeypatch)
    hf_ckpt.install(model)
    spec = {**OURS[f"{FLAG}_kwargs"], "on_mismatch": on_mismatch}
    return trainer(folder, model, callbacks=[callback], **{f"{FLAG}_kwargs": spec})


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_an_error_comes_before_the_optimizer(whose, tmp_path, monkeypatch):
    training = faulty_trainer(tmp_path, monkeypatch, whose, "raise")
    before = {name: value.clone() for name, value in training.model.named_parameters()}
    with pytest.raises(MismatchError, match="and no optimizer has used them yet: in `model") as raised:
        training.train()
    assert raised.value.block == "model.layers.0"
    assert training.state.global_step == 0
    assert all(torch.equal(value, before[name]) for name, value in training.model.named_parameters())


@pytest.mark.parametrize(("whose", "found"), [("ours", [1, 0, 0, 0]), ("theirs", [1, 1, 1, 1])])
def test_differences_are_logged(whose, found, tmp_path, monkeypatch, caplog):
    """Differences are logged; hf_ckpt's own blocks then switch to another action, so later steps have none."""
    training = faulty_trainer(tmp_path, monkeypatch, whose, "warn")
    training.train()
    assert [row["ckpt/mismatch"] for row in metrics(tmp_path)] == found
    assert [row["ckpt/mismatch"] for row in training.state.log_history[:4]] == found
    assert metrics(tmp_path, "end")[0]["ckpt/mismatch"] == sum(found)
    warned = [record for record in caplog.records if "gradients of this step are wrong" in record.message]
    assert len(warned) == 1  # one warning for all blocks of the class


def test_a_run_without_differences_logs_none(tmp_path):
    trainer(tmp_path / "on", callbacks=[MemoryTimeCallback(summary=False)]).train()
    logged = [row.get("ckpt/mismatch") for row in metrics(tmp_path / "on")]
    assert logged == [None, None, 0, 0]  # the third forward is the first to be checked
    off = {f"{FLAG}_kwargs": {"policy": "full", "check_every": 0}}
    trainer(tmp_path / "off", callbacks=[MemoryTimeCallback(summary=False)], **off).train()
    assert all("ckpt/mismatch" not in row for row in metrics(tmp_path / "off"))


def compiled_frames(folder, check_every):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    callback = MemoryTimeCallback(summary=False, check_every=check_every)
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    training = trainer(folder, tiny_model("llama", layers=LAYERS), callbacks=[callback], **THEIRS, **compiled)
    training.train()
    counters = torch._dynamo.utils.counters
    return counters["frames"]["ok"], counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def test_a_trainer_that_compiles_its_model_compiles_it_once(tmp_path):
    """The watch adds nothing to a compiled model's blocks, so the Trainer still compiles it once."""
    frames, graphs, breaks = compiled_frames(tmp_path / "on", 1)
    assert (frames, graphs, breaks) == compiled_frames(tmp_path / "off", 0)
    assert graphs == 1
    assert not breaks


def plain_steps(model, batches):
    return [step(model, batch) for batch in batches]


def draws_from_python(block, hidden, shift):
    return work(block, hidden * (1 + random.random()), shift)


def exhibit_step(model, number):
    model.zero_grad(set_to_none=True)
    random.seed(number)
    loss = exhibit_loss(model, number)
    loss.backward()
    return outcome(model, loss)


@pytest.mark.parametrize(
    ("room", "action"), [(1 << 30, "selective (save linear, attention)"), (1, "full")], ids=["room", "no room"]
)
def test_after_a_difference_under_full(room, action, monkeypatch, caplog):
    """After a difference in one block, all blocks of its class change their action, if there is room."""
    monkeypatch.setattr(compat.random_state.RandomState, "restored", lambda state: contextlib.nullcontext())
    expected = [exhibit_step(exhibit_model(fault=draws_from_python), number) for number in range(5)]
    model = exhibit_model(fault=draws_from_python)
    hf_ckpt.install(model, {"policy": "full", "check_every": 1})
    enable(model)
    got = [exhibit_step(model, number) for number in range(2)]
    assert [found.block for found in differences(model)] == ["layers.1"]
    monkeypatch.setattr(watching, "_room_bytes", lambda *args: room)
    got += [exhibit_step(model, number) for number in range(2, 5)]
    right = [all(torch.equal(one[name], other[name]) for name in one) for one, other in zip(expected, got, strict=True)]
    description = hf_ckpt.describe(model)
    assert {str(planned) for _, planned in description.plan.actions} == {action}
    if room > 1:
        assert right == [False, False, True, True, True]
        assert len(differences(model)) == 1
        assert "3 blocks of this class run under `selective" in caplog.text
    else:
        assert not any(right)
        assert "no room for another action" in str(description)


def test_after_a_difference_under_selective(monkeypatch):
    masks_of_ones(monkeypatch)
    batches = [tiny_batch("llama", seed=number) for number in range(LAYERS)]
    expected = plain_steps(tiny_model("llama", layers=LAYERS, dropout=0.1), batches)
    model = watched("selective")
    got = plain_steps(model, batches)
    assert len(differences(model)) == 1
    with pytest.raises(AssertionError, match="differs"):
        assert_same(expected[0], got[0])
    for one, other in zip(expected[1:], got[1:], strict=True):
        assert_same(one, other)
    assert hf_ckpt.describe(model).plan.summary() == "full on all 4 blocks"


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_chunks_are_compared_within_rounding(precision, monkeypatch):
    """Chunks may differ by rounding only: an error of 2 % is found in float32, and one of 50 % in every dtype."""

    def differences_of(factor):
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        model = tiny_model("llama", layers=LAYERS, dtype=dtype)
        hf_ckpt.install(model, {"policy": "full", "check_every": 1, "head": 8})
        enable(model)
        compare = watching.Watch._compare_head
        with monkeypatch.context() as patch:
            patch.setattr(Watch, "_compare_head", lambda *args: compare(*args[:-1], args[-1] * factor))
            for number in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
                    loss = model(**without_cache(model, tiny_batch("llama", seed=number))).loss
                loss.backward()
        assert hf_ckpt.describe(model).watched.checks == 4  # a block and chunks, in two steps
        return [found.block for found in differences(model)]

    assert differences_of(1.0) == []
    assert differences_of(1.5) == ["head in chunks"] * 2
    assert differences_of(1.02) == (["head in chunks"] * 2 if precision == "float32" else [])


class TwoResultsBlock(ExhibitBlock):
    """A block that updates buffers and also returns a result for a second loss."""

    def __init__(self):
        super().__init__()
        self.extra = torch.nn.BatchNorm1d(8)

    def forward(self, hidden_states, shift=None):
        return hidden_states + self.work(self, self.extra(hidden_states), shift), hidden_states.square().mean()


class TwoResultsModel(ExhibitModel):
    def __init__(self, config):
        super().__init__(config)
        self.layers = torch.nn.ModuleList(TwoResultsBlock() for _ in range(3))

    def forward(self, hidden_states, shift):
        hidden_states, beside = self.first(hidden_states), 0
        for layer in self.layers:
            hidden_states, more = layer(hidden_states, shift=shift)
            beside = beside + more
        return self.last(hidden_states), beside


@pytest.mark.parametrize("case", ["both losses", "one loss after the other", "the second run fails"])
def test_a_compiled_block_is_compared_and_left_alone(case, monkeypatch):
    """A compiled block is compared but not changed: with two results, two backwards, or no memory for a second run."""
    found = {}
    for every in (0, 1):
        torch.manual_seed(0)
        model = TwoResultsModel(ExhibitConfig()).train()
        hf_ckpt.install(model, {"policy": "full", "compile": "blocks", "check_every": every})
        enable(model)
        if case == "the second run fails":
            monkeypatch.setattr(torch.autograd, "grad", fails)
        for _ in range(3):
            results, beside = model(torch.randn(2, 8, 16), torch.linspace(-1, 1, 16))
            losses = results.square().mean(), 3 * beside
            if case == "one loss after the other":
                losses[0].backward(retain_graph=True)
                losses[1].backward()
            else:
                sum(losses).backward()
        found[every] = {**gradients(model), **{name: value.clone() for name, value in model.named_buffers()}}
    assert_same(found[0], found[1])
    assert hf_ckpt.describe(model).in_graphs
    watched = hf_ckpt.describe(model).watched
    assert not watched.differences
    assert watched.checks == 3
    assert (watched.compared, watched.left_out) == {"the second run fails": (0, 9)}.get(
        case, (6, 0) if case == "one loss after the other" else (9, 0)
    )


def fails(*args, **options):
    raise torch.OutOfMemoryError("out of memory")


# --- how much memory, and when -------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 3_000, 30_000, 1 << 30])
def test_a_check_keeps_to_its_room(room, monkeypatch):
    """A check uses no more memory than its room, by an exact count of the peak with and without it."""
    monkeypatch.setattr(watching, "_room_bytes", lambda *args: room)
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
    assert peaks[1] - peaks[0] <= room
    assert (found.checks > 0) == (room > 0)
    assert (found.left_out > 0) == (0 < room < 1 << 30)
    assert bool(found.not_checked) == (room == 0)
    assert peaks[1] > peaks[0] or room < 1 << 30


@each_policy
def test_a_graph_that_is_dropped_frees_everything(policy):
    """Dropping a step's graph frees its check: there is no reference cycle."""
    assert_frees_everything(watched(policy), tiny_batch("llama"))


def test_every_n_th_forward_and_the_third_of_every_plan():
    """No check adds to the memory of the first two steps, which users measure."""
    model = watched(check_every=4)
    checked = []
    for number in range(11):
        if number == 8:
            hf_ckpt.install(model, {**POLICIES["selective"], "check_every": 4})
            enable(model)
        step(model, tiny_batch("llama", seed=number))
        checked.append(hf_ckpt.describe(model).watched.checks)
        assert ("all equal" in str(hf_ckpt.describe(model))) == (checked[-1] > 0)
    assert checked == [0, 0, 1, 1, 1, 1, 2, 2, 0, 0, 1]


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_are_checked(twin):
    model = twin(watched())
    step(model, tiny_batch("llama"))
    assert hf_ckpt.describe(model).watched.checks == 1


def test_where_nothing_can_be_compared_the_watch_says_so():
    model = watched("full", rules=[{"layers": "0-", "policy": "none"}])
    step(model, tiny_batch("llama"))
    text = str(hf_ckpt.describe(model))
    assert "watched: no checks so far" in text
    assert "not checked: blocks under `keep`" in text


@pytest.mark.parametrize("budget", ["5MiB", "1GiB"])
def test_the_plan_of_a_session_is_checked_in_its_third_forward(budget, monkeypatch):
    """Steps that measure actions are not checked. The third forward under the first plan is, if it recomputes."""
    monkeypatch.setattr(watching, "_room_bytes", lambda *args: 1 << 30)
    model = tiny_model("llama", layers=LAYERS)
    hf_ckpt.install(model, {"policy": "budget", "budget": budget})
    enable(model)
    under_the_plan, checks = 0, []
    while under_the_plan < 4:
        step(model, tiny_batch("llama", batch=8, tokens=64))
        under_the_plan += not installation(model).planned.measures
        checks.append(hf_ckpt.describe(model).watched.checks)
        assert len(checks) < 40
    recomputes = budget == "5MiB"
    assert checks[-4:] == [0, 0, recomputes, recomputes]
    assert bool(hf_ckpt.describe(model).watched.not_checked) != recomputes


@pytest.mark.parametrize("fault", [False, True], ids=["right", "wrong"])
def test_plans_that_take_turns(fault, monkeypatch, caplog):
    """Plans that alternate, as under a budget, are each checked, and lose actions that differed."""
    if fault:
        masks_of_ones(monkeypatch)
    model = watched("selective", check_every=1000)
    record = installation(model)
    blocks = [block for block, _ in record.plan.actions]
    plans = [
        dataclasses.replace(record.plan, actions=tuple(zip(blocks, actions, strict=True)))
        for actions in ([SELECTIVE] * LAYERS, [KEEP] + [SELECTIVE] * (LAYERS - 1))
    ]
    for number in range(10):
        exchange(model, record, plans[number % 2])
        step(model, tiny_batch("llama", seed=number))
    assert [action.kind for _, action in record.plan.actions] == ["keep"] + ["full" if fault else "selective"] * 3
    assert len(differences(model)) == fault
    # The third forward of all is checked, and the third of each plan. Without the faulty action, they are new plans.
    assert hf_ckpt.describe(model).watched.checks == 3
    assert sum("from now on" in found.message for found in caplog.records) == (2 if fault else 0)


def test_blocks_without_gradients_are_looked_for_once(monkeypatch):
    """If only the head trains, blocks save nothing: after one look at each, only every n-th forward looks again."""
    model = watched(check_every=20)
    model.model.requires_grad_(False)
    turns = []
    monkeypatch.setattr(
        watching, "put_check", lambda *args, **options: turns.append(args[2]) or put_check(*args, **options)
    )
    for number in range(24):
        step(model, tiny_batch("llama", seed=number))
    assert turns == [f"model.layers.{number % LAYERS}" for number in range(LAYERS + 1)]


def test_a_nested_tensor_is_left_out():
    """Nested tensors are left out: their layout claims to be strided, but they have no shape."""

    def nests(block, hidden, shift):
        return torch.nested.to_padded_tensor(block.one(torch.nested.as_nested_tensor(list(hidden))), 0.0)

    plain, model = exhibit_model(0, nests), exhibit_model(0, nests)
    hf_ckpt.install(model, {"policy": "full", "check_every": 1, "determinism_check": "none"})
    enable(model)
    assert_same(exhibit_step(plain, 0), exhibit_step(model, 0))
    watched = hf_ckpt.describe(model).watched
    assert watched.left_out > 0
    assert watched.checks == 1


def test_nothing_is_checked_in_a_cuda_graph(monkeypatch):
    """Nothing is checked during CUDA graph capture, because a check waits for the device; the next forward is."""
    model = tiny_model("llama", layers=LAYERS)
    hf_ckpt.install(model, {"policy": "full", "check_every": 100, "preserve_rng_state": False})
    enable(model)
    checks = []
    for captures in (True, True, False, False):
        monkeypatch.setattr(compat.devices, "is_capturing", lambda captures=captures: captures)
        step(model, tiny_batch("llama"))
        checks.append(hf_ckpt.describe(model).watched.checks)
    assert checks == [0, 0, 1, 1]


def test_a_trained_block_may_use_none_of_its_parameters():
    """Missing gradients of unused parameters are not a difference: without checkpointing they are missing, too."""
    model = exhibit_model().requires_grad_(False)
    for layer in model.layers:
        layer.expert = torch.nn.Linear(16, 16)  # unused
    model.last.requires_grad_(True)
    hf_ckpt.install(model, {"policy": "full", "check_every": 1, "on_mismatch": "raise"})
    enable(model)
    assert exhibit_step(model, 0)["last.weight"].any()
    assert not differences(model)


@pytest.mark.parametrize("factor", [1.0, 1.5], ids=["moved", "changed"])
def test_parameters_that_are_moved_are_no_difference(factor):
    """Moving parameters between forward and backward, as weight offloading does, is not a difference."""
    model, watch = exhibit_model(), Watch(1)
    enable(model, {"use_reentrant": False})
    watch.on_forward(model, None)
    loss = exhibit_loss(model, 0)
    for parameter in model.parameters():
        parameter.data = parameter.data * factor
    loss.backward()
    assert watch.report().checks == 1
    assert bool(watch.differences) == (factor > 1)
    assert all(found.operation == "parameter" for found in watch.differences)


# --- nothing is changed --------------------------------------------------------------------------------------------


def random_state():
    state = numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), state[1].tobytes(), state[2]


@each_policy
def test_a_watched_run_is_the_same_run(policy):
    found = {}
    for every in (0, 1):
        model = watched(policy, check_every=every)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(1)
        steps = []
        for number in range(LAYERS + 1):
            model.zero_grad(set_to_none=True)
            loss = model(**without_cache(model, tiny_batch("llama", seed=number))).loss
            loss.backward()
            steps.append((outcome(model, loss), random_state()))
            optimizer.step()
        found[every] = steps, model.state_dict()
    assert hf_ckpt.describe(model).watched.checks == LAYERS + 1
    for (one, state), (other, other_state) in zip(found[0][0], found[1][0], strict=True):
        assert_same(one, other)
        assert state == other_state
    assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_run_with_differences_is_the_same_wrong_run(whose, monkeypatch):
    """Finding the cause changes no gradients, buffers or random state."""

    def draws(block, hidden, shift):
        shift = shift + torch.rand(16) + torch.from_numpy(numpy.random.rand(16)) + random.random()
        return work(block, block.extra(hidden), shift.float())

    monkeypatch.setattr(compat.random_state.RandomState, "restored", lambda state: contextlib.nullcontext())
    found = {}
    for every in (0, 1):
        model = exhibit_model(fault=draws)
        model.layers[1].extra = torch.nn.BatchNorm1d(8)
        watch = Watch(1)
        if whose == "ours":
            hf_ckpt.install(model, {"policy": "full", "check_every": every})
            enable(model)
        else:
            enable(model, {"use_reentrant": False})
        numpy.random.seed(0)
        steps = []
        for number in range(2):  # up to the first difference
            if whose == "theirs" and every:
                watch.on_forward(model, None)
            steps.append((exhibit_step(model, number), random_state()))
        found[every] = steps, model.state_dict()
    assert len(watch.differences if whose == "theirs" else differences(model)) == 1
    for (one, state), (other, other_state) in zip(found[0][0], found[1][0], strict=True):
        assert_same(one, other)
        assert state == other_state
    assert_same(found[0][1], found[1][1])


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
    loss = model(**without_cache(model, batch)).loss  # the pending check is undone, and the next block is checked
    assert not has_check(model)
    copy.deepcopy(model), pickle.dumps(model)
    hf_ckpt.uninstall(model)
    loss.backward()
    assert installation(model) is None
    assert not any(FUNCTION in vars(module) for module in model.modules())
    assert_same(step(tiny_model("llama", layers=LAYERS, dropout=0.1), batch), step(model, batch))


# --- steps of other shapes -----------------------------------------------------------------------------------------


def loss_of(model, seed):
    torch.manual_seed(seed)
    return model(**without_cache(model, tiny_batch("llama", seed=seed))).loss


def accumulates(model):
    for seed in range(3):
        loss_of(model, seed).backward()


def two_forwards_and_one_backward(model):
    (loss_of(model, 0) + 2 * loss_of(model, 1)).backward()


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


def evaluates_between(model):
    loss = loss_of(model, 0)
    with torch.no_grad():
        loss_of(model, 1)
    loss.backward()


def drops_a_graph(model):
    loss_of(model, 0)
    loss_of(model, 1).backward()


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


def looks_at_its_graph(model):
    """Read what autograd saved, as torchviz does."""
    loss = loss_of(model, 0)
    nodes = {loss.grad_fn: None}
    for node in (ahead := list(nodes)):
        for name in dir(node):
            if name.startswith("_saved_"):
                getattr(node, name)
        below = [node for node, _ in node.next_functions if node is not None and node not in nodes]
        nodes.update(dict.fromkeys(below))
        ahead += dict.fromkeys(below)
    loss.backward()


STEPS = {
    accumulates: 3,
    two_forwards_and_one_backward: 2,
    backward_in_another_order: 2,
    keeps_its_graph: 1,
    asks_for_gradients: 1,
    evaluates_between: 1,
    drops_a_graph: 1,
    fails_in_forward: 1,
    fails_in_backward: 1,
    looks_at_its_graph: 1,
}
"""A step -> number of checks that end in it."""


@each_policy
@pytest.mark.parametrize("run", STEPS, ids=lambda run: run.__name__)
def test_steps_of_every_shape(policy, run):
    plain, model = tiny_model("llama", layers=LAYERS, dropout=0.1), watched(policy)
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad(set_to_none=True)
            run(each)
        assert_same(gradients(plain), gradients(model))
    report = hf_ckpt.describe(model).watched
    assert not report.differences
    assert report.checks == 2 * STEPS[run]
    assert report.compared > 0
