"""What a recomputation finds, and what a forward leaves, row by row: restored, or refused by name.

`docs/faq.md` lists the same three kinds of rows: what is restored, what is refused, and what only the watch finds.
`parity/test_matrix.py` compares gradients after most changes between forward and backward.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import operator
import threading
import types
import weakref

import numpy
import pytest
import torch
from helpers.adapters import two_adapters
from helpers.custom import LAYERS, custom_loss, custom_model, in_threads, moving_average, same_under, steps_of, work
from helpers.snapshots import snapshot
from helpers.steps import (
    ENGINES,
    RUN_AGAIN,
    assert_same,
    gradients,
    outcome,
    planned,
    step,
    without_cache,
    without_collector,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.errors import ChangedBlockError, HfCkptError, InPlaceError, MismatchError
from hf_ckpt.models.blocks import base_model
from hf_ckpt.models.tiny import tiny_batch, tiny_model

STEPS = 4
on_a_device = pytest.param("offload", marks=pytest.mark.thorough)  # on a CPU, it is `full`
each_engine = pytest.mark.parametrize("engine", ["full", "both, save attention", on_a_device])
any_engine = pytest.mark.parametrize("engine", ENGINES)


def scaled(block, hidden, factor):
    """The output of a block that depends on a factor, in its loss and in its gradients."""
    return work(block, hidden * factor, None)


# --- what a forward changes in its block ------------------------------------------------------------------------------


def changes_attributes(block, hidden, shift):
    """A tensor, a list, a dict, an array and a counter. Each of them changes the gradients."""
    block.load = getattr(block, "load", torch.ones(16)) + hidden.detach().abs().mean((0, 1))
    block.history.append(float(hidden.detach().mean()))
    block.counts["calls"] = [*block.counts.get("calls", []), 1]
    block.numbers += 1
    block.calls = getattr(block, "calls", 0) + 1
    counted = len(block.history) + 2 * sum(block.counts["calls"]) + 3 * float(block.numbers.sum()) + 5 * block.calls
    return scaled(block, hidden, block.load + block.history[-1] + counted)


def keeps_a_graph(block, hidden, shift):
    output = scaled(block, hidden, 1.0 if getattr(block, "last", None) is None else block.last.detach())
    block.last = output
    return output


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


WRITES = {
    "attributes": changes_attributes,
    "a graph": keeps_a_graph,
    "a maximum": sees_a_maximum,
    "a late average": warms_up,
    "another buffer": moving_average,
}


def with_attributes(run):
    model = custom_model(run)
    for block in model.layers:
        block.history, block.counts, block.numbers = [], {}, numpy.zeros(2)
        block.register_buffer("number", torch.zeros(()))
        block.register_buffer("largest", torch.tensor(12.0))
        block.register_buffer("average", torch.zeros(16))
    return model


@each_engine
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.trap(63)
@pytest.mark.trap(65)
def test_what_a_forward_changes_in_its_block_changes_once(name, engine):
    """Two forwards before each backward: the recomputation of each starts from what that forward found."""

    def run(model):
        outcomes = []
        for number in range(STEPS):
            model.zero_grad(set_to_none=True)
            loss = custom_loss(model, number) + custom_loss(model, number + 1)
            loss.backward()
            outcomes.append(outcome(model, loss))
        names = ("load", "history", "counts", "numbers", "calls", "largest", "average", "number")
        return outcomes, [{name: str(getattr(block, name, None)) for name in names} for block in model.layers]

    same_under(ENGINES[engine], run, lambda: with_attributes(WRITES[name]), times=2 * STEPS)


def in_model(change):
    """A block that changes an attribute of its model, and computes with it."""
    return lambda block, hidden, shift: scaled(block, hidden, change(block.model(), hidden))


def extends_a_bank(model, hidden):
    model.bank = torch.cat([model.bank, hidden.mean((0, 1), keepdim=True)])
    return model.bank.mean() + 1


def extends_a_list(model, hidden):
    model.history.append(hidden.mean())
    return sum(model.history)


def counts_in_its_model(model, hidden):
    model.calls += 1
    model.counts["calls"] = model.counts.get("calls", 0) + 1
    return model.calls + 2 * model.counts["calls"]


def writes_a_buffer(model, hidden):
    model.total.add_(hidden.detach().mean())
    return 1 + model.total.clone()


def replaces_a_buffer(model, hidden):
    model.total = model.total.detach() + hidden.mean()
    return 1 + model.total


IN_MODEL = {
    function.__name__: in_model(function)
    for function in (extends_a_bank, extends_a_list, counts_in_its_model, writes_a_buffer, replaces_a_buffer)
}


def with_bank(run):
    model = custom_model(run)
    model.bank, model.history, model.calls, model.counts = torch.zeros(1, 1, 16), [], 0, {}
    model.register_buffer("total", torch.zeros(()))
    for block in model.layers:
        block.model = weakref.ref(model)
    return model


@each_engine
@pytest.mark.parametrize("name", IN_MODEL)
def test_blocks_find_their_model_as_their_forward_did(name, engine):
    """Each block extends what the blocks before it have left, and its recomputation changes nothing."""

    def run(model):
        outcomes, seen = [], []
        for number in range(STEPS):
            model.zero_grad(set_to_none=True)
            loss = custom_loss(model, number)
            seen.append(str((len(model.bank), len(model.history), model.calls, model.counts, model.total.item())))
            loss.backward()
            seen.append(str((len(model.bank), len(model.history), model.calls, model.counts, model.total.item())))
            outcomes.append(outcome(model, loss))
            model.bank, model.history = torch.zeros(1, 1, 16), []
        return outcomes, seen

    same_under(ENGINES[engine], run, lambda: with_bank(IN_MODEL[name]), times=STEPS)


def test_a_copied_model_has_its_own_attributes():
    plain, ours = with_bank(IN_MODEL["extends_a_bank"]), planned(with_bank(IN_MODEL["extends_a_bank"]), "full")
    custom_loss(ours).backward()
    ours.bank = torch.zeros(1, 1, 16)  # a graph cannot be copied
    ours = copy.deepcopy(ours)
    for model in (plain, ours):
        model.zero_grad()
        model.bank = torch.zeros(1, 1, 16)
        for block in model.layers:
            block.model = weakref.ref(model)
        custom_loss(model).backward()
    assert_same(gradients(plain), gradients(ours))
    assert set(hf_ckpt.describe(ours).recomputed.values()) == {2}


def test_a_backward_needs_no_model_any_more():
    """A graph keeps the blocks alive, and not the model."""
    model = planned(custom_model(), "full")
    loss, block = custom_loss(model), model.layers[0]
    reference = weakref.ref(model)
    with without_collector():
        del model
        assert reference() is None
    loss.backward()
    assert all(parameter.grad is not None for parameter in block.one.parameters())


def counts_on_a_linear(linear, args, output):
    linear.calls = getattr(linear, "calls", 0) + 1
    linear.mean = 0.9 * getattr(linear, "mean", torch.zeros(16)) + output.detach().mean((0, 1))
    return output * (linear.strength + linear.calls + linear.mean)


@each_engine
def test_attributes_that_hooks_put_on_linear_layers_are_as_in_the_forward(engine):
    def run(model):
        linears, outcomes = [block.one for block in model.layers], []
        for linear in linears:
            linear.register_forward_hook(counts_on_a_linear)
        for number in range(STEPS):
            model.zero_grad(set_to_none=True)
            for linear in linears:
                linear.strength = number
            loss = custom_loss(model, number)
            for linear in linears:
                linear.strength = None
            loss.backward()
            outcomes.append(outcome(model, loss))
        return outcomes, [(linear.calls, str(linear.mean)) for linear in linears]

    same_under(ENGINES[engine], run, times=STEPS)


@each_engine
def test_a_forward_that_a_linear_layer_had_for_a_while_is_that_of_its_recomputation(engine):
    def run(model):
        linears = [block.one for block in model.layers]
        for linear in linears:
            linear.forward = lambda hidden, linear=linear: functional.linear(hidden, linear.weight.round(decimals=1))
        loss = custom_loss(model)
        for linear in linears:
            del linear.forward
        loss.backward()
        return outcome(model, loss)

    same_under(ENGINES[engine], run)


def test_graphs_of_earlier_forwards_are_freed():
    """A block keeps its output, graph and all. The next forward records it without the graph: no chain of forwards."""
    model, graphs = planned(custom_model(keeps_a_graph), "full"), []
    for number in range(4):
        custom_loss(model, number)
        graphs.append(weakref.ref(model.layers[0].last))
    assert [graph() is not None for graph in graphs] == [False, False, False, True]


@dataclasses.dataclass
class Record:
    value: object


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    value: object


STORED = {
    "a tensor": lambda block, value: setattr(block, "stats", value),
    "a buffer": lambda block, value: setattr(block, "average", value),
    "a dict": lambda block, value: setattr(block, "stats", {"value": value}),
    "a list in a tuple": lambda block, value: setattr(block, "stats", (1, [value])),
    "a set": lambda block, value: setattr(block, "stats", {value}),
    "a deque": lambda block, value: setattr(block, "stats", collections.deque([value])),
    "an object": lambda block, value: setattr(block, "stats", Record(value)),
    "a list of objects": lambda block, value: setattr(block, "stats", [Record(value), Slots([value])]),
    "items of a list": lambda block, value: block.log.append(value),
    "objects in a list": lambda block, value: block.log.append(Record({"value": value})),
    "tensors in two lists": lambda block, value: (block.log.append(value), block.norm.log.append(value)),
    "a tensor of its model": lambda block, value: setattr(block.model(), "stats", value),
    "a buffer of its model": lambda block, value: setattr(block.model(), "average", value),
    "items of a list of its model": lambda block, value: block.model().log.append({"value": value}),
}
"""What a block stores of a value with a graph, which no backward frees."""


def alive_after_each_step(store, spec):
    """How many inputs of blocks are alive after each of some steps whose blocks store a value."""
    inputs = []

    def stores(block, hidden, shift):
        inputs.append(StorageWeakRef(hidden.untyped_storage()))
        output = work(block, hidden, shift)
        store(block, output.square().mean())
        return output

    model, alive = custom_model(stores), []
    for module in (model, *model.layers):
        module.register_buffer("average", torch.zeros(()))
    for block in model.layers:
        block.model = weakref.ref(model)
    planned(model, spec)
    for number in range(8):
        model.log = []
        for block in model.layers:
            block.log = block.norm.log = []
        custom_loss(model, number).backward()
        alive.append(sum(not storage.expired() for storage in inputs))
    assert set(hf_ckpt.describe(model).recomputed.values()) == {8}
    return alive


@each_engine
def test_what_a_block_stores_keeps_no_earlier_step_alive(engine):
    """As without checkpointing, where a step's graph lives until the next step replaces what the block has stored."""
    with without_collector():
        alive = {stored: alive_after_each_step(store, ENGINES[engine]) for stored, store in STORED.items()}
    assert {stored: counts[7] for stored, counts in alive.items()} == {
        stored: counts[2] for stored, counts in alive.items()
    }
    assert all(counts[2] for counts in alive.values())


