"""The meter for steps on fake tensors: it counts live bytes, and adds up the time that a device would need."""

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


class FakeMeter(LiveBytes):  # type: ignore[no-untyped-call]
    """The `Reader` and the `Clock` of a step on fake tensors. It also answers operations that ask for values.

    Args:
        price: the time of an operation on the device.
        holders: what holds tensors that are already alive; see `LiveBytes`.
        padded: whether an attention mask masks anything. A boolean value is taken to mean "nothing is masked".
        casts: whether a tensor equals the tensor that it was cast from, which the rebuild engine asks on a CPU.
    """

    def __init__(self, price: Price, *holders: Holder, padded: bool, casts: bool) -> None:
        super().__init__(*holders)
        self._price, self._padded, self._casts = price, padded, casts
        self._sources: dict[int, int] = {}
        """Storage of a cast tensor -> storage of the tensor that it was cast from, as addresses."""
        self._nanoseconds = 0

    def stamp(self) -> Any:
        """Return the nanoseconds so far."""
        return self._nanoseconds

    def between(self, first: int, last: int) -> int:
        """Return the nanoseconds between two stamps."""
        return last - first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and compat.torch.is_fake(args[0]):
            return args[0].fake_device  # asked about as often as anything is computed
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return not self._padded
        if func is torch.ops.aten.equal.default:
            return self._casts and self._source(args[0]) == self._source(args[1])
        kwargs = kwargs or {}
        result = compat.fakes.run_on_fakes(func, args, kwargs)
        if func is torch.ops.aten._to_copy.default and self._casts:
            storage = result.untyped_storage()
            self._sources[storage._cdata] = self._source(args[0])
            weakref.finalize(storage, self._sources.pop, storage._cdata, None).atexit = False
        is_new = [self._count(tensor) for tensor in tensors_in(result)]
        if any(is_new) or func._schema.is_mutable:
            self._nanoseconds += self._time_of(func, args, kwargs, result)
        return result

    def _source(self, tensor: torch.Tensor) -> int:
        key: int = tensor.untyped_storage()._cdata
        return self._sources.get(key, key)

    def _time_of(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        tensors = {id(tensor): tensor for tensor in tensors_in((args, tuple(kwargs.values()), result))}
        moved = sum(tensor.nbytes for tensor in tensors.values())
        count = flop_registry.get(func._overloadpacket, _MORE_FLOPS.get(func))
        flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
        floating = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
        size = max(floating, key=torch.Tensor.numel).element_size() if floating else 2  # statistics may be float32
        return self._price(flops, moved, size)


FakeMeter.__torch_dispatch__ = inspect.unwrap(FakeMeter.__torch_dispatch__)  # type: ignore[method-assign]
"""Without torch's wrapper for dynamo, which does not run on fake tensors: it costs a tenth of the time."""


def _grouped_flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """Operations of grouped matrix products, where each row, or each column, is multiplied once.

    Shapes of the factors are those of `torch._grouped_mm`: [rows, k] or [groups, m, k], and [k, n] or [groups, k, n].
    """
    return int(2 * a.numel() * b.shape[-1] if a.dim() == 2 else 2 * b.numel() * a.shape[-2])


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
}
"""Operations that torch's `flop_registry` does not count."""
