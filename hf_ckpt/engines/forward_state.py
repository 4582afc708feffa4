"""The state of a block in its forward, which backward restores to recompute the block in the same way.

A block may change between its forward and its backward: the user sets another adapter, calls `eval()` or removes a
hook, or `torch.func.functional_call` ends and takes its parameters with it. A `ForwardState` records what the forward
saw. If the block differs when it is recomputed, hf_ckpt restores the modes, adapters, hooks and tensors of the forward
for the recomputation, and then undoes that. If a value cannot be restored, because a parameter was overwritten, it
raises `ChangedBlockError`.

A recomputation runs in the context of the forward: context variables have the values that they had then, even in
autograd's own threads. Other things that a block reads, such as thread-local values, are not restored. If a block
raises an error for this reason, `RecomputeError` names the block.

Buffers that a forward changes (running statistics) are copied before the forward. The recomputation updates copies, so
each forward updates the statistics once. Routers choose the same experts again, see `routers`. torch, Python's `random`
and `numpy.random` draw the same numbers again.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_ckpt import compat
from hf_ckpt.engines.block_settings import Settings, lend
from hf_ckpt.engines.routers import Choices
from hf_ckpt.errors import ChangedBlockError, HfCkptError, InPlaceError, RecomputeError, shown

_OF_THE_BLOCK = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError),
    *(StopIteration, TypeError, ValueError),
)
"""Errors of a recomputation that may come from changed state. Others, such as those by which torch ends a
recomputation early, are left alone."""


class _Copied(NamedTuple):
    """A buffer that a forward may change."""

    box: dict[str, Any]
    name: str
    tensor: torch.Tensor
    copy: torch.Tensor
    """Its values before the forward."""

    def differs(self) -> bool:
        """Whether the buffer's values have changed. Its version does not show it: a batch norm does not increase it."""
        return compat.is_fake(self.tensor) or not torch.equal(self.tensor, self.copy)