WRITES_NOW = threading.Event()


def begins_late(block, hidden, shift):
    """A table too large to be copied before every forward, which only later forwards write."""
    output = scaled(block, hidden, 1 + block.table[0, 0])
    if WRITES_NOW.is_set():
        block.table.fill_(1)
    return output


def with_table(table="a buffer"):
    model = custom_model(begins_late)
    for block in model.layers:
        large = torch.zeros(300, 300, dtype=torch.bool if table == "a mask" else torch.float32)
        if table == "a tensor in an attribute":
            block.table = large
        else:
            block.register_buffer("table", large)
    return model


@each_engine
@pytest.mark.parametrize("table", ["a buffer", "a mask", "a tensor in an attribute"])
def test_a_large_table_that_the_first_forward_did_not_write_is_refused(table, engine):
    """Its values before that forward are gone."""
    model = planned(with_table(table), ENGINES[engine])
    WRITES_NOW.clear()
    custom_loss(model).backward()
    WRITES_NOW.set()
    loss = custom_loss(model)
    with pytest.raises(ChangedBlockError, match=r"block 'layers\.\d': `table` was overwritten"):
        loss.backward()
    assert min(hf_ckpt.describe(model).recomputed.values()) >= 1


def test_a_large_table_is_copied_once_a_forward_has_written_it():
    """The forward that is the first to write it has no backward here."""

    def run(model):
        WRITES_NOW.clear()
        custom_loss(model).backward()
        WRITES_NOW.set()
        custom_loss(model)
        for block in model.layers:
            block.table.zero_()
        return steps_of(model, 1)

    same_under("full", run, with_table, times=2)


