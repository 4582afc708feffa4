"""Hooks that mark the progress of a training step while it is measured: the begin and end of every block's forward,
the arrival of its output's gradient, and the end of the backward."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.costs.steps import NOTHING, Freed
from hf_ckpt.engines.head.logits import auto_helps
from hf_ckpt.spec.actions import Action

Mark = Callable[[str, str, bool, Action | None, Freed], None]
"""Called at each boundary with (`forward`, `forwarded`, `backward` or `end`; name of the block; whether the block's
input, or its output, requires gradients; for a mark of `engines.trials`, its action, and what the action frees)."""
Gone = Callable[[], None] | None


class Boundaries:
    """Calls `mark` at the boundaries of all `blocks`, until `remove` is called.

    Only forwards that record gradients count; recomputations do not. Blocks inside a running block have no boundaries.
    A copy, on a copy of the model, does nothing.

    Args:
        blocks: name -> module.
        mark: see `Mark`. Threads take turns to call it.
        gone: called when the autograd graphs of all forwards are gone: after the backward, or because the step ended
            without one.
        head: the projection onto the vocabulary, for `chunks_help`; None for models without one.
    """

    def __init__(
        self, blocks: Mapping[str, nn.Module], mark: Mark | None, gone: Gone = None, head: nn.Module | None = None
    ) -> None:
        self._mark = mark
        self._gone = gone
        self._running: _Graphs | None = None
        self._graphs: Callable[[], _Graphs | None] = lambda: None
        self._lock = threading.Lock()
        self._inside: str | None = None
        self._in_backward = False
        self._call = 0
        """The number of the call of the running forward or backward; 0 between them."""
        self.chunks_help = False
        """Whether the step called the head, and would need less memory with `"head": "auto"`. The losses of TRL use the
        head's weight and never call it."""
        self._handles: list[Any] = [] if head is None else [head.register_forward_hook(self._sees_head)]
        for name, module in blocks.items():
            before, after = functools.partial(self._at, name, False), functools.partial(self._at, name, True)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after))

    def __reduce__(self) -> tuple[Any, ...]:
        return Boundaries, ({}, None)

    def begin(self) -> None:
        """A forward of the step begins. Called from a forward pre-hook."""
        self._call = compat.frames.running_call()
        self._running = self._graphs()
        if self._running is None:
            self._running = _Graphs()
            self._graphs = weakref.ref(self._running)
            if self._gone is not None:
                weakref.finalize(self._running, self._gone)

    def finish(self, output: Any) -> None:
        """The forward that ran has ended with an output: from now on only its graph holds it.

        Marks that it has `returned`, when an autocast around it has ended, too: at the latest when the backward begins.
        """
        loss = getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.register_hook(lambda gradient: self.mark("returned"))  # type: ignore[no-untyped-call]
        else:
            self.mark("returned")
        self._running = None
        self._call = 0

    def has_raised(self) -> bool:
        """Whether the forward or backward of the step has ended by an error.

        torch calls no hook after a `KeyboardInterrupt` in a forward, or after any error in a backward. The graphs may
        outlive it, because a notebook keeps the traceback.
        """
        return not compat.frames.is_running(self._call)

    @property
    def has_graph(self) -> bool:
        """Whether the graph of a forward of this step exists."""
        return self._graphs() is not None

    def remove(self) -> None:
        """Remove all hooks. Hooks on tensors of the step do nothing from now on."""
        self._mark = self._running = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def mark(
        self, what: str, block: str = "", has_graph: bool = True, action: Action | None = None, freed: Freed = NOTHING
    ) -> None:
        """Mark a boundary, until `remove` is called."""
        with self._lock:
            if self._mark is not None:
                self._mark(what, block, has_graph, action, freed)

    def _at(self, name: str, ended: bool, module: nn.Module, args: Any, other: Any) -> None:
        """Forward hook: the forward of a block begins with these arguments, or has ended with the output `other`."""
        values = compat.torch.tree_leaves(other if ended else (args, other))
        hidden = next((value for value in values if isinstance(value, torch.Tensor) and value.requires_grad), None)
        if not ended and self._inside is None and not self._in_backward:  # transformers 4 recomputes with hooks
            if self._mark is not None and torch.is_grad_enabled() and not compat.torch.is_compiling():
                self._inside = name
                self.mark("forward", name, hidden is not None)
        elif ended and self._inside == name:
            self._inside = None
            self.mark("forwarded", name, hidden is not None)
            if hidden is not None:
                graphs = self._graphs()  # this hook belongs to the graph, and holds them as long as that exists
                begins: Any = lambda gradient, held=graphs: self._begins_backward(name)  # noqa: E731
                hidden.register_hook(begins)  # type: ignore[no-untyped-call]

    def _sees_head(self, head: nn.Module, args: Any, logits: Any) -> None:
        if compat.torch.is_compiling() or self._mark is None or not isinstance(logits, torch.Tensor):
            return
        if torch.is_grad_enabled():  # not if text is generated
            self.chunks_help = auto_helps(head, logits)

    def _begins_backward(self, name: str) -> None:
        if self._mark is None or compat.torch.is_compiling():
            return
        if not self._in_backward:
            compat.torch.call_after_backward(self._ends_backward)
            # The call of autograd's engine, which calls this; 0 in a thread of its own.
            self._call = compat.frames.running_call()
        self._in_backward = True
        self.mark("backward", name)

    def _ends_backward(self) -> None:
        self._in_backward = False
        self._call = 0
        self.mark("end")


class _Graphs:
    """Exists as long as the autograd graph of any forward of a step."""
