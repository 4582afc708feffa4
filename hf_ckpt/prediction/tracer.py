"""Splits one step on fake tensors into the forward and backward of every block and of the parts around the blocks."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from hf_ckpt import compat
from hf_ckpt.costs.costs import Phase
from hf_ckpt.forecast.devices import Device
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.spec.plan import Block

Place = tuple[str, int, int]
"""A part of a step: ("forward" or "backward", stack, block) for a block; ("before" or "before back", stack, 0) for what
runs before a stack; ("head" or "head back", 0, 0) for the head and the loss. Stacks and blocks count from 0."""


class Answers:
    """Answers operations that ask for the values of fake tensors.

    Args:
        padded: whether an attention mask masks anything; a boolean value is taken to mean "nothing is masked".
        casts: whether a tensor equals the tensor that it was cast from, which the rebuild engine asks on the CPU.
    """

    def __init__(self, *, padded: bool, casts: bool) -> None:
        self.padded = padded
        self.casts = casts
        self._sources: dict[int, int] = {}
        """Storage of a cast tensor -> storage of the tensor that it was cast from, as addresses."""

    def answer(self, func: Any, args: Any) -> Any:
        """Return the result of an operation that asks for a value; `NotImplemented` for any other."""
        if func is torch.ops.prim.device.default and compat.is_fake(args[0]):
            return args[0].fake_device  # asked about as often as anything is computed
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return not self.padded
        if func is torch.ops.aten.equal.default:
            return self.casts and self._source(args[0]) == self._source(args[1])
        return NotImplemented

    def note(self, func: Any, args: Any, result: Any) -> None:
        """Record which tensor was cast from which."""
        if func is torch.ops.aten._to_copy.default and self.casts:
            storage = result.untyped_storage()
            self._sources[storage._cdata] = self._source(args[0])
            weakref.finalize(storage, self._sources.pop, storage._cdata, None).atexit = False

    def _source(self, tensor: torch.Tensor) -> int:
        key: int = tensor.untyped_storage()._cdata
        return self._sources.get(key, key)


class Tracer(LiveBytes):
    """Counts the live bytes and the time of each part of a step.

        with Tracer(device, blocks, modules, model, inputs, answers) as tracer:
            loss = model(**inputs).loss
            tracer.begin("head back", 0, 0, backward=True)
            loss.backward()
            tracer.finish()
        tracer.phases

    Args:
        device: its row gives the time of operations.
        blocks: the model's blocks, in the order in which they run.
        modules: qualified name of a block -> its module.
        model: on fake tensors.
        inputs: keyword arguments of its forward.
        answers: results for operations that ask for values. A separate mode would dispatch every operation once more.
    """

    def __init__(
        self,
        device: Device,
        blocks: Sequence[Block],
        modules: Mapping[str, nn.Module],
        model: nn.Module,
        inputs: Mapping[str, Any],
        answers: Answers,
    ) -> None:
        self._answers = answers
        self._place: Place = ("", 0, 0)
        super().__init__(model, inputs)
        self._place = ("before", 0, 0)
        self.device = device
        self.phases: dict[Place, Phase] = {}
        self.starts: dict[Place, tuple[int, int]] = {}
        """(bytes above those before the step, bytes of finished gradients) when a part began."""
        self.ends: dict[Place, tuple[int, int]] = {}
        """(bytes above those before the step, bytes of finished gradients) when a part ended."""
        self._stacks = {name: number for number, name in enumerate(dict.fromkeys(block.stack for block in blocks))}
        self._depths = collections.Counter(self._stacks[block.stack] for block in blocks)
        self._blocks, self._modules, self._model = blocks, modules, model
        self._done = 0
        """Bytes of finished gradients."""
        self._backward = False
        self._beside = False
        """Whether code inside `beside_the_step` runs, which is not part of the step's forward."""
        self._next: Place | None = None
        """The part that begins with the next operation, if any."""
        self._made: dict[int, tuple[Place, int]] = {}
        """Address of a storage -> (the part of the forward that allocated it, its bytes)."""
        self.held: dict[Place, int] = collections.Counter()
        """Forward of a block -> bytes that it allocated and that are still alive when the backward ends."""
        self._given_on: dict[Place, int] = collections.Counter()
        """Forward of a block -> bytes that it allocated and that were freed after the block."""
        self.lent: dict[Place, int] = collections.Counter()
        """Forward of a block -> bytes that it allocated and that were freed when the forward of the model ended."""
        self._times = 1
        """How often a real step runs the current operations."""
        self._held_back = 0
        """Bytes of `lent` that are freed already; they count as alive until the backward begins."""
        self.released: dict[int, int] = collections.Counter()
        """Stack -> bytes that were allocated before it and freed between its forward and its backward: tensors that
        variables of the model's forward held, unless the first block keeps them."""
        self._handles: list[Any] = []
        self._reset()

    # --- parts of the step ---

    def _reset(self) -> None:
        """Begin to record the current part."""
        self._points: list[tuple[int, int]] = []
        self._nanoseconds = 0
        self.starts[self._place] = self._level()

    def _level(self) -> tuple[int, int]:
        """(bytes above those before the step, bytes of finished gradients); the former excludes the latter."""
        return self.current_bytes - self.start_bytes - self._done + self._held_back, self._done

    def begin(self, what: str, stack: int, block: int, *, backward: bool = False) -> None:
        """End the current part and begin another, named as in `Place`; `backward` is set when the backward begins."""
        self._next = None
        self._end()
        if backward:
            self._backward, self._held_back = True, 0
        self._place = (what, stack, block)
        self._reset()

    def _end(self) -> None:
        """Record the current part as it is now."""
        other, done = self.starts[self._place]
        self._note()
        points = tuple((now - other, finished - done) for now, finished in self._points)
        self.phases[self._place] = Phase(points, self._nanoseconds)
        self.ends[self._place] = self._level()

    @contextlib.contextmanager
    def one_for_many(self, times: int) -> Iterator[None]:
        """Count the time of this context `times` times; as many bytes must be alive after it as before it."""
        self._times = times
        try:
            yield
        finally:
            self._times = 1

    def finish(self) -> None:
        """End the last part of the step. Later frees belong to no part."""
        self._end()
        for place, size in self._made.values():
            if place[0] == "forward":
                self.held[place] += size
        self._made.clear()

    def _note(self) -> None:
        """Record the current live bytes if they have changed."""
        level = self._level()
        if not self._points or self._points[-1] != level:
            self._points.append(level)

    @contextlib.contextmanager
    def beside_the_step(self) -> Iterator[None]:
        """Count the bytes, but not the time, of what runs in this context. It begins no part of the step."""
        if self._next is not None:
            self.begin(*self._next)
        nanoseconds, self._beside = self._nanoseconds, True
        try:
            yield
        finally:
            self._nanoseconds, self._beside = nanoseconds, False

    def outputs(self) -> dict[Place, int]:
        """Forward of a block -> bytes that it allocated and that were freed after the block: its output."""
        return dict(self._given_on)

    # --- hooks on the model ---

    def __enter__(self) -> Tracer:
        for block in self._blocks:
            module, stack = self._modules[block.name], self._stacks[block.stack]
            before = functools.partial(self._enter_block, stack, block.index)
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(functools.partial(self._leave_block, stack, block.index)))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient_done))  # type: ignore[no-untyped-call]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter_block(self, stack: int, index: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._backward or self._beside:  # older layers call their hooks again during recomputation
            return
        if not index and args and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
            self._on_gradient(args[0], "before back", stack, 0)
        self.begin("forward", stack, index)

    def _leave_block(self, stack: int, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._backward or self._beside:
            return
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            self._on_gradient(first, "backward", stack, index)
        if index == self._depths[stack] - 1:
            # The next part does not begin yet: the model still holds this block's inputs.
            self._next = ("before", stack + 1, 0) if stack + 1 < len(self._stacks) else ("head", 0, 0)

    def _on_gradient(self, tensor: torch.Tensor, *place: Any) -> None:
        """Begin the part `place` when the gradient of `tensor` has been computed."""

        def begin(gradient: torch.Tensor) -> None:
            self.begin(*place)

        tensor.register_hook(begin)  # type: ignore[no-untyped-call]

    def _gradient_done(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._done += parameter.grad.untyped_storage().nbytes()
        self._note()

    # --- operations ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self._answers.answer(func, args)
        if answer is not NotImplemented:
            return answer
        kwargs = kwargs or {}
        if self._next is not None:
            self.begin(*self._next)
        result = compat.run_on_fakes(func, args, kwargs)
        self._answers.note(func, args, result)
        made = list(_tensors(result))
        new = [self._count(value) for value in made]
        if any(new) or func._schema.is_mutable:
            self._cost(func, args, kwargs, result, made)
        self._note()
        return result

    def _count(self, tensor: torch.Tensor) -> bool:
        new = super()._count(tensor)
        if new and self._place[0] in ("forward", "before"):
            storage = tensor.untyped_storage()
            self._made[storage._cdata] = self._place, storage.nbytes()
        return new

    def _freed(self, key: int, size: int) -> None:
        super()._freed(key, size)
        maker, _ = self._made.pop(key, (None, 0))
        if maker is None:
            return
        what, stack, _ = self._place
        behind = what.startswith("head") or stack > maker[1]
        if behind and maker[0] == "before":
            self.released[maker[1]] += size
        elif behind and maker[2] < self._depths[maker[1]] - 1:
            self.lent[maker] += size
            if not self._backward:
                self._held_back += size
        elif maker[0] == "forward" and (what not in ("forward", "backward") or maker[1:] != self._place[1:]):
            self._given_on[maker] += size

    def _cost(self, func: Any, args: Any, kwargs: Any, result: Any, made: Sequence[torch.Tensor]) -> None:
        read = _tensors((args, tuple(kwargs.values())))
        moved = sum(value.nbytes for value in {id(value): value for value in (*read, *made)}.values())
        count = flop_registry.get(func._overloadpacket, _MORE_FLOPS.get(func))
        flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
        floating = [value for value in made if value.is_floating_point()]
        size = max(floating, key=torch.Tensor.numel).element_size() if floating else 2  # statistics may be float32
        self._nanoseconds += self.device.nanoseconds(flops, moved, size) * self._times


Tracer.__torch_dispatch__ = inspect.unwrap(Tracer.__torch_dispatch__)  # type: ignore[method-assign]
"""Without torch's wrapper for dynamo, which does not run in a trace: it costs a tenth of the time."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operation, which nest them in tuples and lists only."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Operations of an attention kernel: two products with scores of [batch, heads, queries, keys].

    Shapes of its arguments are [batch, heads, tokens, size of a head].
    """
    batch, heads, queries, size = query.shape
    return int(2 * batch * heads * queries * key.shape[2] * (size + value.shape[3]))


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Operations of its backward, five products: the scores, and the gradients of values, weights, queries and keys."""
    batch, heads, queries, size = query.shape
    return int(2 * batch * heads * queries * key.shape[2] * (3 * size + 2 * value.shape[3]))


def _grouped_flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """Operations of grouped matrix products, where each row, or each column, is multiplied once.

    Shapes of the factors are those of `torch._grouped_mm`: [rows, k] or [groups, m, k], and [k, n] or [groups, k, n].
    """
    return int(2 * a.numel() * b.shape[-1] if a.dim() == 2 else 2 * b.numel() * a.shape[-2])


_MORE_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward_flops,
    torch.ops.aten._int_mm.default: lambda a, b, *args, **kwargs: int(2 * a.shape[0] * a.shape[1] * b.shape[1]),
}
if hasattr(torch.ops.aten, "_grouped_mm"):
    _MORE_FLOPS[torch.ops.aten._grouped_mm.default] = _grouped_flops
"""Operations that torch's `flop_registry` does not count."""
