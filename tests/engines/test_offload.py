"""Offloading: what leaves the device and when it returns, host memory and its budget, threads and unusual uses."""

import re

import pytest
import torch
from helpers.custom import custom_model, same_under, steps_of, work
from helpers.lanes import Delayed, DeviceBytes, Eager, lanes_of, mover
from helpers.steps import assert_frees_everything, assert_same, gradients, planned, step, without_cache
from helpers.toys import each_family
from torch import nn

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.compat import devices
from hf_ckpt.engines import host_memory
from hf_ckpt.engines.host_memory import Group, Mover, lane_of
from hf_ckpt.engines.offload import OffloadRegion
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.errors import HfCkptError, InPlaceError
from hf_ckpt.logs import forget_warnings
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model

HIDDEN = 2 * 16 * 32 * 4
"""Bytes of the hidden states of `tiny_batch` in float32."""
OFFLOAD = {"policy": "offload"}
SAVED = {"policy": "selective", "offload": "saved"}


def said(caplog):
    """Messages of the engines."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("hf_ckpt.engines.")]


def ours(family="llama", spec=OFFLOAD, **options):
    """A small model with the plan enabled."""
    return planned(tiny_model(family, **options), spec)


@pytest.mark.compat
@pytest.mark.parametrize("spec", [OFFLOAD, {"policy": "full", "offload": True}, SAVED], ids=str)
def test_on_the_cpu_it_is_full_and_said_once(spec, caplog):
    model = ours(spec=spec)
    for _ in range(2):
        assert_same(step(tiny_model("llama"), tiny_batch("llama")), step(model, tiny_batch("llama")))
    assert hf_ckpt.describe(model).moved == {}
    (message,) = said(caplog)
    assert "no host memory to offload to from 'cpu'" in message
    if spec is not SAVED:
        assert set(hf_ckpt.describe(model).recomputed.values()) == {2}


def test_devices_without_streams_have_no_lane(monkeypatch):
    """Nor has `mps`, which has streams but uses the host's memory."""
    for device_type in ("cpu", "mps", "xla"):
        monkeypatch.setattr(devices, "accelerator_type", lambda device_type=device_type: device_type)
        assert lane_of(torch.device(device_type, 0)) is None, device_type


# --- bytes ------------------------------------------------------------------------------------------------------------


FIRST = {"llama": "input_layernorm", "gpt2": "ln_1", "bert": "attention.self.query", "t5": "layer.0.layer_norm"}


def at_start_of_blocks(model, family, note):
    """Call `note` with a block's number when its first module runs; hooks of the block itself may not run again."""
    for number, block in enumerate(find_blocks(model).modules.values()):
        first = block.get_submodule(FIRST[family])
        first.register_forward_pre_hook(lambda *_, number=number: note(number))


@pytest.mark.trap(16)
@each_family
def test_hidden_states_leave_the_device(family):
    """Compared with `full`, all hidden states but each stack's last leave the device.

    When a block is recomputed, its hidden states and those of the block before it are back.
    """
    stays, recomputing, batch = [], [], tiny_batch(family, tokens=64)
    with lanes_of(Eager):
        for policy in ("full", "offload"):
            model, at_start = ours(family, {"policy": policy}, layers=6), []
            step(model, batch)
            model.zero_grad(set_to_none=True)
            with DeviceBytes(model) as live:
                at_start_of_blocks(model, family, lambda _, live=live, into=at_start: into.append(live.current_bytes))
                outputs = model(**without_cache(model, batch))
                stays.append(live.current_bytes - live.start_bytes)
                at_start.clear()
                outputs.loss.backward()
            recomputing.append(at_start)
    hidden = 4 * HIDDEN
    away = [5, 3, 2, 1, 0, 0]  # of 5 that are moved; the block whose hidden states stay is recomputed first
    if family == "t5":  # its decoder has half as many tokens
        # Those of the encoder come back when its last block, which moves nothing, has had its backward.
        away = [5 + 5 / 2, 5 + 3 / 2, 5 + 2 / 2, 5 + 1 / 2, 5, 5, 5, 3, 2, 1, 0, 0]
    assert stays[0] - stays[1] == (5 + 5 / 2 if family == "t5" else 5) * hidden
    assert [full - offloaded for full, offloaded in zip(*recomputing, strict=True)] == [few * hidden for few in away]


