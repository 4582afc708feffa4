"""What a recomputation finds, and what a forward leaves, row by row: restored, or refused by name.

`docs/faq.md` lists the same three kinds of rows: what is restored, what is refused, and what only the watch finds.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import threading
import types
import weakref

import numpy
import pytest
import torch
from helpers.custom import LAYERS, custom_loss, custom_model, work
from helpers.steps import assert_same, outcome, planned
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.errors import ChangedBlockError, HfCkptError, InPlaceError, MismatchError

ENGINES = {
    "full": {"policy": "full"},
    "full+selective": {"policy": "full+selective", "save": ["attention"]},
    "segments": {"segments": 2},
    "offload": {"policy": "offload"},
}
STEPS = 4
on_a_device = pytest.param("offload", marks=pytest.mark.thorough)  # on a CPU, it is `full`
each_engine = pytest.mark.parametrize("engine", ["full", "full+selective", "segments", on_a_device])


def plans(spec):
    """Two functions that prepare a model: one leaves it as it is, and the other enables a plan."""
    return (lambda model: model), (lambda model: planned(model, spec))


def scaled(block, hidden, factor):
    """The output of a block that depends on a factor, in its loss and in its gradients."""
    return work(block, hidden * factor, None)


# --- what a forward changes in its block ------------------------------------------------------------------------------


def replaces_a_tensor(block, hidden, shift):
    block.load = getattr(block, "load", torch.ones(16)) + hidden.detach().abs().mean((0, 1))
    return scaled(block, hidden, block.load)


def keeps_a_graph(block, hidden, shift):
    output = scaled(block, hidden, 1.0 if getattr(block, "last", None) is None else block.last.detach())
    block.last = output
    return output


def adds_to_a_list(block, hidden, shift):
    block.history.append(float(hidden.detach().mean()))
    return scaled(block, hidden, len(block.history) + block.history[-1])


def fills_a_dict(block, hidden, shift):
    block.counts["calls"] = [*block.counts.get("calls", []), 1]
    return scaled(block, hidden, 1 + sum(block.counts["calls"]))


def counts_in_an_array(block, hidden, shift):
    block.numbers += 1
    return scaled(block, hidden, float(block.numbers.sum()))


def makes_a_counter(block, hidden, shift):
    block.calls = getattr(block, "calls", 0) + 1
    return scaled(block, hidden, 1 + block.calls)


def sees_a_maximum(block, hidden, shift):
    """A running maximum that the first steps write with the value that it had."""
    block.number.add_(1)
    block.largest.copy_(torch.maximum(block.largest, hidden.detach().abs().max() * block.number))
    return scaled(block, hidden, 1.0 + block.largest.clone())


def warms_up(block, hidden, shift):
    """A moving average that begins in the third forward. Nothing else of the block says so: its settings stay."""
    block.number.add_(1)
    output = scaled(block, hidden, 1 + block.average.clone())
    if block.number > 2:
        block.average.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
    return output


def replaces_a_buffer(block, hidden, shift):
    output = scaled(block, hidden, block.average)
    block.average = 0.9 * block.average + hidden.detach().mean((0, 1))
    return output


def parametrizes(block, hidden, names):
    """What PEFT does for LoRA on parameters: each forward registers them anew, here two of one shape."""
    for name in names:
        parametrize.register_parametrization(block.norm, name, nn.Tanh(), unsafe=True)
    try:  # torch ends a recomputation by an exception
        return work(block, hidden, None)
    finally:
        for name in names:
            parametrize.remove_parametrizations(block.norm, name, leave_parametrized=False)


def parametrizes_weight_first(block, hidden, shift):
    return parametrizes(block, hidden, ("weight", "bias"))


def parametrizes_bias_first(block, hidden, shift):
    return parametrizes(block, hidden, ("bias", "weight"))


def with_attributes(block):
    block.history, block.counts, block.numbers = [], {}, numpy.zeros(2)
    block.register_buffer("number", torch.zeros(()))
    block.register_buffer("largest", torch.tensor(12.0))
    block.register_buffer("average", torch.zeros(16))


WRITES = (
    replaces_a_tensor,
    keeps_a_graph,
    adds_to_a_list,
    fills_a_dict,
    counts_in_an_array,
    makes_a_counter,
    sees_a_maximum,
    warms_up,
    replaces_a_buffer,
    parametrizes_weight_first,
    parametrizes_bias_first,
)


def left_in(model):
    """What the blocks hold after the steps: numbers, tensors, and the length of lists."""
    names = ("load", "history", "counts", "numbers", "calls", "largest", "average", "number")
    return [{name: str(getattr(block, name, None)) for name in names} for block in model.layers]


@each_engine
@pytest.mark.parametrize("run", WRITES, ids=lambda run: run.__name__)
@pytest.mark.trap(63)
@pytest.mark.trap(65)
def test_what_a_forward_changes_in_its_block_changes_once(run, engine):
    """Two forwards before each backward: the recomputation of each starts from what that forward found."""
    found = []
    for plan in plans(ENGINES[engine]):
        model = custom_model(run)
        for block in model.layers:
            with_attributes(block)
        plan(model)
        outcomes = []
        for number in range(STEPS):
            model.zero_grad(set_to_none=True)
            loss = custom_loss(model, number) + custom_loss(model, number + 1)
            loss.backward()
            outcomes.append(outcome(model, loss))
        found.append((outcomes, left_in(model)))
    (expected, left), (got, left_by_ours) = found
    for one, other in zip(expected, got, strict=True):
        assert_same(one, other)
    assert left_by_ours == left
    counts = hf_ckpt.describe(model).recomputed
    assert len(counts) == LAYERS
    assert min(counts.values()) >= 2 * STEPS


WRITES_NOW = threading.Event()


def test_graphs_of_earlier_forwards_are_freed():
    """A block keeps its output, graph and all. The next forward records it without the graph: no chain of forwards."""
    model, graphs = planned(custom_model(keeps_a_graph), "full"), []
    for number in range(4):
        custom_loss(model, number)
        graphs.append(weakref.ref(model.layers[0].last))
    assert [graph() is not None for graph in graphs] == [False, False, False, True]


def begins_late(block, hidden, shift):
    """A table too large to be copied before every forward, which only later forwards write."""
    output = scaled(block, hidden, 1 + block.table[0, 0])
    if WRITES_NOW.is_set():
        block.table.fill_(1)
    return output


@each_engine
@pytest.mark.parametrize("table", ["a buffer", "a mask", "a tensor in an attribute"])
def test_a_large_table_that_the_first_forward_did_not_write_is_refused(table, engine):
    """Its values before that forward are gone."""
    model = custom_model(begins_late)
    for block in model.layers:
        large = torch.zeros(300, 300, dtype=torch.bool if table == "a mask" else torch.float32)
        if table == "a tensor in an attribute":
            block.table = large
        else:
            block.register_buffer("table", large)
    planned(model, ENGINES[engine])
    WRITES_NOW.clear()
    custom_loss(model).backward()
    WRITES_NOW.set()
    loss = custom_loss(model)
    with pytest.raises(ChangedBlockError, match=r"block 'layers\.\d': `table` was overwritten"):
        loss.backward()
    assert min(hf_ckpt.describe(model).recomputed.values()) >= 1


def test_a_large_table_is_copied_once_a_forward_has_written_it():
    """The forward that is the first to write it has no backward here."""
    found = []
    for plan in plans("full"):
        model = custom_model(begins_late)
        for block in model.layers:
            block.register_buffer("table", torch.zeros(300, 300))
        plan(model)
        WRITES_NOW.clear()
        custom_loss(model).backward()
        WRITES_NOW.set()
        custom_loss(model)
        for block in model.layers:
            block.table.zero_()
        model.zero_grad(set_to_none=True)
        loss = custom_loss(model)
        loss.backward()
        found.append(outcome(model, loss))
    assert_same(*found)
    assert min(hf_ckpt.describe(model).recomputed.values()) == 2


class Counts:
    calls = 0


THREAD = threading.local()


def counts_in_an_object(block, hidden, shift):
    block.counter.calls += 1
    return scaled(block, hidden, float(block.counter.calls))


def counts_in_a_thread(block, hidden, shift):
    THREAD.calls = getattr(THREAD, "calls", 0) + 1
    return scaled(block, hidden, float(THREAD.calls))


@pytest.mark.parametrize("run", [counts_in_an_object, counts_in_a_thread])
def test_what_is_not_restored_is_found_by_the_watch(run):
    """It checks the first block in the first forward here, and in the third by default."""
    model = custom_model(run)
    for block in model.layers:
        block.counter = Counts()
    planned(model, {"policy": "full", "check_every": 1, "on_mismatch": "raise"})
    with pytest.raises(MismatchError, match=r"in `layers\.0.*`selective` runs no block twice"):
        custom_loss(model).backward()


# --- what is changed between two forwards, or before backward ---------------------------------------------------------


class Shape(enum.Enum):
    NARROW = 1.5
    WIDE = 2.5


def reads_an_attribute(block, hidden, shift):
    factor = getattr(block, "factor", 3.0)
    if factor is None:
        factor = 1.0
    if isinstance(factor, (tuple, list)):
        factor = factor[0]
    if isinstance(factor, dict):
        factor = factor["value"]
    if isinstance(factor, Shape):
        factor = factor.value
    return scaled(block, hidden, factor() if callable(factor) else factor)


SECOND = {
    "none to a number": (None, 2.0),
    "a tuple": ((1.0,), (2.0,)),
    "a list": ([1.0], [2.0]),
    "a numpy scalar": (numpy.float32(1.0), numpy.float32(2.0)),
    "a tensor": (torch.ones(16), torch.full((16,), 2.0)),
    "a dict": ({"value": 1.0}, {"value": 2.0}),
    "a dict of tensors": ({"value": torch.ones(16)}, {"value": torch.zeros(16)}),
    "an enum": (Shape.NARROW, Shape.WIDE),
    "a function": (lambda: 1.0, lambda: 2.0),
}
"""An attribute of a block -> its values in the first and in the second forward."""


@each_engine
@pytest.mark.parametrize("name", SECOND)
def test_each_forward_has_the_attributes_that_it_had(name, engine):
    """The attribute changes between two forwards, and is gone when their backward runs."""
    found = []
    for plan in plans(ENGINES[engine]):
        model, losses = custom_model(reads_an_attribute), []
        plan(model)
        for value in SECOND[name]:
            for block in model.layers:
                block.factor = value
            losses.append(custom_loss(model))
        for block in model.layers:
            del block.factor
        sum(losses).backward()
        assert not any(hasattr(block, "factor") for block in model.layers)
        found.append(outcome(model, sum(losses)))
    assert_same(*found)
    assert min(hf_ckpt.describe(model).recomputed.values()) >= 2


def another_forward(model):
    for block in model.layers:
        block.one.forward = lambda hidden: hidden * 0.0


def another_config_value(model):
    model.config.factor = 5.0


def registered_anew(model):
    """The same parameters in another order, with equal shapes, as after `prune.remove`."""
    for block in model.layers:
        weight, bias = block.norm.weight, block.norm.bias
        del block.norm.weight, block.norm.bias
        block.norm.bias, block.norm.weight = bias, weight


def reads_a_config(block, hidden, shift):
    return scaled(block, hidden, block.config.factor)


@each_engine
@pytest.mark.parametrize("change", [another_forward, another_config_value, registered_anew])
def test_a_recomputation_finds_what_the_forward_found(change, engine):
    found = []
    for plan in plans(ENGINES[engine]):
        model = custom_model(reads_a_config)
        for block in model.layers:
            block.config = model.config
            nn.init.normal_(block.norm.bias)
        model.config.factor = 2.0
        plan(model)
        outcomes = []
        for number in range(2):
            model.zero_grad(set_to_none=True)
            loss = custom_loss(model, number)
            change(model)
            loss.backward()
            outcomes.append(outcome(model, loss))
            if change is not registered_anew:
                model.config.factor = 2.0
                for block in model.layers:
                    vars(block.one).pop("forward", None)
        found.append(outcomes)
    for one, other in zip(*found, strict=True):
        assert_same(one, other)
    assert min(hf_ckpt.describe(model).recomputed.values()) >= len(found[0])


# --- what is around a forward only ------------------------------------------------------------------------------------


class Doubles(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is functional.silu else result


@contextlib.contextmanager
def matmul_precision(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    yield
    torch.set_float32_matmul_precision(before)


def precision_now():
    newer = getattr(torch._C, "_get_fp32_precision_getter", None)  # torch 2.8 has one precision for all backends
    return newer("mkldnn", "matmul") if newer else torch.get_float32_matmul_precision()


def attends(block, hidden, shift):
    query = hidden.unsqueeze(1)
    return work(block, functional.scaled_dot_product_attention(query, query, query).squeeze(1), shift)


def reads_the_precision(block, hidden, shift):
    return scaled(block, hidden, 2.0 if precision_now() in ("bf16", "medium") else 1.0)


AROUND = {
    "sdpa_kernel": (attends, lambda: sdpa_kernel(SDPBackend.MATH)),
    "float32 precision": (reads_the_precision, lambda: matmul_precision("medium")),
    "a TorchFunctionMode": (work, Doubles),
}
"""What is active in the forward, and not in backward -> what a block does, and the context."""


@each_engine
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.trap(64)
def test_a_recomputation_runs_under_the_switches_of_the_forward(name, engine):
    run, around = AROUND[name]
    found = []
    for plan in plans(ENGINES[engine]):
        model = plan(custom_model(run))
        with around():
            loss = custom_loss(model)
        loss.backward()
        found.append(outcome(model, loss))
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.flash_sdp_enabled()
    assert_same(*found)
    assert min(hf_ckpt.describe(model).recomputed.values()) >= 1


def test_linear_layers_are_rebuilt_under_the_switches_of_the_forward(monkeypatch):
    found, product = [], torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda *args, **kwargs: found.append(precision_now()) or product(*args, **kwargs)
    )
    model = planned(custom_model(), {"policy": "selective", "save": ["attention"]})
    with matmul_precision("medium"):
        in_forward = precision_now()
        loss = custom_loss(model)
    assert not found
    assert precision_now() != in_forward
    loss.backward()
    assert set(found) == {in_forward}


def test_segments_inside_one_autocast_of_several_steps():
    """Autocast caches the casts of the first step, and keeps them while it is on."""
    found = []
    for plan in plans(ENGINES["segments"]):
        model = plan(custom_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with torch.autocast("cpu", torch.bfloat16):
            for number in range(3):
                optimizer.zero_grad(set_to_none=True)
                loss = custom_loss(model, number)
                loss.backward()
                optimizer.step()
        found.append(outcome(model, loss))
    assert_same(*found)
    assert min(hf_ckpt.describe(model).recomputed.values()) >= 3


def drops(block, hidden, shift):
    return functional.dropout(work(block, hidden, shift), 0.5)


def test_backwards_of_two_threads_draw_their_own_numbers():
    """The generators belong to the process: without a lock, both recomputations would be inside at the same time."""
    inside, in_backward = threading.Barrier(2), threading.Event()

    def meets(block, hidden, shift):
        if in_backward.is_set():
            with contextlib.suppress(threading.BrokenBarrierError):  # the other one is locked out
                inside.wait(0.1)
        return drops(block, hidden, shift)

    found = []
    for plan in plans("full"):
        models = [plan(custom_model(meets)) for _ in range(2)]
        in_backward.clear()
        torch.manual_seed(5)
        losses = [custom_loss(model) for model in models]
        in_backward.set()
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.append([outcome(model, loss) for model, loss in zip(models, losses, strict=True)])
    for one, other in zip(*found, strict=True):
        assert_same(one, other)
    assert all(min(hf_ckpt.describe(model).recomputed.values()) == 1 for model in models)


# --- what a block is given --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Given:
    shifts: list
    calls: int = 0


def takes_from_an_object(block, hidden, given):
    given.calls += 1
    return work(block, hidden, given.shifts[given.calls - 1] * given.calls)


def takes_from_a_deque(block, hidden, given):
    return work(block, hidden, given.popleft())


def counts_in_a_given_array(block, hidden, given):
    given += 1
    return scaled(block, hidden, float(given[0]))


def counts_in_given_bytes(block, hidden, given):
    given[0] += 1
    return scaled(block, hidden, float(given[0]))


def takes_the_last(block, hidden, given):
    return work(block, hidden, given.pop(0))


def shifts():
    return [torch.linspace(-1, number, 16).expand(2, 1, 16) for number in range(LAYERS)]


def endless():
    values = shifts()
    values.append(values)
    return values


OBJECTS = {
    "a dataclass": (takes_from_an_object, lambda: Given(shifts())),
    "a namespace": (takes_from_an_object, lambda: types.SimpleNamespace(shifts=shifts(), calls=0)),
    "a deque": (takes_from_a_deque, lambda: collections.deque(shifts())),
    "a numpy array": (counts_in_a_given_array, lambda: numpy.zeros(2)),
    "a bytearray": (counts_in_given_bytes, lambda: bytearray(2)),
    "a list that contains itself": (takes_the_last, endless),
}


@each_engine
@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.trap(78)
def test_an_object_that_a_block_is_given_is_changed_once(name, engine):
    run, make = OBJECTS[name]
    found = []
    for plan in plans(ENGINES[engine]):
        model, given = plan(custom_model(run)), make()
        loss = model(torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)), given).square().mean()
        loss.backward()
        found.append((outcome(model, loss), str(getattr(given, "calls", given))))
    (expected, left), (got, left_by_ours) = found
    assert_same(expected, got)
    assert left_by_ours == left
    assert min(hf_ckpt.describe(model).recomputed.values()) >= 1


class Pair(tuple):
    """A tuple that cannot be made from a list, as those of some C extensions."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


