"""Hidden states, or what `selective` keeps, in host memory: the same gradients, exact bytes, no copy used too early.

Without an accelerator a lane of the tests stands in for its stream. `Delayed` does a copy only when it is waited for;
until then the host buffer and what comes back hold NaN, and the source is held by nobody but the engine.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import logging
import math
import pickle
import random
import threading
import types
import weakref

import conftest
import pytest
import torch
from conftest import assert_frees_everything, assert_same, enable, gradients, step, without_cache
from peft import LoraConfig, get_peft_model
from test_rebuild import TARGETS
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_ckpt
from hf_ckpt.engines import offload
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.offload import Group, Mover, OffloadRegion, StreamLane
from hf_ckpt.engines.rebuild import RebuildRegion
from hf_ckpt.errors import InPlaceError, PlanMismatchError, SpecError
from hf_ckpt.families import find_blocks
from hf_ckpt.install import installation
from hf_ckpt.measure import LiveBytes
from hf_ckpt.spec import Spec
from hf_ckpt.tiny import FAMILIES, tiny_batch, tiny_model

OFFLOAD = {"policy": "offload"}
SAVED = {"policy": "selective", "offload": "saved"}
SPECS = {"offload": OFFLOAD, "saved": SAVED, "attention": {**SAVED, "save": ["attention"]}}
HIDDEN = 2 * 16 * 32 * 4  # bytes of the hidden states of `tiny_batch`
each_family = pytest.mark.parametrize("family", FAMILIES)
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
each_kind = pytest.mark.parametrize("spec", [OFFLOAD, SAVED], ids=["offload", "saved"])


class Delayed:
    """A stream on which nothing happens before somebody waits for it."""

    def __init__(self, device=None):
        self.queue = []
        self.log = []
        """("out" or "back", bytes)"""
        self.sources = []
        """Storages that were moved, weakly."""
        self.dropped = 0

    def out(self, tensor, host):
        assert (host.dtype, host.stride()) == (tensor.dtype, tensor.stride())
        assert not tensor.requires_grad, "a copy with a graph would hold the tensor"
        host.fill_(math.nan)
        self.log.append(("out", tensor.nbytes))
        self.sources.append(weakref.ref(tensor.untyped_storage()))
        return self._begin(weakref.ref(tensor), lambda source: host.copy_(source))

    def back(self, host):
        made = torch.full_like(host, math.nan)
        self.log.append(("back", host.nbytes))
        return made, self._begin(weakref.ref(made), lambda target: target.copy_(host))

    def _begin(self, tensor, work):
        copying = [tensor, work, False]
        self.queue.append(copying)
        return copying

    def drain(self, count):
        for copying in self.queue[:count]:
            tensor, work, _ = copying
            if tensor() is not None:
                with torch.no_grad():
                    work(tensor())
            copying[2] = True
        del self.queue[:count]

    def wait(self, copying):
        while not copying[2]:
            assert self.queue, "two threads at once"
            self.drain(1)

    def drop(self, copying):
        self.dropped += not copying[2]


class Eager(Delayed):
    """A stream that is always faster than the rest."""

    def out(self, tensor, host):
        copying = super().out(tensor, host)
        self.wait(copying)
        return copying

    def back(self, host):
        made, copying = super().back(host)
        self.wait(copying)
        return made, copying


class DeviceBytes(LiveBytes):
    """Leaves the host's buffers out. They are the only `uint8` storages of a power of two."""

    def __init__(self, *holders):
        self.host = set()
        super().__init__(*holders)

    def _count(self, tensor):
        size = tensor.untyped_storage().nbytes()
        if tensor.dtype is torch.uint8 and size & (size - 1) == 0:
            self.host.add(tensor.untyped_storage()._cdata)
        return tensor.untyped_storage()._cdata not in self.host and super()._count(tensor)


@pytest.fixture
def lanes(monkeypatch):
    """The lanes that are made, instead of an accelerator's; nothing is too small to be moved."""
    made = []
    monkeypatch.setattr(offload, "lane_of", lambda device: made.append(lane_class()) or made[-1])
    monkeypatch.setattr(offload, "LEAST_BYTES", 0)
    lane_class = Delayed
    return made


@pytest.fixture(autouse=True)
def say_again():
    """What is said once is said once a test."""
    for name in ("_tell_no_lane", "_tell_limit", "_tell_unpinned", "_tell_hooks"):
        getattr(offload, name).cache_clear()


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == offload.__name__]


def installed(model, spec=OFFLOAD):
    hf_ckpt.install(model, spec)
    enable(model)
    return model


def ours(family="llama", spec=OFFLOAD, **options):
    return installed(tiny_model(family, **options), spec)


def regions(model):
    return list(installation(model).regions.values())


def mover(model):
    (found,) = {region.mover for region in regions(model) if getattr(region, "mover", None) is not None}
    return found


def moved(model):
    return hf_ckpt.describe(model).moved