class ForwardState:
    """The state of a block before one of its forwards.

    Args:
        name: qualified name of the block.
        block: the block; None if unknown.
        settings: its settings; None if unknown.
        whole: whether its parameters stay on their device, unsharded, throughout a step. If not, they come and go, and
            are not compared.
        keeps_draws: whether a recomputation draws torch's random numbers again.
    """

    __slots__ = (
        "block",
        "choices",
        "context",
        "copies",
        "draws",
        "keeps_draws",
        "marks",
        "name",
        "settings",
        "tensors",
    )

    def __init__(
        self, name: str, block: nn.Module | None, settings: Settings | None, *, whole: bool, keeps_draws: bool
    ) -> None:
        self.name, self.block, self.settings, self.keeps_draws = name, block, settings, keeps_draws
        self.context = compat.copied_context()
        self.tensors = tuple(settings.all_tensors()) if settings is not None and whole else ()
        if self.tensors and self.tensors[0] is not None and compat.is_fake(self.tensors[0]):
            self.tensors = ()  # a trace on fake tensors may change them freely
        self.marks = _marks(self.tensors)
        self.choices = Choices() if settings is not None and settings.chooses else None
        self.draws: compat.RandomState | None = None
        """Random state before the forward; None if the forward drew nothing."""
        self.copies: list[_Copied] = []
        if settings is not None and settings.buffers:
            self._copy_buffers(settings)

    def _copy_buffers(self, settings: Settings) -> None:
        changing = settings.changing
        for box, name in settings.buffers if changing is None else changing:
            buffer = box[name]
            if buffer is not None and not buffer.is_inference():
                self.copies.append(_Copied(box, name, buffer, buffer.detach().clone()))

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the block for the first time, and record what a recomputation needs to run it in the same way."""
        before = compat.RandomState(compat.devices_of(args), of_torch=self.keeps_draws)
        if self.choices is None:
            output = fn(*args)
        else:
            with self.choices.running():
                output = fn(*args)
        if before.may_have_moved():
            self.draws = before
        if self.settings is not None:
            self._ended(self.settings)
        return output

    def _ended(self, settings: Settings) -> None:
        """Record, after the forward, which parameters and buffers it changed."""
        if settings.written is None:
            settings.written = {
                place
                for place, (before, now) in enumerate(zip(self.marks, _marks(self.tensors), strict=True))
                if before[1:] != now[1:]
            }
        if not settings.buffers:
            return
        if settings.changing is None:
            self.copies = [copied for copied in self.copies if copied.differs()]
            settings.changing = [(copied.box, copied.name) for copied in self.copies]
        elif self._overwritten(settings):
            settings.changing = None  # one more than before: the next forward compares all of them again

    def recompute(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the block again, in the context and in the state of its forward.

        Raises `ChangedBlockError` for a value that cannot be restored, `InPlaceError` if a result that SAC keeps was
        changed in place, and `RecomputeError` for other errors of the block.
        """
        try:
            return self.in_context(self._recompute, fn, args)
        except _OF_THE_BLOCK as error:
            if isinstance(error, HfCkptError) or compat.is_out_of_memory(error):
                raise
            if isinstance(error, RuntimeError) and compat.is_changed_in_place(error):
                raise InPlaceError(self.name) from error
            raise RecomputeError(
                self.name,
                f"when backward recomputed it, it raised {type(error).__name__}: "
                f"{shown(str(error), 400, quoted=False)}. "
                "Its forward did not. Something that it reads has changed since then, such as a global or thread-local "
                "value, or an object that it changes itself.",
            ) from error

    def in_context(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a copy of the forward's context. Several threads may do so at once."""
        return self.context.copy().run(function, *args)

    def _recompute(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.draws is None and self.choices is None and self._is_unchanged():
            return fn(*args)
        with self.again():
            return fn(*args)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore the state of the forward inside this context, to recompute the block there.

        Raises `ChangedBlockError`, on entering the context or inside it, for a value that cannot be restored.
        """
        with contextlib.ExitStack() as undo:
            if self.draws is not None:
                undo.enter_context(self.draws.restored())
            if not self._is_unchanged():
                undo.enter_context(self._put_back())
            if self.choices is not None:
                undo.enter_context(self.choices.running(again=True))
            yield

    def _is_unchanged(self) -> bool:
        """Whether the block has the settings and tensors of the forward, and the tensors have the same values."""
        settings = self.settings
        if settings is None or self.block is None:
            return True
        if self.copies or not settings.hold(self.block):
            return False
        found = settings.all_tensors() if self.tensors else ()
        return all(map(operator.is_, self.tensors, found)) and self.marks == _marks(self.tensors)

    def _overwritten(self, settings: Settings) -> list[torch.Tensor]:
        """Return the tensors that were overwritten since the forward, without those that have a copy."""
        there = [tensor for tensor in self.tensors if tensor is not None]
        copied = {id(copied.tensor) for copied in self.copies}
        return [
            tensor
            for place, (tensor, before, now) in enumerate(zip(there, self.marks, _marks(self.tensors), strict=True))
            if before[1:] != now[1:] and id(tensor) not in copied and place not in (settings.written or ())
        ]

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[None]:
        settings, block = self.settings, self.block
        assert settings is not None
        assert block is not None
        if settings.merges != [*map(len, settings.merged)]:
            raise ChangedBlockError(self.name, "adapters were merged into its weights, or taken out of them again")
        with contextlib.ExitStack() as undo:
            settings.put_back(block, undo)
            tensors = iter(self.tensors)
            for names, box in zip(settings.names, settings.tensors, strict=True):
                wanted = {name: next(tensors) for name in names} if self.tensors else dict(box)
                with compat.unseen_by_modes():
                    copies = {copied.name: copied.copy.clone() for copied in self.copies if copied.box is box}
                lend(box, wanted | copies, undo)
            there = (tensor for tensor in self.tensors if tensor is not None)
            for tensor, flag in zip(there, (mark[0] for mark in self.marks), strict=True):
                if tensor.requires_grad != flag:
                    undo.callback(tensor.requires_grad_, tensor.requires_grad)
                    tensor.requires_grad_(flag)
            overwritten = {id(tensor): "a tensor of it" for tensor in self._overwritten(settings)}
            if overwritten:
                undo.enter_context(_Refused(self.name, block, overwritten))
            yield


class _Refused(TorchFunctionMode):
    """Raises `ChangedBlockError` when an operation uses one of the given tensors.

    Only use counts: a block may hold tensors that it does not use, such as those of inactive adapters.
    """

    def __init__(self, name: str, block: nn.Module, tensors: dict[int, str]) -> None:
        super().__init__()
        self.name = name
        named = chain(block.named_parameters(), block.named_buffers())
        self.tensors = tensors | {id(tensor): f"`{of}`" for of, tensor in named if id(tensor) in tensors}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") == "__get__":  # of a type or a shape, or of a tensor, such as `.data`
            found = function(*args)
            if not isinstance(found, torch.Tensor):
                return found
        for value in compat.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and id(value) in self.tensors:
                raise ChangedBlockError(self.name, f"{self.tensors[id(value)]} was overwritten")
        return function(*args, **(kwargs or {}))


def _marks(tensors: tuple[torch.Tensor | None, ...]) -> list[tuple[bool, int, int]]:
    """Return (requires gradients, in-place version, address of the values) for each tensor.

    The version and the address show whether a tensor was overwritten. Inference tensors have no version.
    """
    parameter = nn.Parameter
    try:
        return [
            (tensor.requires_grad, tensor._version, tensor.data_ptr() if type(tensor) is parameter else 0)
            for tensor in tensors
            if tensor is not None
        ]
    except RuntimeError:
        there = [tensor for tensor in tensors if tensor is not None]
        return [
            (tensor.requires_grad, -1 if tensor.is_inference() else tensor._version, address_of(tensor))
            for tensor in there
        ]


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a parameter's values; 0 for tensors of other types, because some have no address."""
    return tensor.data_ptr() if type(tensor) is nn.Parameter else 0