def test_a_copy_back_begins_one_block_ahead(lanes):
    """Hidden states start coming back before the next block up is recomputed; the first ones when they are needed."""
    model = ours(layers=5)
    at_start_of_blocks(model, "llama", lambda number: lanes[0].log.append(number))
    loss = model(**tiny_batch("llama")).loss
    out, back = ("out", HIDDEN), ("back", HIDDEN)
    assert lanes[0].log == [out, 0, out, 1, out, 2, out, 3, 4]
    lanes[0].log.clear()
    loss.backward()
    assert lanes[0].log == [4, back, back, 3, back, 2, back, 1, 0]


def test_of_a_segment_the_first_hidden_states_move(lanes):
    """Those of the segment before come back while the first block of this one has its backward, and once."""
    model = ours(spec={"policy": "offload", "segments": 3}, layers=7)
    at_start_of_blocks(model, "llama", lambda number: lanes[0].log.append(number))
    loss = model(**tiny_batch("llama")).loss
    out, back = ("out", HIDDEN), ("back", HIDDEN)
    assert lanes[0].log == [out, 0, 1, 2, out, 3, 4, out, 5, 6]
    lanes[0].log.clear()
    loss.backward()
    assert lanes[0].log == [back, 5, 6, back, 5, 3, 4, back, 3, 0, 1, 2, 1, 0]
    assert list(hf_ckpt.describe(model).moved) == ["model.layers.0", "model.layers.3", "model.layers.5"]
    del loss
    assert mover(model).held_bytes == 0


def test_what_comes_before_a_gap_is_fetched_when_it_is_needed(lanes):
    """Earlier, it would lie on the device while the blocks between have their backward."""
    model = ours(spec={"rules": [{"layers": "0-1,4-5", "policy": "offload"}]}, layers=8)
    at_start_of_blocks(model, "llama", lambda number: lanes[0].log.append(number))
    loss = model(**tiny_batch("llama")).loss
    lanes[0].log.clear()
    loss.backward()
    back = ("back", HIDDEN)
    assert lanes[0].log == [back, back, 5, 4, back, back, 1, 0]


def test_what_selective_keeps_is_moved_once(lanes):
    """Only the block's input and its saved results are moved, not its other arguments."""
    weight, mask = torch.randn(4, 4, requires_grad=True), torch.randn(8, 4) * 1

    def run(region, autocast=False):
        x = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = region(lambda hidden, mask: ((hidden @ weight).sin() * mask.exp() * mask).sum(), x * 1, mask * 1)
        return torch.autograd.grad(out, [x, weight])

    region = RebuildRegion("toy", save=("linear", "attention"), mover=Mover())
    for autocast, product in ((False, 128), (True, 64)):
        expected = run(lambda function, *args: function(*args), autocast)
        assert all(map(torch.equal, run(region, autocast), expected))
        assert lanes[0].log == [("out", 128), ("out", product), ("back", product), ("back", 128)]
        assert not lanes[0].queue
        assert region.moved_bytes == 128 + product
        lanes[0].log.clear()


def test_views_share_a_copy():
    """Views of a tensor share one copy until the last of them is back; another backward copies again."""
    lane, pool = Delayed(), Mover()
    x = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_() * 1
    group = Group(pool, "block", lane, x)
    y = x * 2
    cast = nn.Parameter(torch.ones(8, 4)).to(torch.bfloat16)  # autocast shares it between blocks
    tensors = [y, y[1:3], y.t(), y[:, 2], x, y.view(torch.int32), cast, y > 0]
    with lanes_of(Delayed):
        packed = [group.pack(tensor) for tensor in tensors]
    for left, tensor in zip(packed[5:], tensors[5:], strict=True):  # unchanged, but without its graph
        assert left.tensor.data_ptr() == tensor.data_ptr()
        assert left.tensor.grad_fn is None
    expected = [tensor.clone() for tensor in tensors]
    group.leave_device()
    assert lane.log == [("out", 128)] * 2 == [("out", y.nbytes), ("out", x.nbytes)]
    for _ in range(2):
        lane.log.clear()
        for got, tensor, wanted in zip(map(group.unpack, packed), tensors, expected, strict=True):
            assert torch.equal(got, wanted)
            assert got.stride() == tensor.stride()
        assert lane.log == [("back", 128)] * 2
        assert all(entry.slot.arriving is None for entry in packed[:5])


