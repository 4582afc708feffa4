"""What every action costs each kind of block, traced on fake tensors: bytes through a step, operations, time.

A few short models are run, forward and backward, whose blocks together show every action behind every other action,
at the beginning and at the end of their stack. What happens in each block is cut out of the run, and `timeline` puts it
together again at any depth.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hf_ckpt import compat
from hf_ckpt.blueprint import Blueprint, Weights
from hf_ckpt.devices import Device
from hf_ckpt.errors import HfCkptError, InPlaceError
from hf_ckpt.families import find_blocks
from hf_ckpt.measure import LiveBytes
from hf_ckpt.plan import KEEP, Action, Block, Plan
from hf_ckpt.timeline import BlockCost, Costs, Key, Phase, StackCosts, Static

Apply = Callable[[nn.Module, Plan], contextlib.AbstractContextManager[None]]
"""Puts a plan on a model for a while."""
Walk = tuple[Key, ...]
Place = tuple[str, int, int]
"""What of a step: ("forward" or "backward", stack, block), or ("before", ...), ("head", ...) around the blocks."""

ACTIONS = (KEEP, Action("selective", ("linear", "attention")), Action("selective", ("attention",)), Action("full"))
"""What a plan chooses from."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One micro-step, and what surrounds it."""

    batch: Mapping[str, Any]
    """Keyword arguments of the model's forward: tensors, of which only shape and type count, and plain values."""
    padded: bool = False
    """Whether an attention mask masks anything."""
    autocast: torch.dtype | None = None
    accumulation: int = 1
    """Micro-steps a step."""
    optimizer: str = "adamw"
    optimizer_bytes: int | None = None
    """Of its state, where it is known; else by `optimizer`."""
    loss: Callable[[Any], torch.Tensor] | None = None
    """Outputs -> loss, where the model itself computes none."""

    @property
    def tokens(self) -> int:
        """Of the first two dimensions of the longest of its integer inputs."""
        sizes = [value.numel() for value in self.batch.values() if _is_ids(value)]
        return max(sizes, default=0)