@each_engine
def test_a_list_that_is_emptied_before_backward_stays_empty(engine):
    """The block finds it as its forward did, and only the forward's items were for the caller."""

    def logs(block, hidden, shift):
        block.history.append(len(block.history) + 1.5)
        return scaled(block, hidden, block.history[-1])

    def run(model):
        outcomes, seen = [], []
        for number in range(STEPS):
            loss = custom_loss(model, number)
            seen += [list(block.history) for block in model.layers]
            for block in model.layers:
                block.history = []
            loss.backward()
            seen += [list(block.history) for block in model.layers]
            outcomes.append(outcome(model, loss))
        return outcomes, seen

    same_under(ENGINES[engine], run, lambda: with_attributes(logs), times=STEPS)


THREAD = threading.local()


def counts_in(find):
    """A block that counts its calls in an object that is not restored."""

    def run(block, hidden, shift):
        counter = find(block)
        counter.calls = getattr(counter, "calls", 0) + 1
        return scaled(block, hidden, float(counter.calls))

    return run


@pytest.mark.parametrize("find", [lambda block: block.counter, lambda block: THREAD], ids=["object", "thread"])
def test_what_is_not_restored_is_found_by_the_watch(find):
    """It checks the first block in the first forward here, and in the third by default."""
    model = custom_model(counts_in(find))
    for block in model.layers:
        block.counter = types.SimpleNamespace()
    planned(model, {"policy": "full", "check_every": 1, "on_mismatch": "raise"})
    with pytest.raises(MismatchError, match=r"in `layers\.0.*`selective` runs no block twice"):
        custom_loss(model).backward()


# --- what is changed between two forwards, or before backward ---------------------------------------------------------


class Shape(enum.Enum):
    NARROW = 1.5
    WIDE = 2.5


SECOND = {
    "none to a number": (None, 2.0, lambda value: value or 1.0),
    "a tuple": ((1.0,), (2.0,), operator.itemgetter(0)),
    "a list": ([1.0], [2.0], operator.itemgetter(0)),
    "a numpy scalar": (numpy.float32(1.0), numpy.float32(2.0), float),
    "a tensor": (torch.ones(16), torch.full((16,), 2.0), torch.Tensor.clone),
    "a dict": ({"value": 1.0}, {"value": 2.0}, operator.itemgetter("value")),
    "a dict of tensors": ({"value": torch.ones(16)}, {"value": torch.zeros(16)}, operator.itemgetter("value")),
    "an enum": (Shape.NARROW, Shape.WIDE, operator.attrgetter("value")),
    "a function": (lambda: 1.0, lambda: 2.0, lambda function: function()),
}
"""An attribute of a block -> its values in the first and in the second forward, and how the block reads it."""