def test_a_tuple_without_containers_is_given_as_it_is():
    found = []
    for plan in plans("full"):
        model = plan(custom_model(lambda block, hidden, given: work(block, hidden, given[0]) * (type(given) is Pair)))
        loss = model(torch.ones(2, 8, 16), Pair(torch.ones(16), 2)).square().mean()
        loss.backward()
        found.append(outcome(model, loss))
    assert_same(*found)
    assert min(hf_ckpt.describe(model).recomputed.values()) == 1


class NoCopies(dict):
    def __copy__(self):
        raise TypeError("it has no copy")


@pytest.mark.parametrize("given", [NoCopies(shift=1), iter(shifts())], ids=["a dict", "an iterator"])
def test_what_has_no_copy_is_refused_by_name(given):
    model = planned(custom_model(lambda block, hidden, given: work(block, hidden, None)), "full")
    with pytest.raises(HfCkptError, match=r"block 'layers\.0' is given a value that cannot be copied"):
        model(torch.randn(2, 8, 16), given)


def adds(block, hidden, given):
    leaf = given if isinstance(given, torch.Tensor) else given[0] if not isinstance(given, dict) else given["shift"]
    return work(block, hidden, torch.where(leaf, 1.0, -1.0) if leaf.dtype is torch.bool else leaf)