@pytest.mark.trap(17)
def test_a_result_that_changes_during_its_copy_is_refused():
    x = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_() * 1
    group = Group(Mover(), "toy", Delayed(), x)
    packed = group.pack(x)
    with torch.no_grad():
        x.add_(1.0)
    for use in (group.leave_device, lambda: group.unpack(packed)):
        with pytest.raises(InPlaceError, match="block 'toy'"):
            use()


@pytest.mark.parametrize("make", [lambda x: x.transpose(0, 1), lambda x: x[:, :, :4], lambda x: x[:1].expand(3, 6, 8)])
def test_hidden_states_that_are_not_contiguous(make, lanes):
    """Hidden states come back with their strides; those with gaps or overlaps move with their whole storage."""
    x = torch.randn(5, 6, 8, requires_grad=True)
    weight = torch.randn(8, 8)
    region, strides = OffloadRegion("block", Mover()), []

    def block(hidden):
        strides.append(hidden.stride())
        return hidden.matmul(weight[: hidden.shape[-1]]).sin() ** 2

    expected, got = (torch.autograd.grad(out.sum(), x) for out in (block(make(x * 1)), region(block, make(x * 1))))
    assert torch.equal(*expected, *got)
    assert len({*strides}) == 1
    assert region.recomputed == 1
    assert region.moved_bytes == x.nbytes


def test_tensors_that_stay_alive_anyway_are_not_offloaded(lanes):
    """Leaves, their views, integers, empty tensors and subclasses stay on the device."""
    weight = nn.Parameter(torch.randn(4))
    subclass = torch.zeros(4).as_subclass(type("Sub", (torch.Tensor,), {}))
    for hidden in (weight, weight.view(2, 2), torch.zeros(4, dtype=torch.long), torch.zeros(0), subclass):
        region = OffloadRegion("block", Mover())
        region(lambda x: x * weight.sum(), hidden).sum().backward()
        assert region.moved_bytes == 0
        assert region.forwards == region.recomputed == 1
    assert all(lane.log == [] for lane in lanes)


# --- host memory ------------------------------------------------------------------------------------------------------


@pytest.mark.trap(27)
@pytest.mark.compat
@pytest.mark.parametrize(("tokens", "buffer"), [(16, 4096), (17, 8192)])
def test_a_host_budget_counts_powers_of_two(tokens, buffer, lanes, caplog, unwatched):
    batch = tiny_batch("llama", tokens=tokens)
    for limit, count in ((3 * buffer, 3), (3 * buffer - 1, 2), (buffer, 1), (buffer - 1, 0)):
        model = ours(spec={**OFFLOAD, "host_budget": f"{limit}B"})
        caplog.clear()
        forget_warnings()
        for _ in range(2):
            assert_same(step(tiny_model("llama"), batch), step(model, batch))
            assert [*hf_ckpt.describe(model).moved.values()] == [2 * tokens * 32 * 4] * count
        loss = model(**batch).loss
        assert mover(model).held_bytes == count * buffer
        del loss
        assert mover(model).held_bytes == 0
        assert len(said(caplog)) == (count < 3)
        assert all("`host_budget`" in message for message in said(caplog))


CAUSES = {
    "ulimit": ({"locked_memory_limit": 64}, 128, r"the likely cause: `ulimit -l` allows 64 B"),
    "mappings": ({"memory_mappings": (65_500, 65_530)}, 128, r"`vm\.max_map_count` allows 65,530 mappings"),
    "size": ({"LARGEST_PINNED": 64}, 128, r"one buffer of 128 B, and some drivers pin at most 64 B"),
    "unknown": ({}, 128, r"0 B are pinned already; the host may have too little free memory"),
}