@each_engine
@pytest.mark.parametrize("name", SECOND)
def test_each_forward_has_the_attributes_that_it_had(name, engine):
    """The attribute changes between two forwards, and is gone when their backward runs."""
    *values, read = SECOND[name]

    def reads_its_factor(block, hidden, shift):
        return scaled(block, hidden, read(block.factor))

    def run(model):
        losses = []
        for value in values:
            for block in model.layers:
                block.factor = value
            losses.append(custom_loss(model))
        for block in model.layers:
            del block.factor
        sum(losses).backward()
        assert not any(hasattr(block, "factor") for block in model.layers)
        return outcome(model, sum(losses))

    same_under(ENGINES[engine], run, lambda: custom_model(reads_its_factor), times=2)


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


SHIFT = contextvars.ContextVar("shift")


@contextlib.contextmanager
def shift_of(number):
    token = SHIFT.set(number)
    yield
    SHIFT.reset(token)


def attends(block, hidden, shift):
    query = hidden.unsqueeze(1)
    return work(block, functional.scaled_dot_product_attention(query, query, query).squeeze(1), shift)


def reads_the_precision(block, hidden, shift):
    return scaled(block, hidden, 2.0 if precision_now() in ("bf16", "medium") else 1.0)


AROUND = {
    "sdpa_kernel": (attends, lambda: sdpa_kernel(SDPBackend.MATH)),
    "float32 precision": (reads_the_precision, lambda: matmul_precision("medium")),
    "a TorchFunctionMode": (work, Doubles),
    "a context variable": (lambda block, hidden, shift: work(block, hidden, SHIFT.get()), lambda: shift_of(0.5)),
}
"""What is active in the forward, and not in backward -> what a block does, and the context."""


@each_engine
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.trap(64)
def test_a_recomputation_runs_under_the_switches_of_the_forward(name, engine):
    block_run, around = AROUND[name]

    def run(model):
        with around():
            loss = custom_loss(model)
        loss.backward()
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.flash_sdp_enabled()
        return outcome(model, loss)

    same_under(ENGINES[engine], run, lambda: custom_model(block_run))


def test_linear_layers_are_rebuilt_under_the_switches_of_the_forward(monkeypatch):
    seen, product = [], torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda *args, **kwargs: seen.append(precision_now()) or product(*args, **kwargs)
    )
    model = planned(custom_model(), ENGINES["save attention"])
    with matmul_precision("medium"):
        in_forward = precision_now()
        loss = custom_loss(model)
    assert not seen
    assert precision_now() != in_forward
    loss.backward()
    assert set(seen) == {in_forward}


class WatchedLock:
    """A lock that says when a second thread wants it."""

    def __init__(self):
        self.lock, self.threads, self.both = threading.RLock(), set(), threading.Event()

    def arrive(self):
        self.threads.add(threading.get_ident())
        if len(self.threads) == 2:
            self.both.set()

    def __enter__(self):
        self.arrive()
        self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()


def test_backwards_of_two_threads_draw_their_own_numbers(monkeypatch):
    """The generators belong to the process: without a lock, both recomputations would be inside at the same time."""
    lock, in_backward, inside, together = WatchedLock(), threading.Event(), set(), []
    monkeypatch.setattr(compat.process_state, "_LOCK", lock)

    def meets(block, hidden, shift):
        if not in_backward.is_set():
            return functional.dropout(work(block, hidden, shift), 0.5)
        inside.add(threading.get_ident())
        lock.arrive()
        assert lock.both.wait(60)  # the other thread waits for the lock, or is in here, too
        together.append(len(inside))
        try:
            return functional.dropout(work(block, hidden, shift), 0.5)
        finally:  # torch ends a recomputation by an exception
            inside.remove(threading.get_ident())

    def run(model):
        in_backward.clear()
        torch.manual_seed(5)
        losses = [custom_loss(model, number) for number in range(2)]
        in_backward.set()
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        outcomes = [{}, {}]

        def differentiate(loss, results):
            results.update(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))

        in_threads(*(functools.partial(differentiate, *pair) for pair in zip(losses, outcomes, strict=True)))
        return outcomes

    same_under("full", run, lambda: custom_model(meets), times=2)
    assert set(together) == {1}


# --- what a block is given --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Shifts:
    shifts: list
    calls: int = 0


def takes_from_an_object(block, hidden, holder):
    holder.calls += 1
    return work(block, hidden, holder.shifts[holder.calls - 1] * holder.calls)


class Counter:
    """An object that is called, with a tensor in it."""

    def __init__(self):
        self.calls = torch.zeros(())

    def __call__(self):
        self.calls = self.calls + 1
        return self.calls


class SlottedCounter(Counter):
    __slots__ = ("calls",)


def counts_in_an_array(block, hidden, numbers):
    numbers[0] += 1
    return scaled(block, hidden, float(numbers[0]))


def adds_its_result(block, hidden, results):
    results.append(work(block, hidden, results[-1].mean(1, keepdim=True)))
    return results[-1]


def shifts():
    return [torch.linspace(-1, number, 16).expand(2, 1, 16) for number in range(LAYERS)]


def endless():
    values = shifts()
    values.append(values)
    return values


