"""`selective` by rebuilding: drop every saved tensor that autograd's own graph can make again cheaply.

While a block's forward runs, saved-tensor hooks see each tensor that autograd saves, together with the node that made
it. Where `recipes.TABLE` has a row for that node and its operands are known, a recipe is saved in the tensor's place:
a function and operand values, never nodes, so no reference cycle arises and a graph that is dropped frees everything.
Everything else is kept as it is. Small modules (norms, activations of several operations) that the family names are run
again as a whole. In backward a recipe is computed once for all who need it and dropped after the last of them.

No random state is saved or restored: masks are operands, not draws.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hf_ckpt import compat
from hf_ckpt.engines.full import FullRegion, changed_by
from hf_ckpt.engines.offload import Group, Mover
from hf_ckpt.engines.recipes import VIEW, Row, rows_for
from hf_ckpt.engines.sac import SacRegion
from hf_ckpt.engines.values import (
    NO_GRAPH,
    Inside,
    Kept,
    KeptByUser,
    Recipe,
    Replay,
    Value,
    View,
    Witness,
    Work,
    unpack,
)
from hf_ckpt.errors import HfCkptError

log = logging.getLogger(__name__)

_Edge = tuple[Any, int]
_Observer = Callable[[], contextlib.AbstractContextManager[None]]


class RebuildRegion:
    """The checkpointing function of one block. It counts what it did, and holds neither the block nor the model."""

    def __init__(
        self,
        block: str,
        *,
        save: tuple[str, ...],
        compiled: SacRegion | None = None,
        mover: Mover | None = None,
        fallback: FullRegion | None = None,
    ) -> None:
        self.block = block
        self.fallback = fallback
        """For a block whose code is not known: what takes over when the first forward, which holds every tensor until
        the block has ended, shows that one cannot be made again. None for others."""
        self.trial = fallback is not None
        """Whether that forward is still to come."""
        self.failed = False
        self.mover = mover
        """Moves what stays to host memory; None where it stays on the device."""
        self.moved_bytes = 0
        """Moved by the last forward."""
        self.compiled = compiled
        """What runs in its place under torch.compile, where there is no graph of nodes to walk."""
        self.save = save
        self.work = Work(block)
        self.rows = rows_for(save)
        self.forwards = 0
        """Calls that recorded recipes."""
        self.dropped: dict[str, int] = {}
        """Op class (or module class) -> bytes dropped by the last forward."""
        self.kept: dict[str, int] = {}
        """Autograd node that made it -> bytes kept by the last forward; parameters left out."""
        self.kept_to_rebuild: dict[str, int] = {}
        """Those of them that autograd itself would not hold."""
        self.reaches_back = False
        """Whether the block may rebuild its input, when that is a norm or an embedding of what stays. Set when it is
        known that parameters stay where they are: in this block's backward, sharded ones of others are gone."""

    @property
    def recomputed(self) -> int:
        """Operations and modules run again in backward."""
        return self.work.rebuilt + (self.fallback.recomputed if self.fallback is not None else 0)

    @property
    def in_graph(self) -> bool:
        """Whether it was called from a graph of torch.compile, where nothing can be counted."""
        return self.compiled is not None and self.compiled.in_graph

    @property
    def observer(self) -> _Observer | None:
        """Entered around every rebuilding; set by measurements."""
        return self.work.observer

    @observer.setter
    def observer(self, observer: _Observer | None) -> None:
        self.work.observer = observer
        if self.fallback is not None:
            self.fallback.observer = observer

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward, saving recipes where it can.

        Raises `HfCkptError` under torch.compile when `engine` is `rebuild`.
        """
        if not torch.is_grad_enabled():
            return fn(*args)
        if compat.is_compiling():
            if self.compiled is None:
                raise HfCkptError('"engine": "rebuild" cannot work under torch.compile; "auto" takes SAC there.')
            return self.compiled(fn, *args)
        args = tuple(None if compat.is_cache(arg) else arg for arg in args)
        self.forwards += 1
        self.moved_bytes = 0
        untried = self.trial and compat.top_saved_tensor_hooks() is not None  # under those nothing can be proved
        if (self.failed or untried) and self.fallback is not None:
            self.dropped, self.kept, self.kept_to_rebuild = {}, {}, {}
            return self.fallback(fn, *args)
        group = self._open_group(args)
        if group is None:
            return self._run(fn, args)
        try:
            with torch.autograd.graph.saved_tensors_hooks(group.pack, group.unpack):
                output = self._run(fn, args)
        except BaseException:
            group.abandon()
            raise
        group.close_late()
        self.moved_bytes = group.moved_bytes
        return output

    def _open_group(self, args: tuple[Any, ...]) -> Group | None:
        if self.mover is None or self.trial or not args or not isinstance(args[0], torch.Tensor):
            return None
        lane = self.mover.lane(args[0])
        return None if lane is None else self.mover.open(self.block, lane, args[0])

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        tape = _Tape(self, args)
        outer, _running.tape = _running.tape, tape
        try:
            with torch.autograd.graph.saved_tensors_hooks(tape.pack, unpack):
                output = fn(*args)
            if tape.witnesses is None or self._stands(tape):
                tape.hand_over(output)
            return output
        finally:
            _running.tape = outer
            tape.close()

    def _stands(self, tape: _Tape) -> bool:
        """Whether all that was dropped can be made again. If not, this forward drops nothing after all."""
        witnesses = tape.witnesses or []
        wrong = next((witness for witness in reversed(witnesses) if not self.work.tried(witness)), None)
        # A frozen block has nothing to show.
        self.trial, self.failed = not (tape.kept or tape.dropped), wrong is not None
        done: set[Any] = set()
        for witness in witnesses:
            if wrong is None:
                witness.believe(done)
            else:
                witness.keep()
        if wrong is not None:
            tape.count_as_kept()
            log.warning(
                "hf_ckpt: block %r cannot make again what %s made, most likely because it works in place%s. All is "
                "kept there in this step, and the block is recomputed as a whole (`full`) from the next one on.",
                self.block,
                wrong.made_by,
                tape.changed_by(),
            )
        return wrong is None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "rows"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, rows=rows_for(state["save"]))


class _Handed(NamedTuple):
    """How the next block makes its input again."""

    version: int
    """Of the tensor, when it was handed over."""
    replay: Callable[[], Replay | None]
    """The norm that made it; None once the graph that holds what it needs is gone."""


class _Running(threading.local):
    """The tape of the block that this thread runs: replicas of a model may run in threads of their own."""

    tape: _Tape | None = None


_running = _Running()
# Outputs that the next block can make again.
_handed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def enter_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a small module that may be run again as a whole."""
    tape = None if compat.is_compiling() else _running.tape
    if tape is None or tape.replay is not None or kwargs or len(args) != 1 or not torch.is_grad_enabled():
        return
    # Somebody else's hook may change what goes in or comes out, so such a module is left to its single operations.
    if len(module._forward_hooks) == 1 and len(module._forward_pre_hooks) == 1 and isinstance(args[0], torch.Tensor):
        tape.enter(module, args[0])