TENSORS = {
    "a tensor": lambda tensor: tensor,
    "in a list": lambda tensor: [tensor],
    "in a tuple": lambda tensor: (tensor, 1),
    "in a dict": lambda tensor: {"shift": tensor},
}
"""How a block is given a tensor that changes."""


@each_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.trap(62)
def test_a_tensor_that_a_block_was_given_and_that_changed_is_refused(name, dtype, engine):
    """Refused where it is used: a block that does not read it is recomputed as before."""
    hidden = torch.randn(2, 8, 16)
    for run, error in ((adds, ChangedBlockError), (lambda block, hidden, given: work(block, hidden, None), None)):
        model, tensor = planned(custom_model(run), ENGINES[engine]), torch.ones(16, dtype=dtype)
        loss = model(hidden, TENSORS[name](tensor)).square().mean()
        tensor.zero_()
        if error is None and engine != "segments":
            loss.backward()
            assert min(hf_ckpt.describe(model).recomputed.values()) >= 1
        elif error is not None:
            with pytest.raises(error, match=r"block 'layers\.\d': a tensor of shape \[16\] that it was given was over"):
                loss.backward()


def test_segments_refuse_it_too_where_only_an_earlier_block_uses_it():
    """The gradients of the last block need its input, for which the first block runs again."""
    model = planned(custom_model(lambda block, hidden, given: work(block, hidden, None)), {"segments": 1})
    model.layers[0].work = adds
    tensor = torch.ones(16)
    loss = model(torch.randn(2, 8, 16), tensor).square().mean()
    tensor.zero_()
    with pytest.raises(
        ChangedBlockError, match=r"block 'layers\.0': a tensor of shape \[16\] that it was given was over"
    ):
        torch.autograd.grad(loss, model.layers[2].one.weight)