@pytest.mark.compat
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("is_asked_for", [False, True], ids=["", "host_budget"])
def test_memory_that_cannot_be_pinned(is_asked_for, cause, lanes, monkeypatch, unwatched, caplog):
    """Offloading uses unpinned memory, said once with the cause; with a `host_budget`, the run ends by that name."""
    changes, size, why = CAUSES[cause]
    known = {"locked_memory_limit": None, "memory_mappings": (0, None), "LARGEST_PINNED": 2**40, **changes}
    for name, value in known.items():
        new = value if name.isupper() else lambda value=value: value
        monkeypatch.setattr(host_memory, name, new)
    monkeypatch.setattr(compat.devices, "accelerator_type", lambda: "cuda")
    real = torch.empty
    pins = []

    def empty(*args, pin_memory=False, **kwargs):
        pins.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    pool = Mover(2**20 if is_asked_for else None)
    if is_asked_for:
        with pytest.raises(
            HfCkptError, match=rf"cannot be pinned \(.*: out of memory; .*{why}.*\)\. Allow it, leave `host_budget` out"
        ):
            pool.take(size)
        return
    with torch.device("meta"):
        assert [pool.take(size).device.type for _ in range(2)] == ["cpu", "cpu"]  # whatever the default device is
    assert pins == [True, False, False]
    assert pool.held_bytes == 2 * size
    (warning,) = said(caplog)
    assert re.search(rf"cannot be pinned \(.*out of memory; .*{why}.*\)\. Offloading uses", warning)


def test_tensors_without_room_in_host_memory_are_freed(unwatched):
    """Tensors that do not fit host memory are freed after a forward without a backward, as in evaluation."""
    with lanes_of(Eager):
        model = ours(spec={**SAVED, "host_budget": "2KiB"}, layers=2)
        assert_frees_everything(model, tiny_batch("llama"), meter=DeviceBytes)


# --- threads and unusual uses -----------------------------------------------------------------------------------------


def test_a_block_that_differentiates_itself_gets_hidden_states_that_have_not_left(lanes):
    """It is recomputed while it runs, when the copy of its hidden states may not have ended."""

    def run(block, hidden, shift):
        energy = block.one(hidden)
        (slope,) = torch.autograd.grad(torch.cumprod(energy, -1).sum(), energy, create_graph=True)
        return work(block, hidden, shift) + slope * energy

    same_under({"policy": "offload"}, steps_of, lambda: custom_model(run))
    assert lanes[0].log


@pytest.mark.trap(17)
def test_a_lane_serves_one_thread_at_a_time():
    """Threads that run blocks at the same time share a lane: every call to it holds the lock."""
    calls = {}

    class Asked(Delayed):
        def __getattribute__(self, name):
            if name in ("out", "back", "wait", "drop"):
                calls.setdefault(name, set()).add(pool.lock._is_owned())
            return super().__getattribute__(name)

    with lanes_of(Asked):
        pool = Mover()
        pool.before = {"1": "0"}
        first, second = OffloadRegion("0", pool), OffloadRegion("1", pool)
        one = first(torch.sin, torch.ones(4, requires_grad=True) * 1)
        two = second(torch.sin, one)
        torch.autograd.grad(two.sum(), one)  # the first block's hidden states come back, and nobody waits for them
        del one, two
    assert calls == {name: {True} for name in ("out", "wait", "back", "drop")}


@pytest.mark.parametrize("spec", [OFFLOAD, SAVED], ids=str)
def test_blocks_that_are_left_out(spec, lanes):
    """If blocks are left out, as by LayerDrop, copies still come back in order."""

    def run(model):
        layers = list(model.model.layers)
        for kept in ([0, 2, 4], [1, 2, 3, 4, 5], [5], [0, 5]):
            model.model.layers = nn.ModuleList(layers[place] for place in kept)
            model.config.num_hidden_layers = model.model.config.num_hidden_layers = len(kept)
            model(**without_cache(model, tiny_batch("llama"))).loss.backward()
        return gradients(model)

    model = same_under(spec, run, lambda: tiny_model("llama", layers=6))
    assert lanes[0].log
    assert mover(model).held_bytes == 0
