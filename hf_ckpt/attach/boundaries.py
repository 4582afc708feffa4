"""Hooks that mark the progress of a training step while it is measured: the begin and end of every block's forward,
the arrival of its output's gradient, and the end of the backward."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt import compat
from hf_ckpt.costs.steps import NOTHING, Freed
from hf_ckpt.engines.head.chunked import auto_helps
from hf_ckpt.measure.levels import Boundary
from hf_ckpt.spec.actions import Action

Gone = Callable[[], None] | None
OnBoundary = Callable[[Boundary, str, bool, Action | None, Freed], None]
"""Called at each boundary with (what it is; name of the block; whether the block's input, or its output, requires
gradients; for a mark of `engines.trials`, its action, and what the action frees)."""


class Boundaries:
    """Calls `mark` at the boundaries of all `blocks`, until `remove` is called.

    Only forwards that record gradients count; recomputations do not. Blocks inside a running block have no boundaries.
    A copy, on a copy of the model, does nothing.

    Args:
        blocks: name -> module.
        mark: see `OnBoundary`. Threads take turns to call it.
        gone: called when the autograd graphs of all forwards are gone: after the backward, or because the step ended
            without one.
        head: the projection onto the vocabulary, for `chunks_help`; None for models without one.
    """

    def __init__(
        self, blocks: Mapping[str, nn.Module], mark: OnBoundary | None, gone: Gone = None, head: nn.Module | None = None
    ) -> None:
        self._mark = mark
        self._gone = gone
        self._running: _Graphs | None = None
        """Held while a forward runs, whose graph does not hold it yet."""
        self._graphs: Callable[[], _Graphs | None] = lambda: None
        self._lock = threading.Lock()  # autograd runs the backward of each device in a thread of its own
        self._block: str | None = None
        """The block whose forward runs."""
        self._in_backward = False
        self._call: compat.frames.Running | None = None
        """The forward, backward or optimizer's step that runs; None without one, and if it is not known."""
        self.chunks_help = False
        """Whether the step called the head, and would need less memory with `"head": "auto"`. The losses of TRL use the
        head's weight and never call it."""
        self._handles: list[RemovableHandle] = []
        if head is not None:
            self._handles.append(head.register_forward_hook(self._after_head))
        for name, module in blocks.items():
            before = functools.partial(self._before, name)
            after = functools.partial(self._after, name)
            # Before other hooks: what they allocate, such as FSDP's gathered weights, is memory of the block.
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after))

    def __reduce__(self) -> tuple[Any, ...]:
        return Boundaries, ({}, None)  # deepcopy of a model copies the hooks on it, too

    def begin(self) -> None:
        """A forward of the step begins. Called from a forward pre-hook."""
        self._running = self._graphs()
        self._call = compat.frames.running_module()
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
            loss.register_hook(lambda gradient: self.mark(Boundary.RETURNED))  # type: ignore[no-untyped-call]
        else:
            self.mark(Boundary.RETURNED)
        self._running = self._call = None

    def was_interrupted(self) -> bool:
        """Whether a forward, the backward of blocks or an optimizer's step was left without a call of a hook, as by a
        KeyboardInterrupt."""
        return self._call is not None and self._call.has_ended()

    @property
    def is_on(self) -> bool:
        """Whether it marks boundaries: not on a copy, nor after `remove`."""
        return self._mark is not None

    @property
    def has_graph(self) -> bool:
        """Whether the graph of a forward of this step exists."""
        return self._graphs() is not None

    def remove(self) -> None:
        """Remove all hooks. Hooks on tensors of the step do nothing from now on."""
        self._mark = self._running = self._call = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def mark(
        self,
        what: Boundary,
        block: str = "",
        has_graph: bool = True,
        action: Action | None = None,
        freed: Freed = NOTHING,
    ) -> None:
        """Mark a boundary, until `remove` is called."""
        with self._lock:
            if self._mark is not None:
                self._mark(what, block, has_graph, action, freed)

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook: the forward of a block begins."""
        # transformers 4 recomputes a block together with its hooks, in backward. Blocks inside a block are part of it.
        if self._block is not None or self._in_backward or self._mark is None:
            return
        if torch.is_grad_enabled() and not compat.torch.is_compiling():
            self._block = name
            self.mark(Boundary.FORWARD, name, _with_graph((args, kwargs)) is not None)

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: the forward of a block has ended."""
        if self._block != name:
            return
        self._block = None
        hidden = _with_graph(output)
        self.mark(Boundary.FORWARDED, name, hidden is not None)
        if hidden is not None:
            # The graph holds this hook, and so `_Graphs`, which exists as long as the graph does.
            begins: Any = functools.partial(self._begins_backward, name, self._graphs())
            hidden.register_hook(begins)  # type: ignore[no-untyped-call]

    def _after_head(self, head: nn.Module, args: Any, logits: Any) -> None:
        if compat.torch.is_compiling() or self._mark is None or not isinstance(logits, torch.Tensor):
            return
        if torch.is_grad_enabled():  # not if text is generated
            self.chunks_help = auto_helps(head, logits)

    def _begins_backward(self, name: str, graphs: _Graphs | None, gradient: torch.Tensor) -> None:
        if self._mark is None or compat.torch.is_compiling():
            return
        if not self._in_backward:
            compat.autograd.call_after_backward(self._ends_backward)
            self._call = compat.frames.running_backward()
        self._in_backward = True
        self.mark(Boundary.BACKWARD, name)

    def _ends_backward(self) -> None:
        self._in_backward = False
        self._call = None
        self.mark(Boundary.END)

    def before_optimizer(self) -> None:
        """An optimizer's step begins, maybe that of another model."""
        if not self.was_interrupted():
            self._call = compat.frames.running_optimizer()

    def after_optimizer(self) -> None:
        """An optimizer's step has ended."""
        if not self.was_interrupted():
            self._call = None


def _with_graph(values: Any) -> torch.Tensor | None:
    """Return the first tensor among nested values that requires gradients: the hidden states, as long as they do."""
    tensors = (value for value in compat.torch.tree_leaves(values) if isinstance(value, torch.Tensor))
    return next((tensor for tensor in tensors if tensor.requires_grad), None)


class _Graphs:
    """Exists as long as the autograd graph of any forward of a step."""


class Waiting(dict[int, None]):
    """Exists as long as the autograd graph of any forward of a step, and is empty once there was a backward."""


GraphsReference = weakref.ref[Waiting]


def watch_graphs(output: Any, reference: GraphsReference | None) -> GraphsReference:
    """Let the graph of a forward, which has ended with this output, hold what the reference refers to.

    Args:
        output: a tensor, or a collection of tensors and other values.
        reference: what this function returned for the forward before it in the step.
    """
    waiting = None if reference is None else reference()
    if waiting is None:
        waiting = Waiting({0: None})
    values: Iterable[Any] = (output,)
    if isinstance(output, (tuple, list)):
        values = output
    elif isinstance(output, dict):
        values = output.values()
    for value in values:
        # Not of subclasses, such as logits in chunks, which run code of their own when they are read.
        if type(value) is torch.Tensor and value.grad_fn is not None:
            # Called in each backward, but without a Python call; what `pop` returns changes no gradient.
            value.grad_fn.register_prehook(functools.partial(dict.pop, waiting, 0))
    return weakref.ref(waiting)
