"""Live-byte counts with resized, wrapped, fake or sparse tensors, and in failing steps."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

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


class Pair(torch.Tensor):
    """A tensor that wraps two tensors and runs operations on both."""

    @staticmethod
    def __new__(cls, first, second):
        made = torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)
        made.first, made.second = first, second
        return made

    def __tensor_flatten__(self):
        return ["first", "second"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        halves = [
            func(*(getattr(value, half) if isinstance(value, cls) else value for value in args))
            for half in ("first", "second")
        ]
        return cls(*(half * 1 for half in halves))


def test_a_wrapper_counts_as_what_it_wraps(counted):
    """A wrapper counts as the tensors inside, including those that its operations allocate and free."""
    pair = Pair(torch.zeros(100), torch.zeros(100))
    doubled = pair + pair
    assert (counted.current_bytes, counted.peak_bytes) == (1600, 2400)
    del doubled
    assert counted.current_bytes == LiveBytes({"held": pair}).start_bytes == 800
    with LiveBytes({"held": pair}) as inner:
        pair + pair
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
        fake = torch.ones(1000) @ torch.ones(1000)
        model = nn.Linear(100, 100)
        model(torch.ones(2, 100)).sum().backward()
    meta = torch.ones(1000, device="meta") + 1
    described = Described(meta) + 1
    assert (counted.current_bytes, counted.peak_bytes) == (0, 0)
    table = nn.Embedding(100, 10, sparse=True)
    table(torch.tensor([1, 2, 2])).sum().backward()
    sizes = 4 * 100 * 10, 8 * 3, 4 * 3 * 10
    assert counted.current_bytes == sum(sizes)
    assert LiveBytes(table, device="cpu").start_bytes == sum(sizes)
    del table, fake, fakes, model, meta, described


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
        with pytest.raises(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)
        copied = copy.deepcopy(model)
        gc.collect()
        assert counted.current_bytes == held() + LiveBytes(copied).start_bytes
        del copied


def test_a_count_that_has_ended_is_freed():
    """A finished count is freed although its tensors live on."""
    model = tiny_model("llama")
    with LiveBytes(model) as live:
        model(**tiny_batch("llama"))
    gone = weakref.ref(live)
    del live
    gc.collect()
    assert gone() is None