class Pair(tuple):
    """A tuple that cannot be made from a list, as those of some C extensions."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


def takes(take):
    return lambda block, hidden, container: work(block, hidden, take(container))


CONTAINERS = {
    "a list": (takes(lambda values: values.pop(0)), shifts),
    "a dict in a tuple": (takes(lambda values: values[0].popitem()[1]), lambda: (dict(enumerate(shifts())),)),
    "a list that gets results": (adds_its_result, lambda: shifts()[:1]),
    "a dataclass": (takes_from_an_object, lambda: Shifts(shifts())),
    "a namespace": (takes_from_an_object, lambda: types.SimpleNamespace(shifts=shifts(), calls=0)),
    "a deque": (takes(lambda values: values.popleft()), lambda: collections.deque(shifts())),
    "a numpy array": (counts_in_an_array, lambda: numpy.zeros(2)),
    "a bytearray": (counts_in_an_array, lambda: bytearray(2)),
    "an array": (counts_in_an_array, lambda: array.array("l", [0, 0])),
    "a frozen dataclass with slots": (takes(lambda holder: holder.value.pop(0)), lambda: Slots(shifts())),
    "an object with slots that is called": (takes(lambda count: count()), SlottedCounter),
    "an object that is called": (takes(lambda count: count()), Counter),
    "a list that contains itself": (takes(lambda values: values.pop(0)), endless),
    "a tuple of its own kind": (takes(lambda pair: pair[0] * (type(pair) is Pair)), lambda: Pair(torch.ones(16), 2)),
}
"""What a block is given -> what the block does with it, and how it is made."""


@any_engine
@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.trap(78)
def test_what_a_block_is_given_is_changed_once(name, engine):
    """A recomputation gets it as it was given, and the caller's is changed by the forward alone."""
    block_run, make = CONTAINERS[name]

    def run(model):
        container = make()
        loss = model(torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)), container).square().mean()
        if block_run is adds_its_result:
            loss = loss + sum(value.square().mean() for value in container)
        for _ in range(2):  # recomputes twice
            loss.backward(retain_graph=True)
        return outcome(model, loss), str(getattr(container, "calls", container))

    same_under(ENGINES[engine], run, lambda: custom_model(block_run))


class NoCopies(dict):
    def __copy__(self):
        raise TypeError("it has no copy")


@pytest.mark.parametrize(
    "value",
    [NoCopies(shift=1), iter(shifts()), memoryview(bytearray(2))],
    ids=["a dict", "an iterator", "a view of memory"],
)
def test_what_has_no_copy_is_refused_by_name(value):
    model = planned(custom_model(lambda block, hidden, shift: work(block, hidden, None)), "full")
    with pytest.raises(HfCkptError, match=r"block 'layers\.0' is given a value that cannot be copied"):
        model(torch.randn(2, 8, 16), value)


def test_an_attribute_that_has_no_copy_is_refused_by_name():
    model = planned(custom_model(), "full")
    model.layers[1].stats = NoCopies(value=torch.ones(1))
    with pytest.raises(HfCkptError, match=r"block 'layers\.1' has an attribute `stats` that cannot be copied"):
        custom_loss(model)


def adds(block, hidden, value):
    (leaf,) = pytree.tree_leaves(value)
    return work(block, hidden, torch.where(leaf, 1.0, -1.0) if leaf.dtype is torch.bool else leaf)


def ignores(block, hidden, value):
    return work(block, hidden, None)


TENSORS = {
    "a tensor": lambda tensor: tensor,
    "in a list": lambda tensor: [tensor],
    "in a tuple": lambda tensor: (tensor,),
    "in a dict": lambda tensor: {"shift": tensor},
}
"""How a block is given a tensor that changes."""
OVERWRITTEN = r": a tensor of shape \[16\] that it was given was over"


@each_engine
@pytest.mark.parametrize("kind", ["float", "bool", "with a graph"])
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.trap(62)
def test_a_tensor_that_a_block_was_given_and_that_changed_is_refused(name, kind, engine):
    """Refused where it is used: a block that does not read it is recomputed as before."""
    for run in (adds, ignores):
        model, tensor = (
            planned(custom_model(run), ENGINES[engine]),
            torch.ones(16, dtype=torch.bool if kind == "bool" else None),
        )
        if kind == "with a graph":
            tensor = tensor.requires_grad_().clone()
        loss = model(torch.randn(2, 8, 16), TENSORS[name](tensor)).square().mean()
        tensor.detach().zero_()
        if run is adds:
            with pytest.raises(ChangedBlockError, match=r"block 'layers\.\d'" + OVERWRITTEN):
                loss.backward()
        else:
            loss.backward()
            assert min(hf_ckpt.describe(model).recomputed.values()) >= 1


@each_engine
@pytest.mark.parametrize("name", TENSORS)
def test_a_block_that_changes_a_tensor_in_place_is_refused(name, engine):
    model = custom_model(lambda block, hidden, value: work(block, hidden, pytree.tree_leaves(value)[0].mul_(2).clone()))
    planned(model, ENGINES[engine])
    with pytest.raises(InPlaceError, match=r"block 'layers\.0': a tensor of shape \[16\] .* changed in place"):
        model(torch.randn(2, 8, 16), TENSORS[name](torch.ones(16)))


# --- hooks that a forward registers -----------------------------------------------------------------------------------


def halves_gradients(take):
    """A block that halves the gradients of some tensors that it is given."""

    def run(block, hidden, shift):
        taken = take(hidden, shift)
        for tensor in taken:
            tensor.retain_grad()
            tensor.register_hook(lambda gradient: block.seen.append(1) or gradient * 0.5)
        # Another operation, with other saved tensors, if one tensor has become two.
        return work(block, hidden, hidden.sin() if hidden is shift else taken[-1].cos())

    return run