def same_steps(run, family="llama", spec=OFFLOAD, **options):
    """`run` gives the same with and without offloading, and something was moved."""
    model = ours(family, spec, **options)
    assert_same(run(tiny_model(family, **options)), run(model), f"{family} {spec}")
    assert moved(model)
    assert sum(hf_ckpt.describe(model).recomputed.values()) > 0
    return model


# --- the same gradients ---------------------------------------------------------------------------------------------


def with_lora(model, family):
    torch.manual_seed(1)
    config = LoraConfig(
        r=4, lora_dropout=0.1, init_lora_weights=False, target_modules=TARGETS[family], fan_in_fan_out=family == "gpt2"
    )
    return get_peft_model(model, config)


@contextlib.contextmanager
def arguments_of_blocks(model):
    """Storages of all that blocks are given beside their hidden states."""
    found = []

    def look(block, args, kwargs):
        tensors = torch.utils._pytree.tree_leaves((args[1:], kwargs))
        found.extend(tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor))

    blocks = find_blocks(model).modules.values()
    handles = [block.register_forward_pre_hook(look, with_kwargs=True) for block in blocks]
    yield found
    for handle in handles:
        handle.remove()


MODES = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": True},
    "dropout": {"dropout": 0.1},
    "lora": {"lora": True},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@each_spec