def trace_costs(
    blueprint: Blueprint,
    step: Step,
    device: Device,
    apply: Apply,
    *,
    actions: Sequence[Action] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Costs:
    """Trace what every action costs.

    Args:
        blueprint: of the model.
        step: what is run.
        device: whose table says how long operations take.
        apply: puts a plan on a model for a while.
        actions: what to choose from, `actions_for(blueprint)` unless given; the first is what blocks get that save
            nothing.
        on_progress: called before each traced model.

    Raises `HfCkptError` when the model cannot run on fake tensors.
    """
    actions = actions_for(blueprint) if actions is None else actions
    stacks = blueprint.stacks
    choices = [_choices(kinds_frozen, len(actions)) for kinds_frozen in ([k.frozen for k in s.kinds] for s in stacks)]
    walks = [walks_of(stack.row, choice) for stack, choice in zip(stacks, choices, strict=True)]
    runs: list[_Run] = []
    for number in range(max(map(len, walks))):
        if on_progress is not None:
            on_progress(f"tracing {number + 1} of {max(map(len, walks))}")
        chosen = [found[min(number, len(found) - 1)] for found in walks]
        runs.append(_trace(blueprint, chosen, step, device, apply, actions))
    for number in range(len(stacks)):  # what no block ever keeps is let go under every plan
        always = min(run.released[number] for run in runs)
        for run in runs:
            run.released[number] -= always
    made: list[StackCosts] = []
    for number, stack in enumerate(stacks):
        gradients = [kind.weights.gradients for kind in stack.kinds]
        found = StackCosts(
            name=stack.name,
            blocks=stack.blocks,
            kinds=stack.row,
            choices=choices[number],
            **_stack_costs(number, runs, gradients, stack.row, choices[number]),
        )
        made.append(found)
        for run in runs:
            run.lent_before += sum(found.costs[ways].lent_bytes for ways in _ways(run.walks[number]))
    head = {run.walks[-1][-1]: (run.behind("head", len(stacks) - 1), run.phase("head back", 0, 0)) for run in runs}
    everything = blueprint.weights
    state = step.optimizer_bytes
    optimizer = optimizer_state(everything, step.optimizer) if state is None else state
    static = Static(
        parameters=everything.nbytes,
        buffers=blueprint.buffers,
        optimizer=optimizer,
        gradients=everything.gradients,
        batch=sum(value.nbytes for value in step.batch.values() if isinstance(value, torch.Tensor)),
    )
    moved = 2 * (static.optimizer + everything.gradients) + everything.gradients
    return Costs(
        family=blueprint.family,
        model=blueprint.model,
        actions=tuple(actions),
        stacks=tuple(made),
        head=head,
        static=static,
        tokens=step.tokens,
        accumulation=step.accumulation,
        optimizer_nanoseconds=device.nanoseconds(0, moved, 4),
    )


def chunked_head(
    costs: Costs, blueprint: Blueprint, step: Step, device: Device, apply: Apply, head: int | str
) -> Costs:
    """`costs` with the head and its loss in chunks: `head` is `auto` or how many tokens each has.

    What the blocks do is all but the same to it, so that one short model tells.
    """
    walks = [tuple((kind, 0) for kind in dict.fromkeys(stack.row)) for stack in blueprint.stacks]
    plain, chunked = (_trace(blueprint, walks, step, device, apply, [KEEP], head=how) for how in ("full", head))
    forward, backward = chunked.phase("head", 0, 0), chunked.phase("head back", 0, 0)
    # What is let go behind the last stack was put down to the blocks when `costs` were made.
    known = next(iter(costs.head.values()))
    less = plain.phase("head", 0, 0).net - known[0].net
    forward = dataclasses.replace(forward, points=tuple((other - less, done) for other, done in forward.points))
    # Times may have been measured since.
    table = sum(plain.phase(name, 0, 0).nanoseconds for name in ("head", "head back"))
    ratio = sum(phase.nanoseconds for phase in known) / max(1, table)
    forward, backward = (
        dataclasses.replace(phase, nanoseconds=round(phase.nanoseconds * ratio)) for phase in (forward, backward)
    )
    return dataclasses.replace(costs, head=dict.fromkeys(costs.head, (forward, backward)), head_tokens=head)


def actions_for(blueprint: Blueprint) -> tuple[Action, ...]:
    """What a plan for this model chooses from: attention is run again where its weights are held, and only there."""
    eager = getattr(blueprint.base.config, "_attn_implementation", None) == "eager"
    return (*ACTIONS[:-1], Action("selective", ("linear",)), ACTIONS[-1]) if eager else ACTIONS


# --- which blocks to run, in which order ------------------------------------------------------------------------------


def _choices(frozen: Sequence[bool], actions: int) -> tuple[tuple[int, ...], ...]:
    return tuple((0,) if nothing else tuple(range(actions)) for nothing in frozen)


def walks_of(row: Sequence[int], choices: Sequence[Sequence[int]]) -> list[Walk]:
    """Short sequences of (kind, action) that show all there is to see of a stack.

    Every kind that comes first or last does so under each of its actions. Where blocks of a kind follow each other,
    each action follows each; from a kind to another there is one step at least for every action.
    """
    pairs = set(itertools.pairwise(row))
    steps: dict[Key, list[Key]] = collections.defaultdict(list)
    for kind, following in sorted(pairs):
        here, there = choices[kind], choices[following]
        wide = kind == following or (following, following) not in pairs
        for number, place in itertools.product(range(len(here)), range(len(there))):
            if wide or place % len(here) == number or number % len(there) == place:
                steps[kind, here[number]].append((following, there[place]))
    starts: list[Key] = [(row[0], action) for action in choices[row[0]]]
    if len(row) == 1:
        return [(key,) for key in starts]
    lasts: set[Key] = {(row[-1], action) for action in choices[row[-1]]}
    left = {(key, following) for key, found in steps.items() for following in found}
    left_starts, left_lasts = list(starts), set(lasts)

    def has_more(key: Key) -> bool:
        return any((key, following) in left for following in steps[key])

    def way_on(key: Key, wanted: Callable[[Key], bool]) -> list[Key]:
        """One step at least: what comes first and last at once would show neither."""
        ways = [_path(following, steps, wanted) for following in steps[key]]
        return min((way for way in ways if way), key=len, default=[])

    walks: list[Walk] = []
    inside: set[tuple[Key, Key]] = set()
    while left_starts or left or left_lasts:
        if left_starts:
            walk = [left_starts.pop(0)]
        else:
            walk = [next(k for k in starts if way_on(k, left_lasts.__contains__) or _path(k, steps, has_more))]
        while path := _path(walk[-1], steps, has_more):
            unseen = next(key for key in steps[path[-1]] if (path[-1], key) in left)
            left.discard((path[-1], unseen))
            walk += [*path[1:], unseen]
        if len(walk) == 1 or walk[-1] not in left_lasts:
            tail = way_on(walk[-1], left_lasts.__contains__)
            if not tail and (len(walk) == 1 or walk[-1] not in lasts):
                tail = way_on(walk[-1], lasts.__contains__)
            walk += tail
        # At the end of a walk a block's forward is mixed with what is let go behind the stack.
        while walk[-1] in steps[walk[-1]] and (walk[-2], walk[-1]) not in inside | set(itertools.pairwise(walk[:-1])):
            walk.append(walk[-1])
        inside |= set(itertools.pairwise(walk[:-1]))
        left_lasts.discard(walk[-1])
        left -= set(itertools.pairwise(walk))
        walks.append(tuple(walk))
    return walks


def _path(start: Key, steps: Mapping[Key, Sequence[Key]], wanted: Callable[[Key], bool]) -> list[Key]:
    """The shortest way to a key that is wanted, `start` included; empty if there is none."""
    queue = collections.deque([[start]])
    seen = {start}
    while queue:
        path = queue.popleft()
        if wanted(path[-1]):
            return path
        for following in steps.get(path[-1], ()):
            if following not in seen:
                seen.add(following)
                queue.append([*path, following])
    return []


# --- one run ----------------------------------------------------------------------------------------------------------


class _Run:
    """What one traced step showed."""

    def __init__(self, walks: Sequence[Walk], tracer: _Tracer) -> None:
        self.walks = tuple(walks)
        self.phases = tracer.phases
        self.starts = tracer.starts
        self.ends = tracer.ends
        self.outputs = tracer.outputs()
        self.lent = tracer.lent
        self.lent_before = 0
        """Bytes that blocks of the stacks so far lend until the forward ends."""
        self.released = tracer.released

    def phase(self, what: str, stack: int, block: int) -> Phase:
        """A part of the step; empty if it did not come to run."""
        return self.phases.get((what, stack, block), Phase())

    def behind(self, what: str, stack: int) -> Phase:
        """A part that comes behind `stack`, as if nothing made before the stack were let go in it: whether it is
        depends on the stack's first block, and this is about its last."""
        phase, held = self.phase(*((what, stack + 1, 0) if what == "before" else (what, 0, 0))), self.released[stack]
        return dataclasses.replace(phase, points=tuple((other + held, done) for other, done in phase.points))

    def other(self, place: Place) -> int | None:
        """Bytes alive when that part began, finished gradients left out; None if it did not run."""
        found = self.starts.get(place)
        return None if found is None else found[0]

    def after(self, place: Place) -> int:
        """The same when it ended."""
        return self.ends[place][0]


def _trace(
    blueprint: Blueprint,
    walks: Sequence[Walk],
    step: Step,
    device: Device,
    apply: Apply,
    actions: Sequence[Action],
    *,
    head: int | str = "full",
) -> _Run:
    rows = [[kind for kind, _ in walk] for walk in walks]
    with blueprint.assembled(rows) as model, contextlib.ExitStack() as stack:
        found = find_blocks(model)
        numbers = [action for walk in walks for _, action in walk]
        pairs = zip(found.blocks, (actions[number] for number in numbers), strict=True)
        plan = Plan(found.family, found.model, tuple(pairs), head=head)
        stack.enter_context(apply(model, plan))
        try:
            with blueprint.fake, compat.fake_values_count():
                inputs = {name: _fake(value) for name, value in step.batch.items()}
                if compat.wants_use_cache(model):
                    inputs["use_cache"] = False
                tracer = _Tracer(device, found.blocks, found.modules, model, inputs)
                with tracer, Answers(padded=step.padded, casts=device.name == "cpu"):
                    autocast = functools.partial(torch.autocast, "cpu", dtype=step.autocast)
                    with autocast() if step.autocast is not None else contextlib.nullcontext():
                        loss = _loss(model, inputs, step)
                    tracer.begin("head back", 0, 0, backward=True)
                    loss.backward()  # type: ignore[no-untyped-call]
                    tracer.finish()
        except InPlaceError as error:
            raise HfCkptError(
                f"{blueprint.model} cannot be planned for, because its blocks work in place on their hidden states. "
                "`full` and `selective` need no plan."
            ) from error
        except HfCkptError:
            raise
        except Exception as error:
            raise HfCkptError(_unplannable(blueprint.model, error)) from error
        finally:
            for parameter in model.parameters():
                parameter.grad = None
        return _Run(walks, tracer)


def _unplannable(model: str, error: Exception) -> str:
    reason = f"it does not run without its weights: {type(error).__name__}: {error}"
    if compat.depends_on_values(error):  # experts that are called one by one
        reason = (
            f"how large its tensors are depends on their values ({error}). If that is how tokens find their experts, "
            'load the model with experts_implementation="grouped_mm" or "batched_mm"'
        )
    return f"{model} cannot be planned for, because {reason}. `selective`, `full` and other policies need no plan."


def _loss(model: nn.Module, inputs: Mapping[str, Any], step: Step) -> torch.Tensor:
    """In a function of its own, so that the outputs are gone before the backward, as they are in a Trainer."""
    outputs = model(**inputs)
    loss: torch.Tensor = step.loss(outputs) if step.loss is not None else outputs.loss
    return loss


def _fake(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _is_ids(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what fake tensors, which have no values, are asked about them.

    Args:
        padded: whether an attention mask masks anything: "is everything on?" is answered by it.
        casts: whether to know the cast of a tensor by its values, as the rebuild engine does on the CPU.
    """

    def __init__(self, *, padded: bool, casts: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.padded = padded
        self.casts = casts
        self._sources: dict[int, int] = {}
        """Storage of a cast -> storage it was cast from."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return not self.padded
        if func is torch.ops.aten.equal.default:
            return self.casts and self._source(args[0]) == self._source(args[1])
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and self.casts:
            storage = result.untyped_storage()
            self._sources[storage._cdata] = self._source(args[0])
            weakref.finalize(storage, self._sources.pop, storage._cdata, None).atexit = False
        return result

    def _source(self, tensor: torch.Tensor) -> int:
        key: int = tensor.untyped_storage()._cdata
        return self._sources.get(key, key)


class _Tracer(LiveBytes):
    """Cuts a step into parts: the forward and the backward of every block, and what is around them."""

    def __init__(
        self,
        device: Device,
        blocks: Sequence[Block],
        modules: Mapping[str, nn.Module],
        model: nn.Module,
        inputs: Mapping[str, Any],
    ) -> None:
        self._place: Place = ("", 0, 0)
        super().__init__(model, inputs)
        self._place = ("before", 0, 0)
        self.device = device
        self.phases: dict[Place, Phase] = {}
        self.starts: dict[Place, tuple[int, int]] = {}
        self.ends: dict[Place, tuple[int, int]] = {}
        self._stacks = {name: number for number, name in enumerate(dict.fromkeys(block.stack for block in blocks))}
        self._depths = collections.Counter(self._stacks[block.stack] for block in blocks)
        self._blocks, self._modules, self._model = blocks, modules, model
        self._done = 0
        """Bytes of finished gradients."""
        self._backward = False
        self._next: Place | None = None
        """Where the next operation belongs, if not here."""
        self._made: dict[int, Place] = {}
        """Storage made in a block's forward -> that block."""
        self._given_on: dict[Place, int] = collections.Counter()
        self.lent: dict[Place, int] = collections.Counter()
        """Block -> bytes that its forward made and that are let go when the forward of the model ends."""
        self._held_back = 0
        """Those of them that are gone already, but count until then."""
        self.released: dict[int, int] = collections.Counter()
        """Stack -> bytes made before it and let go between its forward and its backward: what the model's own variables
        held, unless the first block keeps it."""
        self._handles: list[Any] = []
        self._reset()

    # --- parts ---

    def _reset(self) -> None:
        self._points: list[tuple[int, int]] = []
        self._sums = [0, 0, 0, 0]  # nanoseconds, flops, bytes, operations
        self.starts[self._place] = self._level()

    def _level(self) -> tuple[int, int]:
        return self.current_bytes - self.start_bytes - self._done + self._held_back, self._done

    def begin(self, what: str, stack: int, block: int, *, backward: bool = False) -> None:
        """Another part begins here."""
        self._next = None
        self._end()
        if backward:
            self._backward, self._held_back = True, 0
        self._place = (what, stack, block)
        self._reset()

    def _end(self) -> None:
        other, done = self.starts[self._place]
        self._note()
        points = tuple((now - other, finished - done) for now, finished in self._points)
        self.phases[self._place] = Phase(points, *self._sums)
        self.ends[self._place] = self._level()

    def finish(self) -> None:
        """The step has ended."""
        self._end()

    def _note(self) -> None:
        level = self._level()
        if not self._points or self._points[-1] != level:
            self._points.append(level)

    def outputs(self) -> dict[Place, int]:
        """Block -> bytes that its forward made and that others let go."""
        return dict(self._given_on)

    # --- hooks ---

    def __enter__(self) -> _Tracer:
        for block in self._blocks:
            module, stack = self._modules[block.name], self._stacks[block.stack]
            before = functools.partial(self._enter_block, stack, block.index)
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(functools.partial(self._leave_block, stack, block.index)))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient_done))  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter_block(self, stack: int, index: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._backward:  # older layers run their hooks again when they are recomputed
            return
        if not index and args and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
            self._on_gradient(args[0], "before back", stack, 0)
        self.begin("forward", stack, index)

    def _leave_block(self, stack: int, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._backward:
            return
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            self._on_gradient(first, "backward", stack, index)
        if index == self._depths[stack] - 1:
            # Not yet: the model has still to let go of what the block was given.
            self._next = ("before", stack + 1, 0) if stack + 1 < len(self._stacks) else ("head", 0, 0)

    def _on_gradient(self, tensor: torch.Tensor, *place: Any) -> None:
        def begin(gradient: torch.Tensor) -> None:
            self.begin(*place)

        tensor.register_hook(begin)  # type: ignore[no-untyped-call]

    def _gradient_done(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._done += parameter.grad.untyped_storage().nbytes()
        self._note()

    # --- operations ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._next is not None:
            self.begin(*self._next)
        result = func(*args, **kwargs)
        made = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        new = [self._count(value) for value in made]
        if any(new) or func._schema.is_mutable:
            self._cost(func, args, kwargs, result, made)
        self._note()
        return result

    def _count(self, tensor: torch.Tensor) -> bool:
        new = super()._count(tensor)
        if new and self._place[0] in ("forward", "before"):
            self._made[tensor.untyped_storage()._cdata] = self._place
        return new

    def _freed(self, key: int, size: int) -> None:
        super()._freed(key, size)
        maker = self._made.pop(key, None)
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
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        moved = sum(value.nbytes for value in {id(value): value for value in (*read, *made)}.values())
        count = flop_registry.get(func._overloadpacket, _MORE_FLOPS.get(func))
        flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
        size = max((value.element_size() for value in made if value.is_floating_point()), default=2)
        for place, value in enumerate((self.device.nanoseconds(flops, moved, size), flops, moved, 1)):
            self._sums[place] += value


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Two products of [batch, heads, queries, keys]; shapes are [batch, heads, tokens, size of a head]."""
    batch, heads, queries, size = query.shape
    return int(2 * batch * heads * queries * key.shape[2] * (size + value.shape[3]))


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Five: the scores again, and the gradients of values, weights, queries and keys."""
    batch, heads, queries, size = query.shape
    return int(2 * batch * heads * queries * key.shape[2] * (3 * size + 2 * value.shape[3]))


_MORE_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward_flops,
}


# --- from runs to costs -----------------------------------------------------------------------------------------------


def _stack_costs(
    stack: int, runs: Sequence[_Run], gradients: Sequence[int], row: Sequence[int], choices: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What the runs showed of one stack, as arguments of `StackCosts`."""
    costs: dict[tuple[Key | None, Key], BlockCost] = {}
    last_backward: dict[Key, Phase] = {}
    before: dict[Key | None, Phase] = {}
    turns: list[int] = []
    before_turns: list[int] = []
    shared: list[int] = []
    for run in runs:
        walk = run.walks[stack]
        if stack:
            before[run.walks[stack - 1][-1]] = run.behind("before", stack - 1)
        else:
            before[None] = run.phase("before", 0, 0)
        for place, (previous, key) in enumerate(_ways(walk)[:-1] if len(walk) > 1 else _ways(walk)):
            at, backward = ("forward", stack, place), run.phase("backward", stack, place)
            costs[previous, key] = BlockCost(run.phase(*at), backward, run.outputs.get(at, 0), run.lent.get(at, 0))
        last_backward[walk[-1]] = run.phase("backward", stack, len(walk) - 1)
    for run in runs:
        walk = run.walks[stack]
        lasting: list[int] = []
        lent = run.lent_before
        for place, (previous, key) in enumerate(_ways(walk)):
            at = ("forward", stack, place)
            if (previous, key) not in costs:
                # Seen at an end only, where all of it is let go behind the block: another of its kind tells more.
                like = next((cost for (_, found), cost in costs.items() if found == key), None)
                output, given = (like.output_bytes, like.lent_bytes) if like else (run.outputs.get(at, 0), 0)
                costs[previous, key] = BlockCost(run.phase(*at), run.phase("backward", stack, place), output, given)
            lent += costs[previous, key].lent_bytes
            lasting.append(run.after(at) - lent)
        turn = 0
        for place, ways in reversed(list(enumerate(_ways(walk)))):
            start = run.other(("backward", stack, place))
            if start is None:
                continue
            above = start - lasting[place] + costs[ways].output_bytes + run.released[stack]
            if place == len(walk) - 1:
                turn = above
                turns.append(turn)
            else:
                shared.append(above - turn)
        start = run.other(("before back", stack, 0))
        if start is not None:
            before_turns.append(start - run.after(("before", stack, 0)) + run.lent_before)
    first = runs[0]
    return {
        "costs": _with_unseen(costs, row, choices),
        "last_backward": last_backward,
        "gradients": tuple(gradients),
        "before": before,
        "before_backward": first.phase("before back", stack, 0),
        "before_gradients": first.phase("before back", stack, 0).gradients,
        "turn_bytes": max(turns, default=0),
        "shared_bytes": max((*shared, 0)),
        "before_turn_bytes": max(before_turns, default=0),
    }


def _ways(walk: Walk) -> list[tuple[Key | None, Key]]:
    """(the block before or None, the block) of every block."""
    return list(zip((None, *walk), walk, strict=False))


def _with_unseen(
    costs: dict[tuple[Key | None, Key], BlockCost], row: Sequence[int], choices: Sequence[Sequence[int]]
) -> dict[tuple[Key | None, Key], BlockCost]:
    """Where a kind follows another, not every pair of actions was run: the block's own action is what counts."""
    full = dict(costs)
    for kind, following in set(itertools.pairwise(row)):
        for action in choices[kind]:
            for next_action in choices[following]:
                key = following, next_action
                wanted = (kind, action), key
                likes: Iterable[tuple[Key | None, Key]] = (
                    ((following, action), key),
                    *(seen for seen in costs if seen[1] == key and seen[0] is not None),
                    (None, key),
                )
                if wanted not in full:
                    full[wanted] = next(costs[like] for like in likes if like in costs)
    return full


# --- what is there all the time ---------------------------------------------------------------------------------------

_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1, "lion": 1, "adamw8bit": 2}
"""Optimizer -> tensors of a parameter's size that it keeps."""
_BLOCK_8BIT, _SMALL_8BIT = 256, 4096


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The rule in `optimizer_state` that fits an optimizer best; that of AdamW for one that is not known."""
    name = type(optimizer).__name__.lower()
    if name == "sgd":
        return "momentum" if any(group.get("momentum") for group in optimizer.param_groups) else "sgd"
    if "8bit" in name:
        return "adamw8bit"
    return name if name in _STATES else "adamw"


def optimizer_state(weights: Weights, name: str) -> int:
    """Bytes of an optimizer's state for the trainable parameters.

    PyTorch's keep it in the parameters' own type. `adamw8bit` (bitsandbytes) keeps a byte an element and a float32
    scale for every 256, and float32 for parameters below 4096 elements. Raises `HfCkptError` for a name without a rule.
    """
    if name not in _STATES:
        raise HfCkptError(f"optimizer must be one of {', '.join(_STATES)}, but is {name!r} instead.")
    states, total = _STATES[name], 0
    for elements, size, trainable in weights.tensors:
        if trainable and name == "adamw8bit":
            small = elements < _SMALL_8BIT
            total += states * (4 * elements if small else elements + 4 * -(-elements // _BLOCK_8BIT))
        elif trainable:
            total += states * elements * size
    return total