HOOKED = {
    "hidden states": (lambda hidden, shift: [hidden], lambda tensor: None),
    "by keyword": (lambda hidden, shift: [hidden, shift], lambda tensor: tensor),
    "twice": (lambda hidden, shift: [shift], lambda tensor: "hidden states"),
    "a list": (lambda hidden, shift: shift, lambda tensor: [tensor, tensor.view(4, 4).flatten()]),
    "a dict in a tuple": (lambda hidden, shift: [shift[0]["shift"]], lambda tensor: ({"shift": tensor},)),
    "an object": (lambda hidden, shift: shift.shifts, lambda tensor: Shifts([tensor])),
    "a tuple of its own kind": (lambda hidden, shift: shift[:1], lambda tensor: Pair(tensor, 2)),
}
"""Which of the given tensors get a hook, and what a block is given besides hidden states."""


def gives_hidden_states_twice(module, args, kwargs):
    return args, {**kwargs, "shift": args[0] if kwargs["shift"] == "hidden states" else kwargs["shift"]}


@each_engine
@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_on_what_a_block_is_given_runs_once(name, engine):
    """Also in a double backward, and in a second backward through one graph."""
    take, make = HOOKED[name]

    def run(model):
        outcomes = []
        for number in range(2):
            model.zero_grad(set_to_none=True)
            for block in model.layers:
                block.seen = []
                if not block._forward_pre_hooks:
                    block.register_forward_pre_hook(gives_hidden_states_twice, with_kwargs=True)
            leaf = torch.linspace(-1, 1, 16, requires_grad=True)
            hidden = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(number))
            loss = model(hidden, make(leaf.exp())).square().mean()
            loss.backward(retain_graph=True)
            (gradient,) = torch.autograd.grad(loss, model.first.weight, create_graph=True)
            gradient.square().sum().backward()
            results = outcome(model, loss)
            outcomes.append(results if leaf.grad is None else {**results, "leaf": leaf.grad})
        return outcomes, [len(block.seen) for block in model.layers]

    same_under(ENGINES[engine], run, lambda: custom_model(halves_gradients(take)), times=4)


def halved(gradient):
    return gradient * 0.5


def halves_what_was_summed(parameter):
    parameter.grad.mul_(0.5)


def registers_once(register):
    def run(block, hidden, shift):
        if not hasattr(block, "handle"):
            block.handle = register(block)
        return work(block, hidden, shift)

    return run


def registers_anew(block, hidden, shift):
    if hasattr(block, "handle"):
        block.handle.remove()
    block.handle = block.one.weight.register_hook(halved)
    return work(block, hidden, shift)


def removes_its_hook(block, hidden, shift):
    def hook(gradient):
        handle.remove()
        return gradient * 0.5

    handle = block.one.weight.register_hook(hook)
    return work(block, hidden, shift)


def hooked_for_the_forward(block, hidden, shift):
    """A recomputation ends inside of the last linear layer: it does not come to the removal."""
    handle = block.two.register_forward_hook(lambda module, args, output: 2 * output)
    output = work(block, hidden, shift)
    handle.remove()
    return output


def counted_for_the_forward(block, hidden, shift):
    block.depth = getattr(block, "depth", 0) + 1
    output = scaled(block, hidden, float(block.depth))
    block.depth -= 1
    return output


REGISTERS = {
    "a weight": registers_once(lambda block: block.one.weight.register_hook(halved)),
    "a weight, anew": registers_anew,
    "a weight, for one backward": removes_its_hook,
    "a sum": registers_once(lambda block: block.one.bias.register_post_accumulate_grad_hook(halves_what_was_summed)),
    "a module": registers_once(
        lambda block: block.one.register_forward_hook(lambda module, args, output: output.sin())
    ),
    "a module's backward": registers_once(
        lambda block: block.two.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    ),
    "a module, for the forward": hooked_for_the_forward,
    "no hook, but a counter": counted_for_the_forward,
}
"""What a block registers a hook on."""


@each_engine
@pytest.mark.parametrize("name", REGISTERS)
def test_a_recomputation_leaves_no_hooks(name, engine):
    def hooks_of(block):
        tensors = [block.one.weight, block.one.bias]
        boxes = [(tensor._backward_hooks, tensor._post_accumulate_grad_hooks) for tensor in tensors]
        boxes += [(module._forward_hooks, module._backward_hooks) for module in (block.one, block.two)]
        return [[len(box or ()) for box in pair] for pair in boxes], getattr(block, "depth", 0)

    def run(model):
        return steps_of(model, 5), list(map(hooks_of, model.layers))

    same_under(ENGINES[engine], run, lambda: custom_model(REGISTERS[name]), times=5)


# --- errors of a recomputation name the block -------------------------------------------------------------------------


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        output = hidden.exp()
        ctx.save_for_backward(hidden, output)
        return output

    @staticmethod
    def backward(ctx, gradient):
        assert len(ctx.saved_tensors) == 2
        return gradient * ctx.saved_tensors[1]


GLOBAL_CACHE = weakref.WeakKeyDictionary()