@each_family
def test_gradients_are_those_of_no_checkpointing(family, spec, mode, lanes):
    autocast, lora = mode.get("autocast", False), mode.get("lora", False)
    options = {name: value for name, value in mode.items() if name not in ("autocast", "lora")}

    batch = tiny_batch(family)
    batch["attention_mask"][0, -3:] = 0

    def run(model):
        model = with_lora(model, family) if lora else model
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return step(model, batch)

    model = ours(family, spec, **options)
    with arguments_of_blocks(model) as others:
        assert_same(run(tiny_model(family, **options)), run(model))
    assert len(others) > 0
    stay = {id(storage) for storage in others} | {id(p.untyped_storage()) for p in model.parameters()}
    (lane,) = lanes
    assert not {id(source()) for source in lane.sources} & stay
    assert not lane.queue or lane.queue[-1][2] is False  # what was dropped

    found, again = moved(model), hf_ckpt.describe(model).recomputed
    blocks = list(find_blocks(model).modules)
    last = {"encoder.block.3", "decoder.block.3"} if family == "t5" else {blocks[-1]}
    assert found.keys() == set(blocks) - last
    if spec is OFFLOAD:
        size = 2 * 16 * 32 * options.get("dtype", torch.float32).itemsize
        assert found == {name: size // 2 if name.startswith("decoder.block") else size for name in found}
        assert again == dict.fromkeys(blocks, 1)
        assert mover(model).held_bytes == sum(found.values())
    else:
        assert all(found.values())
        assert sum(again.values()) > 0


@pytest.mark.compat
@each_kind
@each_family
def test_steps_and_accumulation(family, spec, lanes):
    """Also without a lane that poisons: buffers are used again, and no more are taken."""
    held = []

    def run(model):
        torch.manual_seed(0)
        for seed in range(3):
            (model(**without_cache(model, tiny_batch(family, seed=seed))).loss / 3).backward()
            held.append(mover(model).held_bytes if installation(model) else 0)
        return gradients(model)

    same_steps(run, family, spec, dropout=0.1)
    assert 0 < held[-3] == held[-2] == held[-1]


def test_switched_off_nothing_is_moved(lanes, monkeypatch):
    """What every test here is worth."""
    monkeypatch.setattr(Group, "send", lambda self, tensor: None)
    for spec in SPECS.values():
        with pytest.raises(AssertionError):
            same_steps(lambda model: step(model, tiny_batch("llama")), spec=spec)


@pytest.mark.compat
@pytest.mark.parametrize("spec", [OFFLOAD, {"policy": "full", "offload": True}, SAVED], ids=str)
def test_on_the_cpu_it_is_full_and_said_once(spec, caplog):
    model = ours(spec=spec)
    for _ in range(2):
        assert_same(step(tiny_model("llama"), tiny_batch("llama")), step(model, tiny_batch("llama")))
    assert moved(model) == {}
    (message,) = said(caplog)
    assert "no host memory to offload to from 'cpu'" in message
    if spec is not SAVED:
        assert set(hf_ckpt.describe(model).recomputed.values()) == {2}


# --- bytes ----------------------------------------------------------------------------------------------------------


FIRST = {"llama": "input_layernorm", "gpt2": "ln_1", "bert": "attention.self.query", "t5": "layer.0.layer_norm"}


def at_start_of_blocks(model, family, note):
    """Call `note` with a block's number when its first module runs: hooks of the block itself may not run again."""
    for number, block in enumerate(find_blocks(model).modules.values()):
        first = block.get_submodule(FIRST[family])
        first.register_forward_pre_hook(lambda *_, number=number: note(number))


@each_family
def test_hidden_states_leave_the_device(family, lanes, monkeypatch):
    """Against `full` all of them but the last of each stack; and when a block is recomputed, its own and those of the
    block before it are back."""
    monkeypatch.setattr(offload, "lane_of", Eager)
    stays, recomputing = [], []
    batch = tiny_batch(family, tokens=64)
    for spec in ("full", "offload"):
        model = ours(family, {"policy": spec}, layers=6)
        step(model, batch)
        model.zero_grad(set_to_none=True)
        with DeviceBytes(model) as live:
            outputs = model(**without_cache(model, batch))
            stays.append(live.current_bytes - live.start_bytes)
            recomputing.append([])
            at_start_of_blocks(model, family, lambda _, live=live: recomputing[-1].append(live.current_bytes))
            outputs.loss.backward()
    hidden = 4 * HIDDEN
    away = [5, 3, 2, 1, 0, 0]  # of 5 that are moved; the block whose hidden states are not is recomputed first
    if family == "t5":  # its decoder has half of the tokens
        assert stays[0] - stays[1] == 5 * hidden + 5 * hidden // 2
        away = [5 + 5 / 2, 5 + 3 / 2, 5 + 2 / 2, 5 + 1 / 2, 5, 4, 4, 3, 2, 1, 0, 0]
    else:
        assert stays[0] - stays[1] == 5 * hidden
    assert [full - offloaded for full, offloaded in zip(*recomputing, strict=True)] == [few * hidden for few in away]


@each_family
def test_in_backward_no_more_than_two_hidden_states_are_back(family, lanes, monkeypatch):
    alive = weakref.WeakSet()
    most = []

    class Counting(Eager):
        def back(self, host):
            made, copying = super().back(host)
            alive.add(made.untyped_storage())
            most.append(len(alive))
            return made, copying

    monkeypatch.setattr(offload, "lane_of", Counting)
    model = ours(family, layers=6)
    step(model, tiny_batch(family))
    assert len(most) == len(moved(model))
    assert max(most) == 2
    assert not alive


def test_a_copy_back_begins_one_block_ahead(lanes):
    """Before the block after it is recomputed; the first of a backward begins when it is needed."""
    model = ours(layers=5)
    at_start_of_blocks(model, "llama", lambda number: lanes[0].log.append(number))
    loss = model(**tiny_batch("llama")).loss
    out, back = ("out", HIDDEN), ("back", HIDDEN)
    assert lanes[0].log == [out, 0, out, 1, out, 2, out, 3, 4]
    lanes[0].log.clear()
    loss.backward()
    assert lanes[0].log == [4, back, back, 3, back, 2, back, 1, 0]


def test_what_is_needed_first_comes_back_first(lanes):
    model = ours(spec=SAVED)
    loss = model(**tiny_batch("llama")).loss
    sent = [size for kind, size in lanes[0].log if kind == "out"]
    lanes[0].log.clear()
    loss.backward()
    assert [size for kind, size in lanes[0].log if kind == "back"] == sent[::-1]


def test_what_selective_keeps_is_moved_once(lanes):
    """The block's input and what it made; not what else it was given."""
    weight, mask = torch.randn(4, 4, requires_grad=True), torch.randn(8, 4) * 1
    pool = Mover()

    def run(region, autocast=False):
        x = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = region(lambda hidden, mask: ((hidden @ weight).sin() * mask.exp() * mask).sum(), x * 1, mask * 1)
        pool.end_of_block(None)
        return torch.autograd.grad(out, [x, weight])

    region = RebuildRegion("toy", save=("linear", "attention"), mover=pool)
    for autocast, product in ((False, 128), (True, 64)):
        expected = run(lambda function, *args: function(*args), autocast)
        assert all(map(torch.equal, run(region, autocast), expected))
        assert lanes[0].log == [("out", 128), ("out", product), ("back", product), ("back", 128)]
        assert region.moved_bytes == 128 + product
        lanes[0].log.clear()


def test_copies_of_results_are_waited_for_one_block_later(lanes):
    """At the end of the next block, or of the stack; and a result that is changed in between is found."""
    pool = Mover()
    regions = [RebuildRegion(name, save=("linear", "attention"), mover=pool) for name in ("one", "two")]
    weights = [torch.randn(4, 4, requires_grad=True) for _ in regions]

    def run():
        hidden, ended = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_() * 1, []
        for region, weight in zip(regions, weights, strict=True):
            hidden = region(lambda given, weight=weight: (given @ weight).sin(), hidden)
            ended.append(len(lanes[0].queue))
        return hidden, ended

    expected = torch.autograd.grad((run()[0] * 1).sum(), weights)
    lanes[0].log.clear()
    pool.end_of_block(None)
    out, ended = run()
    assert all(ended)  # the copies of the block that has just ended are under way, and no others
    assert ended[1] <= ended[0] + 1
    pool.end_of_block(None)
    assert not lanes[0].queue
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), weights), expected))
    out, _ = run()
    saved = pool._last.open._open[-1]._tensor
    with torch.no_grad():
        saved.mul_(2)
    with pytest.raises(InPlaceError, match="block 'two'"):
        out.sum().backward()
    with pytest.raises(InPlaceError, match="block 'two'"):
        pool.end_of_block(None)


