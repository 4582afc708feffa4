"""The state in which a block ran forward, so that backward runs it again as it ran then.

Between a forward and its backward a block may be changed: another adapter is set, `eval()` is called, a hook is taken
off, or `torch.func.functional_call` ends and takes its parameters with it. A `ForwardState` remembers what the
forward saw. A recomputation looks whether the block is still like that. If not, it runs on the forward's own modes,
adapters, hooks and tensors, and afterwards the block is as it was found. What cannot be had again, because a parameter
was overwritten, raises `ChangedBlockError`.

Buffers that a forward changes (running statistics) are copied before it. The recomputation changes copies of them, so
that statistics move once in each forward. Routers of experts choose again what they chose, see `routers`. Random
numbers of torch, of Python's `random` and of `numpy.random` are drawn again.
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
from hf_ckpt.errors import ChangedBlockError


class _Copied(NamedTuple):
    """A buffer that a forward may change."""

    box: dict[str, Any]
    name: str
    tensor: torch.Tensor
    copy: torch.Tensor
    """Its values before the forward."""

    def differs(self) -> bool:
        """Whether the buffer has other values now. Its version does not tell: a batch norm does not count it up."""
        return compat.is_fake(self.tensor) or not torch.equal(self.tensor, self.copy)


class ForwardState:
    """The state of a block before one of its forwards.

    Args:
        name: qualified name of the block.
        block: the block; None if it is not known.
        settings: how it is set; None if it is not known.
        whole: whether its parameters lie whole on their device throughout a step. If not, they come and go, and are
            not compared.
        keeps_draws: whether torch's random numbers are to be drawn again.
    """

    __slots__ = ("block", "choices", "copies", "draws", "keeps_draws", "marks", "name", "settings", "tensors")

    def __init__(
        self, name: str, block: nn.Module | None, settings: Settings | None, *, whole: bool, keeps_draws: bool
    ) -> None:
        self.name, self.block, self.settings, self.keeps_draws = name, block, settings, keeps_draws
        self.tensors = tuple(settings.all_tensors()) if settings is not None and whole else ()
        if self.tensors and self.tensors[0] is not None and compat.is_fake(self.tensors[0]):
            self.tensors = ()  # a trace on tensors without values may do to them what it likes
        self.marks = _marks(self.tensors)
        self.choices = Choices() if settings is not None and settings.chooses else None
        self.draws: compat.RandomState | None = None
        """Random state before the forward; None where it has drawn nothing."""
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
        """Run the block for the first time, and note what is needed to run it again in the same way."""
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
        """Note which buffers the forward has changed, now that it has ended."""
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
            settings.changing = None  # one more than before: the next forward looks at all of them again

    def holds(self) -> bool:
        """Whether the block runs again as in the forward without anything being put back for that."""
        return self.draws is None and self.choices is None and self._is_unchanged()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run the block again inside this context: there, it is as it was in the forward.

        Raises `ChangedBlockError`, in the context or when it is entered, for what cannot be had again.
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
        """Whether the block is set as in the forward, and has the tensors that it had then, with the same values."""
        settings = self.settings
        if settings is None or self.block is None:
            return True
        if self.copies or not settings.hold(self.block):
            return False
        found = settings.all_tensors() if self.tensors else ()
        return all(map(operator.is_, self.tensors, found)) and self.marks == _marks(self.tensors)

    def _overwritten(self, settings: Settings) -> list[torch.Tensor]:
        """Return the tensors whose values are others than in the forward, as far as they were not copied."""
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
    """Raises `ChangedBlockError` as soon as an operation is given one of some tensors.

    A block may hold tensors that it does not use, such as those of adapters that are not active.
    """

    def __init__(self, name: str, block: nn.Module, tensors: dict[int, str]) -> None:
        super().__init__()
        self.name = name
        named = chain(block.named_parameters(), block.named_buffers())
        self.tensors = tensors | {id(tensor): f"`{of}`" for of, tensor in named if id(tensor) in tensors}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") == "__get__":  # of a type or a shape, or of a tensor, as `.data` is
            found = function(*args)
            if not isinstance(found, torch.Tensor):
                return found
        for value in compat.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and id(value) in self.tensors:
                raise ChangedBlockError(self.name, f"{self.tensors[id(value)]} was overwritten")
        return function(*args, **(kwargs or {}))


def _marks(tensors: tuple[torch.Tensor | None, ...]) -> list[tuple[bool, int, int]]:
    """Return whether each tensor is trained, how often it was changed in place, and where its values lie.

    The latter two tell whether it was overwritten. Inference tensors do not count changes.
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
    """Return where the values of a parameter lie; 0 for tensors of other types, some of which have no address."""
    return tensor.data_ptr() if type(tensor) is nn.Parameter else 0