def keeps_a_gradient_tensor_in_a_global(block, hidden, shift):
    if block not in GLOBAL_CACHE:
        GLOBAL_CACHE[block] = (hidden * hidden).mean(-1, keepdim=True)
    return work(block, hidden * GLOBAL_CACHE[block], shift)


def differs_when_it_runs_again(kind):
    runs = []
    if kind == "reads twice":
        return lambda block, hidden, shift: work(block, ReadsTwice.apply(hidden * 0.1), shift)
    if kind == "a global cache":
        return keeps_a_gradient_tensor_in_a_global

    def run(block, hidden, shift):
        runs.append(block)
        again = len(runs) > LAYERS
        if again and kind == "an error":
            raise KeyError("not the first time")
        output = work(block, hidden * hidden if again and kind == "more tensors" else hidden, shift)
        if kind != "another shape":
            return output
        return (output.reshape(-1, 16) if again else output).sin().reshape(output.shape)

    return run


@pytest.mark.compat
@pytest.mark.parametrize("torchs", ["this torch", "another torch"])
@pytest.mark.parametrize("kind", ["an error", "more tensors", "another shape", "reads twice", "a global cache"])
@pytest.mark.parametrize("engine", RUN_AGAIN)
def test_an_error_of_a_recomputation_names_the_block(kind, engine, torchs, caplog, monkeypatch):
    if torchs == "another torch":  # whose record of a checkpointed call is not known
        monkeypatch.setattr(compat.checkpoint, "_READ", {"something else"})
    loss = custom_loss(planned(custom_model(differs_when_it_runs_again(kind)), ENGINES[engine]))
    with pytest.raises((KeyError, torch.utils.checkpoint.CheckpointError)) as raised:
        loss.backward()
    notes = getattr(raised.value, "__notes__", [record.message for record in caplog.records])  # Python 3.10 has none
    assert len(notes) == 1
    assert "block 'layers.2' raised this" in notes[0]
    assert '"policy": "selective"' in notes[0]


# --- parameters that a block writes -----------------------------------------------------------------------------------


def scales_itself(block, hidden, shift):
    with torch.no_grad():
        block.scale.mul_(0.9)
    return scaled(block, hidden, block.scale)


def scales_itself_in_data(block, hidden, shift):
    block.scale.data.mul_(0.9)
    return scaled(block, hidden, block.scale)


def adds_to_a_frozen_bias(block, hidden, shift):
    output = block.two(functional.silu(block.frozen(hidden)))
    with torch.no_grad():
        block.frozen.bias.add_(0.1)
    return output + scaled(block, hidden, block.scale)


def scales_before_anything_is_saved(block, hidden, shift):
    """The sum is saved by the activation, when the scale has changed already."""
    total = hidden + block.scale
    with torch.no_grad():
        block.scale.mul_(0.9)
    return block.two(functional.silu(total)) + work(block, hidden, None)


SCALES = [scales_itself, scales_itself_in_data, adds_to_a_frozen_bias, scales_before_anything_is_saved]


def with_scale(run):
    model = custom_model(run)
    for block in model.layers:
        block.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))
    return model


@pytest.mark.parametrize("engine", ["full", "full+selective", "selective", on_a_device])
@pytest.mark.parametrize("block_run", SCALES)
def test_a_parameter_that_a_block_writes_is_written_once(block_run, engine):
    def run(model):
        outcomes = []
        for number in range(STEPS):
            model.zero_grad(set_to_none=True)
            loss = custom_loss(model, number)
            loss.backward(retain_graph=True)
            loss.backward()
            outcomes.append(outcome(model, loss))
        return outcomes, [(block.scale.tolist(), block.frozen.bias.tolist()) for block in model.layers]

    same_under(ENGINES[engine], run, lambda: with_scale(block_run), times=2 * STEPS)