def test_views_share_a_copy(lanes):
    """Until the last of them is there again; the copy is made anew for another backward."""
    lane, pool = Delayed(), Mover()
    x = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_() * 1
    group = pool.open("block", lane, x)
    y = x * 2
    cast = nn.Parameter(torch.ones(8, 4)).to(torch.bfloat16)  # autocast lends it to all
    tensors = [y, y[1:3], y.t(), y[:, 2], x, y.view(torch.int32), cast, y > 0]
    packed = [group.pack(tensor) for tensor in tensors]
    for left, tensor in zip(packed[5:], tensors[5:], strict=True):  # as it is, but without the graph that made it
        assert left.tensor.data_ptr() == tensor.data_ptr()
        assert left.tensor.grad_fn is None
    expected = [tensor.clone() for tensor in tensors]
    group.close()
    assert lane.log == [("out", 128)] * 2 == [("out", y.nbytes), ("out", x.nbytes)]
    for _ in range(2):
        lane.log.clear()
        for got, tensor, wanted in zip(map(group.unpack, packed), tensors, expected, strict=True):
            assert torch.equal(got, wanted)
            assert got.stride() == tensor.stride()
        assert lane.log == [("back", 128)] * 2
        assert all(entry.slot._arriving is None for entry in packed[:5])
    changed = pool.open("block", lane, x)
    one = changed.pack(x * 1)
    with torch.no_grad():
        one.slot._tensor.add_(1.0)
    with pytest.raises(InPlaceError, match="block 'block'"):
        changed.close()


# --- host memory ----------------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize(("tokens", "buffer"), [(16, 4096), (17, 8192), (32, 8192)])
def test_a_host_budget_counts_powers_of_two(tokens, buffer, lanes, caplog):
    batch = tiny_batch("llama", tokens=tokens)
    for limit, count in ((3 * buffer, 3), (3 * buffer - 1, 2), (buffer, 1), (buffer - 1, 0)):
        model = ours(spec={**OFFLOAD, "host_budget": limit})
        caplog.clear()
        for _ in range(2):
            assert_same(step(tiny_model("llama"), batch), step(model, batch))
            assert list(moved(model).values()) == [2 * tokens * 32 * 4] * count
            assert mover(model).held_bytes == count * buffer
        assert len(said(caplog)) == (count < 3)
        assert all("`host_budget`" in message for message in said(caplog))


@each_spec
def test_whatever_the_host_budget_gradients_stay(spec, lanes):
    expected = step(tiny_model("llama"), tiny_batch("llama"))
    for limit in (1, 5000, 20_000, 50_000, 80_000):
        model = ours(spec={**spec, "host_budget": limit})
        for _ in range(2):
            assert_same(expected, step(model, tiny_batch("llama")))
            assert mover(model).held_bytes <= limit


def test_longer_batches_get_buffers_of_their_own(lanes):
    """A budget that shorter ones have used up is not lost, and what came first does not stay in the way."""
    model = ours(spec={**OFFLOAD, "host_budget": 3 * 8192})
    counts = []
    for tokens in (8, 16, 32, 16, 8, 32):
        step(model, tiny_batch("llama", tokens=tokens))
        counts.append(len(moved(model)))
        assert mover(model).held_bytes <= 3 * 8192
    step(model, tiny_batch("llama", tokens=256))
    assert moved(model) == {}
    assert counts[0] == counts[1] == counts[4] == 3
    assert min(counts[2:]) >= 1


def test_pools_of_a_mover():
    lane, other = Delayed(), Delayed()
    pool = Mover(limit_bytes=64, make_lane=Delayed)
    assert [pool.take(lane, size).numel() for size in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]
    assert pool.held_bytes == 55
    assert pool.take(lane, 10) is None
    small = pool.take(lane, 8)
    pool.give(lane, small)
    assert pool.take(other, 8) is None  # copies of the other lane may still read from it
    assert pool.take(lane, 7) is small
    pool = Mover(limit_bytes=64, make_lane=Delayed)
    buffers = [pool.take(lane, 16) for _ in range(4)]
    for buffer in buffers[:3]:
        pool.give(lane, buffer)
    assert pool.take(lane, 3) is not None  # in one that is larger than needed
    assert pool.take(lane, 32) is None  # while others are in use
    pool.give(lane, buffers[3])
    assert pool.held_bytes == 64


@pytest.mark.compat
def test_memory_that_cannot_be_pinned(lanes, monkeypatch, caplog):
    empty, asked = torch.empty, []

    def refusing(*args, **options):
        asked.append(options.get("pin_memory", False))
        if asked[-1]:
            raise RuntimeError(f"no more pages: {len(asked)}\nand a stack")
        return empty(*args, **options)

    pool = Mover()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refusing)
        patch.setattr(offload.compat, "accelerator_type", lambda: "cuda")
        for size in (5, 5, 9):
            assert pool.take(Delayed(), size).device.type == "cpu"
    assert asked == [True, False, False, False]
    assert pool.held_bytes == 8 + 8 + 16
    (message,) = said(caplog)
    assert "cannot be pinned (no more pages: 1)" in message


def test_buffers_are_of_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        assert Mover().take(Delayed(), 5).device.type == "cpu"


# --- order on a stream ----------------------------------------------------------------------------------------------


