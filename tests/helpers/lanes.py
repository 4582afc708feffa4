"""Lanes that replace an accelerator's stream in tests that move tensors to host memory and back."""

import contextlib
import math
import weakref
from unittest import mock

import torch

from hf_ckpt.attach.record import installation
from hf_ckpt.engines import host_memory
from hf_ckpt.measure.live import LiveBytes


class Delayed:
    """A stream that copies nothing until something waits for it.

    Until then the host buffer and the tensor coming back hold NaN, and only the engine holds the source.
    """

    def __init__(self, device=None):
        self.queue = []
        self.log = []
        """Copies as ("out" or "back", bytes)."""

    def out(self, tensor, host):
        assert (host.dtype, host.stride()) == (tensor.dtype, tensor.stride())
        assert not tensor.requires_grad, "a copy with a graph would hold the tensor"
        host.fill_(math.nan)
        self.log.append(("out", tensor.nbytes))
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
        """Nobody waits for the copy."""


class Eager(Delayed):
    """A stream that finishes each copy at once."""

    def out(self, tensor, host):
        copying = super().out(tensor, host)
        self.wait(copying)
        return copying

    def back(self, host):
        made, copying = super().back(host)
        self.wait(copying)
        return made, copying


class DeviceBytes(LiveBytes):
    """Counts live bytes without host buffers: the only `uint8` storages whose size is a power of two."""

    def __init__(self, *holders):
        self.host = {}
        super().__init__(*holders)

    def count(self, tensor):
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if tensor.dtype is torch.uint8 and size & (size - 1) == 0:
            self.host[storage._cdata] = weakref.ref(storage)
        held = self.host.get(storage._cdata)
        return (held is None or held() is not storage) and super().count(tensor)


@contextlib.contextmanager
def lanes_of(lane_class):
    """Use this class as the stream of every device, and move even the smallest tensors; yields the lanes as they are
    created. None changes nothing."""
    made = []
    if lane_class is None:
        yield made
        return

    def lane_of(device):
        made.append(lane_class())
        return made[-1]

    with mock.patch.object(host_memory, "lane_of", lane_of), mock.patch.object(host_memory, "LEAST_BYTES", 0):
        yield made


def mover(model):
    """The mover that all blocks of a model share."""
    regions = installation(model).regions.values()
    (found,) = {region.mover for region in regions if getattr(region, "mover", None) is not None}
    return found