class Codes(torch.Tensor):
    """A weight of a type with few operations, such as those of quantisation: it can be neither copied nor compared."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (16,))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.detach.default  # by `nn.Parameter`
        return cls()


@each_engine
def test_a_weight_that_has_no_copy_is_left_alone(engine):
    def make():
        model = custom_model()
        for block in model.layers:
            block.codes = nn.Parameter(Codes(), requires_grad=False)
        return model

    same_under(ENGINES[engine], steps_of, make, times=3)


@each_engine
def test_a_large_parameter_that_a_first_forward_writes_is_refused_by_name(engine):
    """There is no copy of it, so that it would be written once more."""

    def run(block, hidden, shift):
        with torch.no_grad():
            block.large.mul_(0.5)
        return scaled(block, hidden, block.large[:16])

    model = custom_model(run)
    for block in model.layers:
        block.large = nn.Parameter(torch.ones(2**17))
    loss = custom_loss(planned(model, ENGINES[engine]))
    with pytest.raises(ChangedBlockError, match=r"block 'layers\.2': `large` was overwritten"):
        loss.backward()
    assert [block.large[0].item() for block in model.layers] == [0.5] * LAYERS


@torch.jit.script
def scripted_product(hidden, scale):
    return hidden * scale


@each_engine
def test_a_parameter_that_a_scripted_function_reads_is_refused_by_name(engine):
    """TorchScript raises its own error in place of any other."""
    model = with_scale(lambda block, hidden, shift: work(block, scripted_product(hidden, block.scale), shift))
    loss = custom_loss(planned(model, ENGINES[engine]))
    with torch.no_grad():
        model.layers[2].scale.mul_(2)
    with pytest.raises(ChangedBlockError, match=r"block 'layers\.2': `scale` was overwritten"):
        loss.backward()


def test_an_inference_tensor_leaves_the_other_tensors_compared():
    """A mask that was made in an evaluation has no version."""
    model = custom_model()
    for block in model.layers:
        with torch.inference_mode():
            block.register_buffer("mask", torch.ones(16))
    loss = custom_loss(planned(model, "full"))
    with torch.no_grad():
        model.layers[2].one.weight.mul_(2)
    with pytest.raises(ChangedBlockError, match=r"block 'layers\.2': `one\.weight` was overwritten"):
        loss.backward()


# --- parameters: values that are gone, or change nothing --------------------------------------------------------------


def loss_of(model):
    return model(**without_cache(model, tiny_batch("llama"))).loss


def set_data(model):
    for parameter in model.model.layers[1].parameters():
        parameter.data = parameter.data * 2


def stepped(model):
    with torch.no_grad():
        for parameter in model.model.layers[1].parameters():
            parameter.mul_(2)


@any_engine
@pytest.mark.parametrize("change", [set_data, stepped])
def test_overwritten_values_are_an_error_that_names_them(change, engine):
    model = planned(tiny_model("llama"), ENGINES[engine])
    loss = loss_of(model)
    change(model)
    rebuilds = isinstance(installation(model).regions["model.layers.1"], RebuildRegion)
    error = InPlaceError if rebuilds and change is stepped else ChangedBlockError
    with pytest.raises(error, match=r"model\.layers\.1") as raised:
        loss.backward()
    assert raised.value.block == "model.layers.1"
    assert error is InPlaceError or "was overwritten between the forward and the backward" in str(raised.value)
    assert all(module.training for module in model.modules())


def test_merging_adapters_is_a_named_error():
    model = planned(two_adapters(tiny_model("llama")), ENGINES["full"])
    loss = loss_of(model)
    model.merge_adapter()
    with pytest.raises(ChangedBlockError, match="merged into its weights"):
        loss.backward()


@pytest.mark.parametrize("engine", ["full", "full+selective", "selective", "save attention"])
def test_parameters_that_are_not_used_may_change(engine):
    """An optimizer may step one adapter before the backward of the other."""

    def run(model):
        torch.manual_seed(3)
        model.set_adapter("default")
        loss = loss_of(model)
        model.set_adapter("critic")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "critic" in name:
                    parameter.add_(1.0)
        loss.backward()
        model.requires_grad_(True)
        return outcome(model, loss)

    same_under(ENGINES[engine], run, lambda: two_adapters(tiny_model("llama")))


def state_of(model):
    """Everything that a change may affect."""
    return snapshot(model), [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]


@pytest.mark.trap(36)
def test_the_model_stays_as_the_change_left_it():
    """A recomputation leaves the model as it was after the change, even if it raises an error."""
    model = planned(two_adapters(tiny_model("llama")), "full")
    layers = base_model(model).model.layers
    loss = loss_of(model)
    model.set_adapter("critic")
    model.eval()
    before = state_of(layers)
    loss.backward()
    assert state_of(layers) == before
    model.train()
    loss = loss_of(model)
    model.set_adapter("default")
    layers[0].mlp.down_proj.weight.data = torch.zeros(32, 64)
    before = state_of(layers)
    with pytest.raises(ChangedBlockError, match=r"down_proj\.weight"):
        loss.backward()
    assert state_of(layers) == before


def test_nothing_is_compared_where_parameters_come_and_go():
    model = planned(tiny_model("llama"), "full")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            vars(module)["_hf_hook"] = None  # accelerate's mark on modules that it moves
    loss = loss_of(model)
    set_data(model)
    with contextlib.suppress(RuntimeError):
        loss.backward()
    assert set(hf_ckpt.describe(model).recomputed.values()) == {1}


def test_counts_of_deepspeed_go_on():
    """DeepSpeed's counters on modules also count recomputations; they are neither compared nor restored."""
    model = planned(tiny_model("llama"), "full")
    inner = model.model.layers[0].self_attn
    inner.applied_pre_backward_ref_cnt = 0

    def count(module, args, output):
        module.applied_pre_backward_ref_cnt += 1

    inner.register_forward_hook(count)
    loss = loss_of(model)
    model.eval()  # so that some state is restored
    loss.backward()
    assert inner.applied_pre_backward_ref_cnt == 2


@pytest.mark.skipif(not compat.transformers.HOOKS_STAY_OUTSIDE, reason="a block runs together with its hooks")
def test_a_hook_on_the_block_itself_is_no_setting_of_it():
    """Such as those of a measured step: nothing is walked over anew. A hook inside the block is a setting."""
    model, batch = planned(tiny_model("llama"), "full"), tiny_batch("llama")
    step(model, batch)
    block = model.model.layers[1]
    region = installation(model).regions["model.layers.1"]
    seen = [region.settings]
    for module in (block, block.mlp):
        module.register_forward_hook(lambda *_: None)
        step(model, batch)
        seen.append(region.settings)
    assert seen[1] is seen[0]
    assert seen[2] is not seen[1]