class FakeStream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        event = f"event {sum('records' in entry for entry in self.log)}"
        self.log.append(f"{self.name} records {event}")
        return event

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


class FakeDevice:
    """What `torch.get_device_module` would return."""

    def __init__(self):
        self.log = []
        self.current = self.main = FakeStream(self.log, "main")

    def Stream(self, device):
        return FakeStream(self.log, "side")

    def current_stream(self, device):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Noting(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in ("copy_", "empty_strided"):
            self.device.log.append(f"{name} on {self.device.current.name}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device(monkeypatch):
    made = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: made.log.append(f"guarded for {stream.name}")
    )
    with Noting(made):
        yield made


OUT = ["side waits for main", "copy_ on side", "side records event 0"]
BACK = ["empty_strided on main", "side waits for main", "copy_ on side", "side records event 0"]


@pytest.mark.compat
def test_a_stream_lane_waits_where_it_must(device):
    lane = StreamLane(torch.device("cpu"))
    tensor, host = torch.ones(3, requires_grad=True), torch.empty(3)
    copying = lane.out(tensor, host)
    assert device.log == OUT
    assert not host.requires_grad
    lane.wait(copying)
    assert device.log[3:] == ["main waits for event 0"]
    device.log.clear()
    made, copying = lane.back(host)
    assert device.log == BACK
    lane.wait(copying)
    assert device.log[4:] == ["main waits for event 0"]  # and nothing that would keep the memory from being used again
    assert torch.equal(made, tensor)


def test_a_stream_lane_under_another_stream(device):
    """What is used there was allocated elsewhere; and what nobody waited for is let go after it was written."""
    lane = StreamLane(torch.device("cpu"))
    _, copying = lane.back(torch.ones(3))
    device.log.clear()
    device.current = FakeStream(device.log, "another")
    lane.wait(copying)
    assert device.log == ["another waits for event 0", "guarded for another"]
    device.log.clear()
    lane.drop(copying)
    assert device.log == ["main waits for event 0"]


def test_a_block_on_a_stream(device):
    """Its copy is waited for when it ends, also by an error; a copy back that nobody asked for when it is let go."""
    mover = Mover(make_lane=lambda device: StreamLane(device))
    first, second = OffloadRegion("0", mover), OffloadRegion("1", mover)
    x = torch.randn(4, 4, requires_grad=True) * 1
    one = first(lambda hidden: hidden.sin(), x)
    two = second(lambda hidden: hidden.sin(), one)
    waits = ["main waits for event 0", "main waits for event 1"]
    assert [entry for entry in device.log if entry.startswith("main waits")] == waits
    device.log.clear()
    torch.autograd.grad(two.sum(), one)  # the first block's hidden states come back for nothing
    assert device.log.count("copy_ on side") == 2
    assert [entry for entry in device.log if entry.startswith("main waits")] == waits[:1]
    del one, two
    assert device.log[-1] == "main waits for event 1"
    device.log.clear()
    with pytest.raises(ZeroDivisionError):
        first(lambda hidden: 1 / 0, x)
    assert device.log == [*OUT, "main waits for event 0"]


def test_devices_without_streams_have_no_lane(monkeypatch):
    assert offload.lane_of(torch.device("cpu")) is None
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace())
    assert offload.lane_of(torch.device("mps")) is None


# --- what users do around it ----------------------------------------------------------------------------------------


