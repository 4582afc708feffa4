"""Every wait of the copy lane is needed: without any one of them, gradients or values are wrong.

Tests run with one stream as late as the waits allow and the other one eager, so the outcome does not depend on time.
"""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.steps import assert_same, enable

import hf_ckpt
from accelerator import device
from accelerator.test_policies import SPECS, new_model, train
from hf_ckpt.engines import offload

PACES = [("free", "free"), ("late", "eager"), ("eager", "late"), ("late", "late")]
OUT, BACK = "to the host", "from the host"


class Deaf(torch.Stream):
    """A stream that does not wait for others before some copies."""

    ignores = False

    def wait_stream(self, other):
        if not self.ignores:
            super().wait_stream(other)


class Lane(offload.Lane):
    """The lane without one of its waits: (`before` or `after`, direction of the copy), or `drop`."""

    def __init__(self, where, without):
        super().__init__(where, Deaf(where))
        self.without = without

    def out(self, tensor, target):
        self._stream.ignores = self.without == ("before", OUT)
        return super().out(tensor, target)

    def back(self, source):
        self._stream.ignores = self.without == ("before", BACK)
        return super().back(source)

    def wait(self, copy):
        if self.without != ("after", OUT if copy.made is None else BACK):
            super().wait(copy)

    def drop(self, copy):
        if self.without != "drop":
            super().drop(copy)


def lane_of(where, without):
    return Lane(where, without) if where.type == device.NAME else None


@pytest.fixture
def without(monkeypatch):
    """Omit a wait, and move even the smallest tensors."""

    def omit(wait):
        monkeypatch.setattr(offload, "lane_of", functools.partial(lane_of, without=wait))

    monkeypatch.setattr(offload, "LEAST_BYTES", 0)
    omit(None)
    return omit


def offloading(spec):
    model = new_model("llama", "dropout")
    hf_ckpt.install(model, {**SPECS[spec][0], "check_every": 0})
    enable(model)
    return model


def is_right(expected, spec, interrupt=False):
    model, reused = offloading(spec), []
    if interrupt:
        interrupted(model)
        sizes = hf_ckpt.describe(model).moved.values()  # copies that nobody waits for must not write to memory after it
        reused = [torch.zeros(size // 4, device=device.FIRST) for size in sizes for _ in range(8)]
    got = train(model, "llama", "dropout")
    assert sum(hf_ckpt.describe(model).moved.values()) > 0
    if any(bool(tensor.any()) for tensor in reused):
        return False
    try:
        assert_same(expected, got)
    except AssertionError:
        return False
    return True


def interrupted(model):
    """A step whose backward ends after block 1: the tensors of block 0 are on their way back, and nobody uses them."""

    def fail(gradient):
        raise KeyboardInterrupt

    block = model.get_submodule("model.layers.0")
    handle = block.register_forward_hook(lambda *found: found[2].register_hook(fail) and None)
    with pytest.raises(KeyboardInterrupt):
        train(model, "llama", "dropout")
    handle.remove()


@functools.cache
def expected():
    return train(new_model("llama", "dropout"), "llama", "dropout")


@pytest.mark.parametrize("interrupt", [False, True], ids=["", "after an interrupted step"])
@pytest.mark.parametrize("paces", PACES, ids=" ".join)
@pytest.mark.parametrize("spec", ["offload", "saved"])
def test_gradients_are_right_at_every_pace(spec, paces, interrupt, without):
    expected()
    with device.pace(computing=paces[0], copying=paces[1]):
        assert is_right(expected(), spec, interrupt)


@pytest.mark.parametrize(
    ("wait", "computing", "copying"),
    [
        (("before", OUT), "late", "eager"),
        (("before", BACK), "late", "eager"),
        (("after", OUT), "eager", "late"),
        (("after", BACK), "eager", "late"),
        ("drop", "eager", "late"),
    ],
    ids=lambda value: " copying ".join(value) if isinstance(value, tuple) else value,
)
@pytest.mark.parametrize("spec", ["offload", "saved"])
def test_every_wait_is_needed(spec, wait, computing, copying, without):
    expected()
    without(wait)
    with device.pace(computing=computing, copying=copying):
        assert not is_right(expected(), spec, interrupt=wait == "drop")


@pytest.mark.parametrize("records", [True, False])
def test_another_computing_stream_is_recorded(records, monkeypatch):
    """A tensor that was fetched for one stream and is used by another is not reused before that has used it."""
    if not records:
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: None)
    lane = offload.lane_of(torch.device(device.FIRST))
    other = torch.Stream(device.FIRST)
    source = torch.full((4096,), 2.0, pin_memory=True)
    with device.pace(computing="eager", copying="late"):
        tensor, copy = lane.back(source)
        with other:
            lane.wait(copy)
            doubled = tensor * 2
        copy.event.synchronize()
        del tensor, copy
        torch.full((4096,), 7.0, device=device.FIRST)
        torch.accelerator.synchronize()
    assert bool((doubled.cpu() == 4).all()) is records
