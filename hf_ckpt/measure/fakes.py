"""Measures steps on fake tensors: live bytes are counted, and the time that a device would need is added up."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from hf_ckpt import compat
from hf_ckpt.measure.live import Holder, LiveBytes, tensors_in

Price = Callable[[int, int, int], int]
"""(floating-point operations, bytes read and written, bytes of an element) -> nanoseconds."""


class FakeMeter(compat.modes.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation of a step on fake tensors, for a reader of memory; answers what asks for values.

    It is the `Clock` of the step, too: its time is what a device would need for all operations so far.

    Args:
        price: the time of an operation on the device.
        holders: what holds tensors that are already alive; see `LiveBytes`.
        padded: whether an attention mask masks anything. A boolean value is taken to mean "nothing is masked", except
            that of "is a number below zero", which models ask of a random one to skip a block.
    """

    supports_higher_order_operators = True

    def __init__(self, price: Price, *holders: Holder, padded: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = LiveBytes(*holders)
        """The `MemoryReader` of the step."""
        self._nanoseconds = 0
        self._price = price
        self._padded = padded
        self._is_below_zero: weakref.ref[torch.Tensor] | None = None
        """The last result of such a comparison."""

    def stamp(self) -> int:
        """Return the nanoseconds so far."""
        return self._nanoseconds

    def between(self, first: int, last: int) -> int:
        """Return the nanoseconds between two stamps."""
        return last - first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and compat.torch.is_fake(args[0]):
            return args[0].fake_device  # asked about as often as anything is computed
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            if self._is_below_zero is not None and args[0] is self._is_below_zero():
                return False
            return not self._padded
        kwargs = kwargs or {}
        result, entry = compat.fakes.run_on_fakes(func, args, kwargs)
        if func is torch.ops.aten.lt.Scalar and args[1] == 0:
            self._is_below_zero = weakref.ref(result)
        if entry is not None:
            self.memory.count(result)
            if entry.work is None:
                entry.work = _work_of(func, args, kwargs, result)
            self._nanoseconds += self._price(*entry.work)
            return result
        is_new = [self.memory.count(tensor) for tensor in tensors_in(result)]
        if any(is_new) or func._schema.is_mutable:  # all others are views, which launch nothing
            self._nanoseconds += self._price(*_work_of(func, args, kwargs, result))
        return result


def _work_of(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, int, int]:
    """What an operation does, in the arguments of `Price`."""
    tensors = {id(tensor): tensor for tensor in tensors_in((args, tuple(kwargs.values()), result))}
    moved = sum(tensor.nbytes for tensor in tensors.values())
    count = flop_registry.get(func._overloadpacket, _MORE_FLOPS.get(func))
    flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
    floating = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
    size = max(floating, key=torch.Tensor.numel).element_size() if floating else 2  # statistics may be float32
    return flops, moved, size


FakeMeter.__torch_dispatch__ = inspect.unwrap(FakeMeter.__torch_dispatch__)  # type: ignore[method-assign]
"""Without torch's wrapper for dynamo, which does not run on fake tensors: it costs a tenth of the time."""


def _grouped_flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """Operations of grouped matrix products, where each row, or each column, is multiplied once.

    Shapes of the factors are those of `torch._grouped_mm`: [rows, k] or [groups, m, k], and [k, n] or [groups, k, n].
    """
    products = a.numel() * b.shape[-1] if a.dim() == 2 else b.numel() * a.shape[-2]
    return int(2 * products)


# Attention kernels take [batch, heads, tokens, size of a head] and have scores of [batch, heads, queries, keys].
# The forward computes two products: the scores, and the sums of values. The backward computes five: the scores, and the
# gradients of values, weights, queries and keys. On a CPU, heads of queries, keys and values have the same size.
_MORE_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (
        lambda query, key, *args, **kwargs: 2 * 2 * query.numel() * key.shape[2]
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        lambda gradient, query, key, *args, **kwargs: 5 * 2 * query.numel() * key.shape[2]
    ),
    torch.ops.aten._grouped_mm.default: _grouped_flops,
    # At the rate of 16 bits: bitsandbytes' product of bytes is not faster than that of the model's type.
    torch.ops.aten._int_mm.default: lambda first, second, **kwargs: 2 * first.numel() * second.shape[-1],
}
"""Operations that torch's `flop_registry` does not count."""