@each_engine
@pytest.mark.parametrize("name", TENSORS)
def test_a_block_that_changes_a_tensor_in_place_is_refused(name, engine):
    def scales(block, hidden, given):
        leaf = given if isinstance(given, torch.Tensor) else given[0] if not isinstance(given, dict) else given["shift"]
        return work(block, hidden, leaf.mul_(2.0).clone())

    model = planned(custom_model(scales), ENGINES[engine])
    with pytest.raises(InPlaceError, match=r"block 'layers\.0': a tensor of shape \[16\] .* changed in place"):
        model(torch.randn(2, 8, 16), TENSORS[name](torch.ones(16)))


# --- errors of a recomputation name the block -------------------------------------------------------------------------

SECOND_TIME = collections.Counter()


def raises_when_it_runs_again(block, hidden, shift):
    SECOND_TIME["runs"] += 1
    if SECOND_TIME["runs"] > LAYERS:
        raise KeyError("not the first time")
    return work(block, hidden, shift)


def saves_more_when_it_runs_again(block, hidden, shift):
    SECOND_TIME["runs"] += 1
    return work(block, hidden * hidden if SECOND_TIME["runs"] > LAYERS else hidden, shift)


def saves_another_shape_when_it_runs_again(block, hidden, shift):
    SECOND_TIME["runs"] += 1
    output = work(block, hidden, shift)
    return (output.reshape(-1, 16) if SECOND_TIME["runs"] > LAYERS else output).sin().reshape(output.shape)


