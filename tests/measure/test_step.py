"""A measurement's dispatch mode lies below other modes and does not harm them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode

from hf_ckpt import compat

pytestmark = pytest.mark.compat


class Seen(TorchDispatchMode):
    """Counts operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_is_entered_below_those_that_are_on():
    below, before = Seen(), _get_current_dispatch_mode_stack()
    with Seen() as above:
        compat.torch.enter_dispatch_mode_below(below)
        assert _get_current_dispatch_mode_stack() == [below, *before, above]
        torch.ones(2) + 1
    torch.ones(2) + 1
    compat.torch.leave_dispatch_mode(below)
    torch.ones(2) + 1
    assert (above.count, below.count) == (2, 4)
    assert _get_current_dispatch_mode_stack() == before


def test_garbage_collected_meanwhile_does_not_leave_a_mode_on(monkeypatch):
    """A measurement of a garbage model ends cleanly, although any allocation may collect the model."""
    old, new = Seen(), Seen()
    gc.collect()
    before = _get_current_dispatch_mode_stack()

    def pop():
        if gc.isenabled():  # as an allocation would
            gc.collect()
        return _pop_mode()

    monkeypatch.setattr("hf_ckpt.compat.torch._pop_mode", pop)
    compat.torch.enter_dispatch_mode_below(old)
    model = torch.nn.Identity()
    model.itself = [model]
    weakref.finalize(model, compat.torch.leave_dispatch_mode, old)
    del model
    compat.torch.enter_dispatch_mode_below(new)
    assert gc.isenabled()
    gc.collect()
    assert _get_current_dispatch_mode_stack() == [new, *before]
    compat.torch.leave_dispatch_mode(new)
    assert _get_current_dispatch_mode_stack() == before