def leave_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a small module."""
    tape = None if compat.is_compiling() else _running.tape
    if tape is not None and tape.replay is not None and tape.replay.module is module:
        tape.leave(output)


def hand_to_first_block(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of an embedding's norm: its input stays for its own backward, so a block can make its own again."""
    if compat.is_compiling() or compat.top_saved_tensor_hooks() is not None:  # then what stays is for those to say
        return
    if _running.tape is None and len(args) == 1 and isinstance(output, torch.Tensor) and output.grad_fn is not None:
        work = Work(type(module).__name__)
        replay = Replay(work, module, Kept(args[0], work.block), args[0], checked=False)
        _handed[output] = _Handed(output._version, lambda: replay)


class _Tape:
    """What is known while one forward of a block runs: edge of the graph -> value."""

    def __init__(self, region: RebuildRegion, args: tuple[Any, ...]) -> None:
        self.region = region
        self.work = region.work
        self.rows = region.rows
        self.first = compat.next_autograd_sequence_number()
        self.outer = compat.top_saved_tensor_hooks()
        self.values: dict[_Edge, Value | None] = {}
        self.given: dict[_Edge, tuple[torch.Tensor, int]] = {}
        """The block's inputs, as far as they have a graph, and the versions they came in."""
        self.replay: Replay | None = None
        self.names: dict[Kept | KeptByUser, str] = {}
        """Tensors that stay, if anything comes to need them -> the node that made them. Parameters are not there."""
        self.saved: set[Any] = set()
        """What autograd holds: roots of values, edges inside small modules."""
        self.needed: set[Any] = set()
        """Roots that those need, and the storages of what stays among them."""
        self.extra: dict[Any, tuple[str, int]] = {}
        """Storages that stay to rebuild from, and that autograd has not asked for: their node and bytes."""
        self.dropped: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        self.constants: dict[Any, Kept | KeptByUser] = {}
        """What tells a tensor without a graph -> its value, under the user's hooks."""
        self.ungraphed: list[tuple[torch.Tensor, Value | None]] = []
        """Inputs and norms of a block below which nothing is trained: no graph tells where their casts come from."""
        self.witnesses: list[Witness] | None = None
        """On trial, what was packed."""
        self.seen: list[tuple[torch.Tensor, int]] = []
        """On trial, tensors and their versions when they were first seen."""
        if region.trial and self.outer is None and not any(map(compat.is_fake, filter(torch.is_tensor, args))):
            self.witnesses = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                self._take(arg)

    def _take(self, arg: torch.Tensor) -> None:
        node = arg.grad_fn
        if node is None:
            if arg.is_floating_point() and not arg.is_inference():
                self.ungraphed.append((arg, None))
            return
        value: Value | None = None
        if self.region.reaches_back:
            handed: _Handed | None = _handed.pop(arg, None) if _handed.data else None  # type: ignore[no-untyped-call]
            replay = handed.replay() if handed is not None and handed.version == arg._version else None
            if replay is not None:
                value = Recipe(self.work, type(replay.module).__name__, replay, [])
            # Its indices are read off a node before the block, which would ask the user's hooks for them.
            embeds = self.outer is None and node.name() == "EmbeddingBackward0" and not arg._version
            if embeds and type(self.resolve(node.next_functions[0])) is Kept:
                value = self._make(self.rows[node.name()], node, arg.output_nr)
        if value is None:
            self.given[node, arg.output_nr] = arg, arg._version
        else:
            self.values[node, arg.output_nr] = value

    def hand_over(self, outputs: Any) -> None:
        """Let the next block make this block's output again, if it is a norm of something that stays."""
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if not isinstance(output, torch.Tensor) or output._version:  # changed in place since the norm made it
                continue
            recipe = self.values.get((output.grad_fn, output.output_nr))
            if type(recipe) is Recipe and type(recipe.operation) is Replay:
                replay = recipe.operation
                if type(replay.source.root) is not Recipe:
                    _handed[output] = _Handed(output._version, weakref.ref(replay))

    def close(self) -> None:
        """Forget every node: autograd holds the hooks, so a tape that held nodes would be a reference cycle."""
        for value in self.names if self.outer is not None else ():
            if type(value) is KeptByUser:
                value.original = None
        self.values.clear()
        self.given.clear()
        self.names.clear()
        self.constants.clear()
        self.saved.clear()
        self.needed.clear()
        self.ungraphed.clear()
        self.seen.clear()
        self.witnesses = None
        self.replay = None
        self.region.dropped, self.region.kept = self.dropped, self.kept
        extra: dict[str, int] = {}
        self.region.kept_to_rebuild = extra
        for name, nbytes in self.extra.values():
            extra[name] = extra.get(name, 0) + nbytes
        self.extra.clear()
        if self.kept.keys() - {NO_GRAPH} and not self.dropped:
            compiled = any(name.startswith("CompiledFunction") for name in self.kept)
            _warn_nothing_dropped(self.region.save, compiled)

    # --- saved tensors ----------------------------------------------------------------------------------------------

    @compat.untraced  # a compiled part of a block calls it
    def pack(self, tensor: torch.Tensor) -> Value | Inside | Witness:
        """What autograd holds in place of `tensor`."""
        value = self._packed(tensor)
        if self.witnesses is None or type(value) is Kept:
            return value
        self._look_at(tensor)
        witness = Witness(value, tensor, self.work.block)
        self.witnesses.append(witness)
        return witness

    def _look_at(self, tensor: torch.Tensor) -> None:
        if self.witnesses is not None and not tensor.is_inference():
            self.seen.append((tensor, tensor._version))

    def changed_by(self) -> str:
        """The operations that changed what was seen, as far as their graph tells."""
        names = sorted({changed_by(found) for found, version in self.seen if found._version != version})
        return f" ({', '.join(names)})" if names else ""

    def count_as_kept(self) -> None:
        """Nothing was dropped after all."""
        self.dropped.clear()
        self.extra.clear()
        storages = {witness.storage(): witness for witness in self.witnesses or ()}
        for (_, nbytes), witness in storages.items():
            self.kept[witness.made_by] = self.kept.get(witness.made_by, 0) + nbytes

    def _packed(self, tensor: torch.Tensor) -> Value | Inside:
        replay = self.replay
        if replay is not None:
            return self._inside(tensor, replay)
        leaf = tensor if type(tensor) is nn.Parameter else tensor._base
        if type(leaf) is nn.Parameter and leaf.is_leaf:
            return Kept(tensor, self.work.block, with_graph=True)
        value = self.value_of(tensor)
        root = value.root
        if type(root) is Recipe and value is root:
            root.stride = tensor.stride()
        if root not in self.saved:
            self._count(root, tensor.nbytes)
        if type(value) is not Kept:
            root.expect()
        return value

    def value_of(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor at hand: known, made again, or kept."""
        node, version = tensor.grad_fn, tensor._version
        base = tensor._base
        if base is not None and not version:
            known = self._of_base(base, tensor)
            if known is not None:
                return known
        if node is None:
            return self._from_ungraphed(tensor) or self._constant(tensor)
        edge = node, tensor.output_nr
        value = self.resolve(edge) or self._small(edge, tensor)
        if value is None:
            return self._keep(edge, tensor)
        root = value.root
        if isinstance(root, Recipe):
            if version:  # changed in place: the graph may not tell all that was done to it
                return self._keep(edge, tensor)
        elif not root.copied:
            if value is root:
                if root.version != version:  # changed in place, without a graph, since it was first seen
                    return self._keep(edge, tensor)
            elif type(root) is Kept:  # a view of what stays needs no recipe
                value = self.values[edge] = self._another(root, tensor)
        return value

    def _of_base(self, base: torch.Tensor, tensor: torch.Tensor) -> Value | None:
        """A view, without walking the graph, where the tensor it looks at is a parameter or has a value already."""
        node = base.grad_fn
        value = self.values.get((node, base.output_nr)) if node is not None else None
        if type(value) is Kept:
            return None if value.copied else self._another(value, tensor)
        if type(value) is not Recipe or not base.is_contiguous():
            return None
        if tensor.dtype is not base.dtype or tensor.is_conj() or tensor.is_neg():  # more than sizes, strides and offset
            return None
        value.stride = base.stride()
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset() - base.storage_offset()
        return View(value, lambda x: x.as_strided(size, stride, x.storage_offset() + offset))

    def _another(self, kept: Kept, tensor: torch.Tensor) -> Kept:
        """A view of the same storage."""
        view = Kept(tensor, self.work.block)
        if kept in self.names:  # and not a parameter
            self.names[view] = self.names[kept]
        return view

    def resolve(self, edge: _Edge) -> Value | None:
        """The value of an edge, made by recipe if it is not known; None if it cannot be made."""
        values = self.values
        if edge in values:
            return values[edge]
        if edge in self.given:
            arg, version = self.given[edge]
            return self._keep(edge, arg) if arg._version == version else None
        node, number = edge
        name = node.name()
        row = self.rows.get(name)
        value: Value | None = None
        if row is not None:
            if node._sequence_nr() >= self.first:  # what ran before this block is not its to run again
                value = self._make(row, node, number)
        elif name == "torch::autograd::AccumulateGrad":
            value = Kept(node.variable, self.work.block)
        values[edge] = value
        return value

    def _make(self, row: Row, node: Any, number: int) -> Value | None:
        values, operands = self.values, []
        for place, source in enumerate(node.next_functions):
            if source in values:
                operand = values[source]
            elif source[0] is not None:
                operand = self.resolve(source)
            else:
                operand = self._constant_operand(row, node, place)
            if operand is None:
                return None
            operands.append(operand)
        operation = row.prepare(node, node._input_metadata[number])
        if operation is None:
            return None
        if row.op_class == VIEW:
            return View(operands[0], operation)
        return Recipe(self.work, row.op_class, operation, operands)

    def _constant_operand(self, row: Row, node: Any, place: int) -> Value | None:
        """An operand that needs no gradient, read off the node where it saved one."""
        name = row.constants[place] if place < len(row.constants) else ""
        if not name:  # a unary operation has one operand, so a missing edge means it is not known
            return None
        found = getattr(node, f"_saved_{name}", None)
        if not isinstance(found, torch.Tensor):
            return None
        return self._constant(found) if found.dim() else Kept(found, self.work.block)  # a number is no activation

    def _small(self, edge: _Edge, tensor: torch.Tensor) -> Value | None:
        """A float32 tensor that was cast up from 16 bits is kept as those: exact, and half the size."""
        node, _ = edge
        if tensor.dtype != torch.float32 or node.name() != "ToCopyBackward0" or not tensor.is_contiguous():
            return None
        (source,) = node.next_functions
        if source[0] is None or node._sequence_nr() < self.first or tensor._version:
            return None
        dtype = source[0]._input_metadata[source[1]].dtype
        if dtype not in (torch.bfloat16, torch.float16):
            return None
        with torch.no_grad():
            small = self._stays(tensor.detach().to(dtype), node.name(), copied=True)
        self.values[source] = small
        value = self.values[edge] = self._make(self.rows[node.name()], node, 0)
        return value

    def _keep(self, edge: _Edge, tensor: torch.Tensor) -> Kept | KeptByUser:
        value = self.values[edge] = self._stays(tensor, edge[0].name())
        return value

    def _stays(self, tensor: torch.Tensor, name: str, *, copied: bool = False) -> Kept | KeptByUser:
        """An activation that stays, as the user's hooks around the model have it, if there are any."""
        value = (
            Kept(tensor, self.work.block, copied=copied)
            if self.outer is None
            else KeptByUser(tensor, self.outer, copied=copied)
        )
        self.names[value] = name
        self._look_at(tensor)
        return value

    def _from_ungraphed(self, tensor: torch.Tensor) -> Value | None:
        """`tensor` as an ungraphed one or its float32 cast (the input of a LoRA adapter in the first block).

        Without a graph only the values can tell a cast, so they are compared: exact, and on the CPU only, because an
        accelerator would have to be waited for.
        """
        for number, (source, value) in enumerate(self.ungraphed):
            if source.numel() != tensor.numel() or not tensor.is_contiguous() or source._version:
                continue
            if source.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                if not isinstance(value, Recipe) or source.dtype is not tensor.dtype:
                    return None
                return View(value, functools.partial(_shaped, tensor.shape))
            if _is_cast(tensor, source):
                if value is None:
                    value = self._constant(source)
                    self.ungraphed[number] = source, value
                return Recipe(self.work, "cast", functools.partial(_shaped, tensor.shape, dtype=tensor.dtype), [value])
        return None

    def _constant(self, tensor: torch.Tensor) -> Kept | KeptByUser:
        if isinstance(tensor, nn.Parameter):
            return Kept(tensor, self.work.block)
        if self.outer is None:
            return self._stays(tensor, NO_GRAPH)
        # Saved, and then read off a node as an operand, it goes through the user's hooks once.
        key = tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype, tensor._version
        if key not in self.constants:
            self.constants[key] = self._stays(tensor, NO_GRAPH)
        return self.constants[key]

    # --- modules that are run again as a whole ----------------------------------------------------------------------

    def enter(self, module: nn.Module, tensor: torch.Tensor) -> None:
        """A small module begins."""
        self.replay = Replay(self.work, module, self.value_of(tensor), tensor)

    def leave(self, output: Any) -> None:
        """It has ended; its output can be made again."""
        replay, self.replay = self.replay, None
        if replay is None or not isinstance(output, torch.Tensor):
            return
        recipe = Recipe(self.work, type(replay.module).__name__, replay, [])
        if output.grad_fn is None:
            self.ungraphed.append((output, recipe))
        else:
            self.values[output.grad_fn, output.output_nr] = recipe

    def _inside(self, tensor: torch.Tensor, replay: Replay) -> Inside:
        if not replay.saved:
            self._need(replay.source.root)
        node, name = tensor.grad_fn, type(replay.module).__name__
        if node is not None:
            edge = node, tensor.output_nr
            if edge in self.values:  # what comes in
                value = self.values[edge]
                if value is not None and value.root not in self.saved:
                    self._count(value.root, tensor.nbytes)
            elif edge not in self.saved:
                self.saved.add(edge)
                self.dropped[name] = self.dropped.get(name, 0) + tensor.nbytes
        elif not isinstance(tensor, nn.Parameter):
            self.dropped[name] = self.dropped.get(name, 0) + tensor.nbytes
        return Inside(replay)

    # --- counting ---------------------------------------------------------------------------------------------------

    def _count(self, root: Kept | KeptByUser | Recipe, nbytes: int) -> None:
        """Autograd holds `root` from now on, for a tensor of `nbytes`."""
        self.saved.add(root)
        self._need(root)
        if type(root) is Recipe:
            self.dropped[root.op_class] = self.dropped.get(root.op_class, 0) + nbytes
        elif root in self.names:
            self.extra.pop(root.storage()[0], None)

    def _need(self, root: Kept | KeptByUser | Recipe) -> None:
        """Count what stays for the sake of `root`."""
        if root in self.needed:
            return
        self.needed.add(root)
        if type(root) is Recipe:
            if type(root.operation) is Replay:
                self._need(root.operation.source.root)
            for operand in root.operands:
                self._need(operand.root)
        elif root in self.names:
            storage, nbytes = root.storage()
            if storage not in self.needed:
                self.needed.add(storage)
                name = self.names[root]
                self.kept[name] = self.kept.get(name, 0) + nbytes
                self.extra[storage] = name, nbytes


def _shaped(shape: torch.Size, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return x.to(dtype).view(shape) if dtype is not None else x.view(shape)


@functools.lru_cache(maxsize=8)  # once for each `save`
def _warn_nothing_dropped(save: tuple[str, ...], compiled: bool) -> None:
    log.warning(
        "`selective` with save %s found nothing in a block that can be rebuilt, so every activation is kept there. %s",
        list(save),
        "It is compiled in itself: compile the whole model instead, or replace each block by `torch.compile(block)`; "
        "or use `full`."
        if compiled
        else "Use `full` for such blocks.",
    )


def _is_cast(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `tensor` holds the values of the 16-bit `source` in float32."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or source.dtype.itemsize != 2:
        return False
    found, wanted = tensor.reshape(-1), source.detach().reshape(-1)
    few = slice(0, 64)  # most that are no cast end here
    return torch.equal(found[few], wanted[few].float()) and torch.equal(found, wanted.float())
