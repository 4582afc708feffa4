"""Live-byte counts with resized, wrapped, fake or sparse tensors, in failing steps, and below other dispatch modes."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
)

from hf_ckpt import compat
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.compat


@pytest.fixture
def counted():
    """A running count; checks afterwards that torch's storage class is restored."""
    gc.collect()
    step = LiveBytes(device="cpu")
    step.start()
    yield step
    step.stop()
    assert "resize_" not in vars(torch.UntypedStorage)


def test_a_chain_worked_out_by_hand():
    """x is kept by the first product, its square by the second, then come the result and a gradient."""
    x = torch.ones(1000, requires_grad=True)  # 4000 bytes each
    with LiveBytes() as live:
        y = x * x
        assert live.current_bytes == 4000
        z = y * y
        del y  # z's graph still holds it
        assert live.current_bytes == 8000
        z.detach_()
        assert live.current_bytes == 4000
        del z
    assert (live.current_bytes, live.peak_bytes) == (0, 8000)


def test_a_resized_storage_counts_with_its_size(counted):
    """Resized storages count with their new size, by the storage's method, as FSDP2 resizes, or by an operation."""
    before = torch.zeros(1000)
    with _disable_current_modes():
        unseen = torch.zeros(500)  # allocated before the count, or in another thread
    storage = before.untyped_storage()
    assert counted.current_bytes == 4000
    storage.resize_(0)
    assert (counted.current_bytes, counted.peak_bytes) == (0, 4000)
    unseen.untyped_storage().resize_(8000)
    storage.resize_(4000)
    assert (counted.current_bytes, counted.peak_bytes) == (12000, 12000)
    before._typed_storage()._resize_(0)  # as in FSDP1
    unseen.resize_(5000)
    assert counted.current_bytes == 20000
    del unseen, before, storage
    assert (counted.current_bytes, counted.peak_bytes) == (0, 20000)


def test_counts_may_end_in_any_order():
    """The patched method stays until the last count ends."""
    tensor = torch.zeros(100)
    first, second = LiveBytes({"held": tensor}), LiveBytes({"held": tensor})
    first.start()
    with second:
        first.stop()
        tensor.untyped_storage().resize_(0)
        assert (first.current_bytes, second.current_bytes) == (400, 0)
        assert "resize_" in vars(torch.UntypedStorage)
    first.stop()  # a second call does nothing
    assert "resize_" not in vars(torch.UntypedStorage)


def test_a_wrapper_counts_as_what_it_wraps(counted):
    """A wrapper counts as the tensors inside, including those that its operations allocate and free."""
    pair = TwoTensor(torch.zeros(100), torch.zeros(100))
    tripled = pair + (pair + pair)
    assert (counted.current_bytes, counted.peak_bytes) == (1600, 2400)
    del tripled
    assert counted.current_bytes == LiveBytes({"held": pair}).start_bytes == 800
    with LiveBytes({"held": pair}) as inner:
        pair + (pair + pair)
    assert inner.peak_bytes == 2400


class Described(torch.Tensor):
    """A tensor with a shape but no memory."""

    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(args[0])


def test_only_memory_counts(counted):
    """Only memory counts: not fake, `meta` or memory-less tensors; sparse tensors count by their parts."""
    with FakeTensorMode() as fakes:
        model = nn.Linear(100, 100)
        model(torch.ones(2, 100)).sum().backward()
    meta = torch.ones(1000, device="meta") + 1
    described = Described(meta) + 1
    assert (counted.current_bytes, counted.peak_bytes) == (0, 0)
    table = nn.Embedding(100, 10, sparse=True)
    table(torch.tensor([1, 2, 2])).sum().backward()
    sizes = 4 * 100 * 10, 8 * 3, 4 * 3 * 10
    assert counted.current_bytes == LiveBytes(table, device="cpu").start_bytes == sum(sizes)
    del table, fakes, model, meta, described


def test_what_runs_between_steps_is_counted_to_the_byte(counted):
    """Counts are exact over training, evaluation, failing steps and copying."""

    def held():
        return LiveBytes(model, optimizer, batch).start_bytes

    model, batch = tiny_model("llama", dropout=0.1), tiny_batch("llama")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        model.train()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert counted.current_bytes == held()
        with torch.inference_mode():
            model.eval()
            model(**batch)
        with pytest.raises(IndexError):
            model(input_ids=batch["input_ids"] + 10**6)
        copied = copy.deepcopy(model)
        gc.collect()
        assert counted.current_bytes == held() + LiveBytes(copied).start_bytes
        del copied


class Seen(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_is_entered_below_those_that_are_on():
    below, before = Seen(), _get_current_dispatch_mode_stack()
    with Seen() as above:
        compat.modes.enter_dispatch_mode_below(below)
        assert _get_current_dispatch_mode_stack() == [below, *before, above]
        torch.ones(2) + 1
    torch.ones(2) + 1
    compat.modes.leave_dispatch_mode(below)
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

    monkeypatch.setattr("hf_ckpt.compat.modes._pop_mode", pop)
    compat.modes.enter_dispatch_mode_below(old)
    model = torch.nn.Identity()
    model.itself = [model]
    weakref.finalize(model, compat.modes.leave_dispatch_mode, old)
    del model
    compat.modes.enter_dispatch_mode_below(new)
    assert gc.isenabled()
    gc.collect()
    assert _get_current_dispatch_mode_stack() == [new, *before]
    compat.modes.leave_dispatch_mode(new)
    assert _get_current_dispatch_mode_stack() == before


def test_an_interrupt_inside_an_operation_ends_the_count_for_good(monkeypatch):
    """At once, without another operation: none may follow."""
    live = LiveBytes(device="cpu")
    live.start()

    def interrupt(result):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(live, "_count_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            torch.ones(2)
    assert not compat.modes.is_dispatch_mode_on(live)
    live.start()  # as an optimizer's step would
    assert not compat.modes.is_dispatch_mode_on(live)