@pytest.mark.compat
@pytest.mark.parametrize("torchs", ["this torch", "another torch"])
@pytest.mark.parametrize(
    "run", [raises_when_it_runs_again, saves_more_when_it_runs_again, saves_another_shape_when_it_runs_again]
)
@pytest.mark.parametrize("engine", ["full", "full+selective", "offload"])
def test_an_error_of_a_recomputation_names_the_block(run, engine, torchs, caplog, monkeypatch):
    if torchs == "another torch":  # whose record of a checkpointed call is not known
        monkeypatch.setattr(compat.torch, "_READ", {"something else"})
    SECOND_TIME.clear()
    model = planned(custom_model(run), ENGINES[engine])
    loss = custom_loss(model)
    with pytest.raises((KeyError, torch.utils.checkpoint.CheckpointError)) as raised:
        loss.backward()
    notes = getattr(raised.value, "__notes__", [record.message for record in caplog.records])  # Python 3.10 has none
    assert len(notes) == 1
    assert "block 'layers.2' raised this" in notes[0]
    assert '"policy": "selective"' in notes[0]


def test_a_backward_inside_a_block_is_refused_in_segments():
    def forces(block, hidden, shift):
        with torch.enable_grad():
            inner = hidden.detach().requires_grad_()
            (force,) = torch.autograd.grad(work(block, inner, shift).square().sum(), inner)
        return work(block, hidden, shift) + force

    model = planned(custom_model(forces), {"segments": 1})
    with pytest.raises(HfCkptError, match=r"block 'layers\.0' calls torch.autograd.grad or backward"):
        custom_loss(model).backward()