class Stress:
    """Forwards, backwards and accidents in random order; gradients must always be those of the reference."""

    SHAPES = ((1, 5), (2, 16), (3, 9))
    PENDING = 4

    def __init__(self, model, reference, lanes, seed):
        self.model, self.random, self.lanes = model, random.Random(seed), lanes
        self.pending = []
        self.expected = {}
        self.backwards = 0
        self.reference = {
            key: {name: value for name, value in self._step(reference, key).items() if name != "loss"}
            for key in itertools.product(range(len(self.SHAPES)), range(2))
        }

    def _batch(self, key):
        (batch, tokens), seed = self.SHAPES[key[0]], key[1]
        return {**tiny_batch("llama", batch=batch, tokens=tokens, seed=seed), "use_cache": False}

    def _step(self, model, key):
        return step(model, self._batch(key), seed=sum(key))

    def forward(self, key=None):
        if len(self.pending) < self.PENDING:
            key = key or self.random.choice(list(self.reference))
            torch.manual_seed(sum(key))
            self.pending.append((self.model(**self._batch(key)).loss, key))

    def take(self):
        return self.pending.pop(self.random.randrange(len(self.pending)))

    def backward(self):
        if self.pending:
            loss, key = self.take()
            loss.backward()
            self._count(self.reference[key])

    def backward_of_two(self):
        if len(self.pending) > 1:
            (one, first), (other, second) = self.take(), self.take()
            (one + other).backward()
            self._count({name: value + self.reference[second][name] for name, value in self.reference[first].items()})

    def backward_twice(self):
        if self.pending:
            loss, key = self.take()
            loss.backward(retain_graph=True)
            self._count(self.reference[key])
            if self.random.random() < 0.5:
                loss.backward()
                self._count(self.reference[key])

    def part_of_a_backward(self):
        if self.pending:
            loss, _ = self.random.choice(self.pending)
            torch.autograd.grad(loss, self.model.model.layers[1].mlp.up_proj.weight, retain_graph=True)

    def drop(self):
        if self.pending:
            self.take()

    def _count(self, made):
        self.backwards += 1
        for name, value in made.items():
            self.expected[name] = value if name not in self.expected else self.expected[name] + value

    def raises(self):
        if len(self.pending) < self.PENDING:
            place = self.random.choice(["self_attn", "mlp"])
            module = getattr(self.random.choice(self.model.model.layers), place)
            handle = module.register_forward_pre_hook(lambda *_: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                self.model(**self._batch((1, 0)))
            handle.remove()

    def without_gradients(self):
        self.model.train(self.random.random() < 0.5)
        with torch.no_grad():
            assert math.isfinite(self.model(**self._batch((0, 0))).loss)
        self.model.train()

    def zero(self):
        self.model.zero_grad(set_to_none=True)
        self.expected.clear()

    def drain(self):
        self.lanes[0].drain(self.random.randrange(6))

    def any(self):
        actions = (self.forward, self.backward, self.drain, self.drop, self.backward_of_two, self.backward_twice)
        rare = (self.part_of_a_backward, self.raises, self.without_gradients, self.zero)
        self.random.choices((*actions, *rare), weights=(9, 5, 4, 1, 2, 1, 1, 1, 1, 1))[0]()
        for name, parameter in self.model.named_parameters():
            expected = self.expected.get(name)
            assert (expected is None) == (parameter.grad is None)
            assert expected is None or torch.equal(expected, parameter.grad), name


def groups():
    """How many there are."""
    gc.collect()
    return sum(type(thing) is Group for thing in gc.get_objects())


@each_kind
def test_two_hundred_steps_in_any_order(spec, lanes, caplog, recwarn):
    before = groups()
    options = {"layers": 3, "dropout": 0.1}
    stress = Stress(ours(spec=spec, **options), tiny_model("llama", **options), lanes, seed=3)
    step(stress.model, stress._batch((1, 0)))
    stress.zero()
    gc.collect()
    gc.disable()
    try:
        with DeviceBytes(stress.model) as live:
            for shape in range(len(Stress.SHAPES)):  # as much of everything as there will ever be
                for _ in range(Stress.PENDING):
                    stress.forward((shape, 0))
                while stress.pending:
                    stress.drop()
            held = mover(stress.model).held_bytes
            for _ in range(200):
                stress.any()
                assert mover(stress.model).held_bytes == held
            stress.pending.clear()
            stress.zero()
            assert abs(live.current_bytes - live.start_bytes) <= 2048  # what transformers caches
    finally:
        gc.enable()
    assert mover(stress.model)._in_use == 0
    assert groups() == before
    assert stress.backwards > 30
    assert len(lanes) == 1
    assert not recwarn.list
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@each_spec
@each_family
def test_a_forward_without_a_backward_frees_everything(family, spec, lanes, monkeypatch):
    monkeypatch.setattr(conftest, "LiveBytes", DeviceBytes)
    model = ours(family, spec)
    assert_frees_everything(model, tiny_batch(family))
    assert mover(model)._in_use == 0


@each_kind
def test_one_kept_graph(spec, lanes):
    def run(model):
        torch.manual_seed(0)
        loss = model(**without_cache(model, tiny_batch("llama"))).loss
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        if installation(model):  # nothing is copied twice in one backward, nor left behind by it
            sizes = [size for kind, size in lanes[0].log if kind == "back"]
            assert len(sizes) == 2 * lanes[0].log.count(("out", sizes[0])) or spec is SAVED
            assert sum(sizes) == 2 * sum(moved(model).values())
        torch.autograd.grad(loss, next(model.model.layers[2].parameters()), retain_graph=True)
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    model = same_steps(run, spec=spec, dropout=0.1)
    assert mover(model)._in_use == 0


@each_kind
def test_a_second_derivative(spec, lanes):
    def run(model):
        torch.manual_seed(0)
        parameters = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        loss = model(**without_cache(model, tiny_batch("llama"))).loss
        found = torch.autograd.grad(loss, parameters, create_graph=True)
        sum(gradient.square().sum() for gradient in found).backward()
        return gradients(model)

    same_steps(run, spec=spec)


@each_kind
def test_backward_in_another_thread(spec, lanes):
    def run(model):
        torch.manual_seed(0)
        losses = [model(**without_cache(model, tiny_batch("llama", seed=seed))).loss for seed in range(3)]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
            thread.join()
        return gradients(model)

    same_steps(run, spec=spec)


def test_two_threads_in_one_graph(lanes):
    """Each backward has its own hidden states back, or the same ones; none is let go too early."""
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
    """LayerDrop: chains of copies go over what did not run."""

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


@pytest.mark.parametrize("make", [lambda x: x.transpose(0, 1), lambda x: x[:, :, :4], lambda x: x[:1].expand(3, 6, 8)])
def test_hidden_states_that_are_not_contiguous(make, lanes):
    """Their strides come back with them; what does not lie dense stays."""
    x = torch.randn(5, 6, 8, requires_grad=True)
    weight = torch.randn(8, 8)
    expected = torch.autograd.grad((make(x * 1).matmul(weight[: make(x).shape[-1]]).sin() ** 2).sum(), x)[0]
    region = OffloadRegion("block", Mover())
    seen = []

    def block(hidden):
        seen.append(hidden.stride())
        return hidden.matmul(weight[: hidden.shape[-1]]).sin() ** 2

    out = region(block, make(x * 1))
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
    assert seen[0] == seen[1]
    assert region.moved_bytes == (x.nbytes if make(x).numel() == x.numel() else 0)


def test_what_would_stay_anyway_is_not_moved(lanes):
    """Leaves, views of them, integers, subclasses; and nothing where no gradient is needed."""
    weight = nn.Parameter(torch.randn(4))
    for hidden in (
        weight,
        weight.view(2, 2),
        torch.zeros(4, dtype=torch.long),
        torch.zeros(0),
        torch.zeros(4).as_subclass(type("Sub", (torch.Tensor,), {})),
    ):
        region = OffloadRegion("block", Mover())
        region(lambda x: x * weight.sum(), hidden).sum().backward()
        assert region.moved_bytes == 0
        assert region.forwards == region.recomputed == 1
    assert lanes == []


def test_one_tensor_given_to_two_blocks(lanes):
    def run(call):
        x = torch.linspace(-1, 1, 12).requires_grad_()
        hidden = x * 1
        (call(torch.sin, hidden) * call(torch.tanh, hidden)).sum().backward()
        return x.grad

    pool = Mover()
    blocks = iter([OffloadRegion("0", pool), OffloadRegion("1", pool)])
    assert torch.equal(run(lambda function, x: function(x)), run(lambda function, x: next(blocks)(function, x)))
    assert pool._in_use == 0


def test_frozen_blocks_below_the_first_that_trains(lanes):
    """Nothing is needed of them in backward: nothing is moved after the first forward, until they are unfrozen."""

    def frozen(model, frozen=True):
        for part in (model.model.embed_tokens, *model.model.layers[:3]):
            part.requires_grad_(not frozen)
        return model

    plain, model = frozen(tiny_model("llama", layers=6)), frozen(ours(layers=6))
    names = [f"model.layers.{number}" for number in range(5)]
    for _ in range(2):
        assert_same(step(plain, tiny_batch("llama")), step(model, tiny_batch("llama")))
        assert list(moved(model)) == names[3:]
    assert sum(kind == "out" for kind, _ in lanes[0].log) == 5 + 2
    frozen(plain, False), frozen(model, False)
    for _ in range(2):
        assert_same(step(plain, tiny_batch("llama")), step(model, tiny_batch("llama")))
    assert list(moved(model)) == names


@each_kind
@each_family
def test_the_users_own_checkpoint_around_the_model(family, spec, lanes, caplog):
    batch = tiny_batch(family)

    def run(model):
        torch.manual_seed(0)
        loss = checkpoint(lambda: model(**without_cache(model, batch)).loss, use_reentrant=False)
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    model = ours(family, spec, dropout=0.1)
    assert_same(run(tiny_model(family, dropout=0.1)), run(model))
    assert bool(moved(model)) == (spec is OFFLOAD)
    assert len(said(caplog)) == (spec is SAVED)


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


CHANGES = {
    "scaled": lambda x, w: x.mul_(2.0) * w,
    "added to": lambda x, w: x.add_(1.0).sin() * w,
    "without a graph": lambda x, w: _scaled_quietly(x) * w,
    "a view of it": lambda x, w: (x[:1].zero_(), x * w)[1],
}


def _scaled_quietly(x):
    with torch.no_grad():
        return x.mul_(2.0)


@pytest.mark.compat
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", ["offload", "saved"])
def test_hidden_states_changed_inside_a_block(name, kind, lanes):
    """Said with the block's name, or the same gradients: never others."""

    def run(region):
        weight = torch.linspace(0.5, 1, 16).view(4, 4).requires_grad_()
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        call = region or (lambda function, *args: function(*args))
        call(lambda hidden: CHANGES[name](hidden, weight).square(), x * 1).sum().backward()
        return {"x": x.grad, "weight": weight.grad}

    pool = Mover()
    region = OffloadRegion("toy", pool) if kind == "offload" else RebuildRegion("toy", save=("linear",), mover=pool)
    expected = run(None)
    if kind == "offload":
        with pytest.raises(InPlaceError, match="block 'toy'"):
            run(region)
    else:
        with contextlib.suppress(InPlaceError):
            assert_same(expected, run(region))
        pool.end_of_block(None)
    gc.collect()
    assert pool._in_use == 0


def test_hidden_states_changed_after_the_block_are_no_matter(lanes):
    """The copy was done when the block ended."""

    def run(call):
        x = torch.linspace(-1, 1, 8).requires_grad_()
        hidden = x * 1
        out = call(torch.sin, hidden)
        with torch.no_grad():
            hidden.mul_(3.0)
        out.sum().backward()
        return x.grad

    expected = run(lambda function, x: function(x.clone()))
    assert torch.equal(expected, run(OffloadRegion("block", Mover())))


@each_kind
def test_copies_of_a_model(spec, lanes):
    """A copy moves into memory of its own, in the same process and in another."""
    model = ours(spec=spec)
    expected = step(model, tiny_batch("llama"))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        pool = mover(again)  # one for all blocks
        assert pool is not mover(model)
        assert pool.held_bytes == 0
        assert_same(expected, step(again, tiny_batch("llama")))
        assert moved(again) == moved(model)
        assert pool.held_bytes == mover(model).held_bytes
    assert len(lanes) == 3


def test_two_models_do_not_follow_one_another(lanes):
    one, other = ours(), ours(seed=1)
    losses = [model(**without_cache(model, tiny_batch("llama"))).loss for model in (one, other, one, other)]
    for loss in losses:
        loss.backward()
    assert len(lanes) == 2
    for lane in lanes:
        kinds = [kind for kind, _ in lane.log]
        assert kinds.count("back") == kinds.count("out") == 6


def test_a_copy_that_fails_gives_its_buffer_back(lanes):
    def fail(*_):
        raise RuntimeError("no device")

    pool = Mover()
    region = OffloadRegion("block", pool)
    x = torch.ones(4, requires_grad=True) * 1
    region(torch.sin, x).sum().backward()
    lanes[0].out = fail
    with pytest.raises(RuntimeError, match="no device"):
        region(torch.sin, x)
    gc.collect()
    assert pool._in_use == 0
    assert pool.held_bytes == 16


# --- what is asked for ----------------------------------------------------------------------------------------------


def kinds(spec, layers=4):
    model = tiny_model("llama", layers=layers)
    hf_ckpt.install(model, spec)
    found = [(action.kind, action.moved) for _, action in installation(model).plan.actions]
    return [f"{kind} saved" if saved else kind for kind, saved in found], regions(model)


def test_which_blocks_are_moved():
    assert kinds(OFFLOAD)[0] == kinds({"policy": "full", "offload": True})[0] == kinds({"offload": True})[0]
    found, made = kinds(OFFLOAD)
    assert found == ["offload"] * 4
    assert [type(region) for region in made] == [OffloadRegion] * 3 + [FullRegion]
    found, made = kinds(SAVED)
    assert found == ["selective saved"] * 4
    assert [region.mover is None for region in made] == [False] * 3 + [True]
    rules = [{"layers": "1", "policy": "offload"}, {"layers": "2", "policy": "selective"}]
    assert kinds({"rules": rules})[0] == ["keep", "offload", "selective", "keep"]
    assert kinds({"rules": rules[1:], "policy": "full", "offload": "saved"})[0] == [
        "full",
        "full",
        "selective saved",
        "full",
    ]
    assert kinds({**OFFLOAD, "layers": "0-1"})[0] == ["offload"] * 2 + ["keep"] * 2
    assert kinds({**OFFLOAD, "every_n_layers": 2})[0] == ["offload", "keep"] * 2


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"policy": "selective", "offload": True}, "for `selective` it is 'saved'"),
        ({"policy": "full", "offload": "saved"}, "for `full` it is true"),
        ({"policy": "none", "offload": True}, "`offload: true` moves what `full` keeps"),
        ({**SAVED, "engine": "sac"}, "needs the rebuild engine"),
        ({"segments": 2, "offload": True}, "cannot be combined with `segments`"),
        ({"policy": "full", "host_budget": "1GiB"}, "`host_budget` goes with offload"),
        ({**OFFLOAD, "host_budget": "much"}, "`host_budget` is no size"),
        ({"policy": "full", "offload": "yes"}, "`offload` must be one of"),
    ],
)
def test_what_is_refused(spec, problem):
    with pytest.raises(SpecError) as caught:
        Spec.parse(spec)
    assert problem in str(caught.value)


@pytest.mark.compat
@each_kind
@pytest.mark.parametrize("name", ["plan.json", "plan.yaml"])
def test_a_saved_plan_comes_back(spec, name, lanes, tmp_path):
    model = ours(spec=spec)
    plan = hf_ckpt.describe(model).plan
    assert ("in host memory" in str(plan)) == (spec is SAVED)
    plan.save(tmp_path / name)
    assert hf_ckpt.Plan.load(tmp_path / name) == plan
    again = ours(spec={"plan": str(tmp_path / name)})
    assert_same(step(model, tiny_batch("llama")), step(again, tiny_batch("llama")))
    assert moved(again) == moved(model) != {}
    assert "moved to host memory in the last forward: " in str(hf_ckpt.describe(again))


def test_a_plan_that_moves_what_it_cannot_is_refused():
    given = hf_ckpt.describe(ours()).plan.to_dict()
    given["stacks"]["decoder"][0]["moved"] = True
    with pytest.raises(PlanMismatchError, match="goes with `selective`"):
        hf_ckpt.Plan.from_dict(given)


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
