"""What a plan depends on: the shapes of a step's forwards, the states of the model and of its optimizers, and
the budget.

A step may have several forwards before its backward, as in DPO, and its plan is chosen at the first of them. So a
`Batch` is what the step is expected to be: `StepForwards` takes it from the last step that began in the same way. What
the step really had is known at its end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.live import held_bytes
from hf_ckpt.measure.memory import device_memory, keeps_statistics
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import budget_bytes, format_bytes

log = logging.getLogger(__name__)

NEAR = 0.8
"""Batches of at least this share of another one's size use its measurements and plans. A plan for 25 % more tokens
recomputes a little more than it must, which costs less than to measure and race each length by itself."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """One training forward of the model, or of a part of it if the model's own forward is not called."""

    stack: str | None
    """Name of the part, such as a stack; None for the whole model."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """(name of a tensor, its shape)."""
    padded: bool
    """Whether the attention mask masks a token."""

    def covers(self, other: Forward) -> bool:
        """Whether every tensor is at least as large as in another forward.

        A padded forward may need more than one without padding: transformers drops a mask that masks nothing
        (`_ignore_causal_mask_sdpa` in `masking_utils`), and then attention may run in a kernel that needs less memory.
        """
        if (self.stack, len(self.shapes)) != (other.stack, len(other.shapes)) or self.padded < other.padded:
            return False
        return all(
            name == other_name and len(shape) == len(other_shape) and all(map(operator.ge, shape, other_shape))
            for (name, shape), (other_name, other_shape) in zip(self.shapes, other.shapes, strict=True)
        )

    def has_form_of(self, other: Forward) -> bool:
        """Whether both have the same tensors, for as many sequences, whatever their lengths."""
        forms = [[(name, len(shape), shape[:1]) for name, shape in forward.shapes] for forward in (self, other)]
        return (self.stack, self.padded) == (other.stack, other.padded) and forms[0] == forms[1]

    @property
    def rows_and_tokens(self) -> tuple[int, int]:
        """(sequences, tokens of each); (1, 0) for a forward without text."""
        # Vectors, such as the lengths of packed rows, tell nothing of the tokens of a row.
        shapes = {name: shape for name, shape in self.shapes if len(shape) >= 2}
        names = [name for name in ("input_ids", "inputs_embeds", "hidden_states") if name in shapes]
        shape = shapes[names[0]] if names else next(iter(shapes.values()), (1, 0))
        return shape[0], shape[1]


@dataclasses.dataclass(frozen=True)
class Batch:
    """The forwards of one step in order, and the state in which it begins."""

    forwards: tuple[Forward, ...]
    has_gradients: bool
    """Whether there are gradients of earlier micro-steps."""
    state: tuple[Any, int] = (None, 0)
    """See `ModelState.present`."""

    def covers(self, other: Batch) -> bool:
        """Whether a step with this batch needs at least as much memory as one with another, whatever the plan."""
        if self.state != other.state or self.has_gradients < other.has_gradients:
            return False
        return self.has_room_for(other.forwards)

    def has_room_for(self, forwards: Sequence[Forward]) -> bool:
        """Whether these forwards are not more, and none is larger, than those of this batch."""
        if len(self.forwards) < len(forwards):
            return False
        return all(larger.covers(smaller) for larger, smaller in zip(self.forwards, forwards, strict=False))

    @property
    def elements(self) -> int:
        """The number of elements of all tensors, to sort batches by."""
        return sum(math.prod(shape) for _, shape in self._shapes)

    def growth(self, other: Batch) -> float:
        """How many times as many elements the tensors of this batch have as those of another, at most; 0 if the
        batches do not have the same tensors."""
        if [name for name, _ in self._shapes] != [name for name, _ in other._shapes]:
            return 0.0
        pairs = zip(self._shapes, other._shapes, strict=True)
        ratios = [math.prod(shape) / max(1, math.prod(other_shape)) for (_, shape), (_, other_shape) in pairs]
        return max(ratios, default=1.0)

    @property
    def _shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of all tensors of all forwards."""
        return [row for forward in self.forwards for row in forward.shapes]

    def is_near(self, other: Batch) -> bool:
        """Whether a step with one batch tells what one with the other needs: one covers the other, and is hardly
        larger."""
        if (self.has_gradients, len(self.forwards)) != (other.has_gradients, len(other.forwards)):
            return False
        if self.covers(other):
            return other.elements >= NEAR * self.elements
        return other.covers(self) and self.elements >= NEAR * other.elements

    def length_of(self, other: Batch) -> float | None:
        """The length of another batch as a multiple of that of this one, if they differ in nothing else."""
        pairs: set[tuple[int, int]] = set()
        for forward, another in itertools.zip_longest(self.forwards, other.forwards):
            if forward is None or another is None or not forward.has_form_of(another):
                return None
            for (_, shape), (_, other_shape) in zip(forward.shapes, another.shapes, strict=True):
                pairs.update(zip(shape, other_shape, strict=True))
        ratios = {max(1, there) / max(1, here) for here, there in pairs if here != there}
        if (self.state, self.has_gradients) != (other.state, other.has_gradients) or len(ratios) > 1:
            return None
        return ratios.pop() if ratios else 1.0

    def __str__(self) -> str:
        sizes = dict.fromkeys(forward.rows_and_tokens for forward in self.forwards)
        text = " and ".join(f"{rows} x {tokens} tokens" for rows, tokens in sizes)
        padded = ", padded" if any(forward.padded for forward in self.forwards) else ""
        return text + padded + (", accumulated" if self.has_gradients else "")


class StepForwards:
    """The forwards of the current step, and those that such steps are expected to have."""

    def __init__(self) -> None:
        self.current: list[Forward] = []
        self._expected: dict[tuple[Any, Forward], tuple[Forward, ...]] = {}
        """(state of the model, first forward of a step) -> all forwards of such a step."""
        self._has_padding = False
        """Whether a batch was padded."""

    def read(self, stack: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Forward:
        """Describe a forward by its arguments."""
        arguments = {**dict(zip(map(str, itertools.count()), args, strict=False)), **kwargs}
        shapes = []
        for name in sorted(arguments):  # the order in which a caller writes them makes no other batch
            value = arguments[name]
            leaves = [value] if isinstance(value, torch.Tensor) else compat.torch.tree_leaves(value)
            shapes += [(name, tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        mask = kwargs.get("attention_mask")
        is_padded = False
        if isinstance(mask, torch.Tensor):
            # Reading a mask makes the host wait for the device, so after the first padded batch all count as padded. So
            # does one of four dimensions, which transformers passes on as it is (`masking_utils`).
            is_padded = self._has_padding or mask.dim() > 2 or not bool((mask != 0).all())
        self._has_padding |= is_padded
        return Forward(stack, tuple(shapes), is_padded)

    def begin(self, forward: Forward, state: tuple[Any, int]) -> tuple[Forward, ...]:
        """Begin a step with this forward. Returns all forwards that it is expected to have."""
        self.current = [forward]
        return self._expected.get((state, forward), (forward,))

    def learn(self, state: tuple[Any, int]) -> None:
        """Expect the forwards of the current step of all steps that begin like it."""
        self._expected[state, self.current[0]] = tuple(self.current)


# --- the model and its optimizers -------------------------------------------------------------------------------------


class ModelState:
    """Which parameters are trained, their bytes, and autocast's type.

    Measurements and plans hold in one state only, because each `Batch` has the number of its state. So a new number is
    all that it takes to measure a changed model again.

    The state is read for every batch, so this walks over the model only when modules or parameters were added, removed
    or replaced.
    """

    def __init__(self, base: nn.Module, devices: Collection[torch.device]) -> None:
        self._base = weakref.ref(base)  # the session that holds this must not keep the model alive
        self._device_type = next((device.type for device in compat.devices.accelerators(devices)), "cpu")
        self.is_sharded = not compat.distributed.parameters_stay(base)
        """Whether parameters come only when they are used: they are split over ranks, or accelerate offloads them."""
        self._modules: list[nn.Module] = []
        self._boxes: list[dict[str, Any]] = []
        """The dicts of children and of parameters of each module."""
        self._addresses: list[int] = []
        """The addresses of what is in them."""
        self._parameters: list[nn.Parameter] = []
        self._configs: list[Any] = []
        """The configs of its modules, each once."""
        self._versions: list[int] = []
        """The versions of gradients when the step began."""
        self._numbers: dict[Any, int] = {}
        """The states that were seen, and their numbers."""
        self.present: tuple[Any, int] = (None, 0)
        """The type that autocast computes in, and the number of the state."""

    def has_changed(self) -> bool:
        """Read the present state. Returns whether it is one that the model was never in, other than the first."""
        if self._read_addresses() != self._addresses or not self._boxes:
            self._walk()
        # Sharded parameters are gathered and freed in every step. `attrgetter` and `map` run without Python calls.
        names = ("requires_grad",) if self.is_sharded else ("requires_grad", "nbytes")
        autocast_dtype = compat.devices.autocast_dtype(self._device_type)
        # Blocks in eval mode are not checkpointed, and eager attention saves more than others.
        modes = tuple(map(operator.attrgetter("training"), self._modules))
        attention = tuple(map(operator.attrgetter(compat.transformers.ATTENTION), self._configs))
        state = autocast_dtype, tuple(map(operator.attrgetter(*names), self._parameters)), modes, attention
        is_new = bool(self._numbers) and state not in self._numbers
        self.present = autocast_dtype, self._numbers.setdefault(state, len(self._numbers))
        return is_new

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient when a step begins."""
        self._versions = self._read_versions()
        return bool(self._versions)

    def have_new_gradients(self) -> bool:
        """Whether gradients came, went or changed since `has_gradients` was last called."""
        return self._read_versions() != self._versions

    def _read_versions(self) -> list[int]:
        gradients = map(operator.attrgetter("grad"), self._parameters)
        there = filter(functools.partial(operator.is_not, None), gradients)
        return list(map(operator.attrgetter("_version"), there))

    def _read_addresses(self) -> list[int]:
        # A parameter that is cast in place keeps its address, which is why `has_changed` also reads its bytes.
        return list(map(id, itertools.chain.from_iterable(map(dict.values, self._boxes))))

    def _walk(self) -> None:
        base = self._base()
        assert base is not None
        modules = list(base.modules())
        self._modules = modules[1:]  # held, so that no new module gets the address of one that was removed
        self._boxes = [vars(module)[box] for module in modules for box in ("_modules", "_parameters")]
        self._addresses = self._read_addresses()
        self._parameters = list(base.parameters())
        configs = [vars(module).get("config") for module in modules]
        configs = [config for config in configs if hasattr(config, compat.transformers.ATTENTION)]
        self._configs = list({id(config): config for config in configs}.values())


class OptimizerStates:
    """Notices when an optimizer steps for the first time, and has made its state.

    It sees the optimizers of the whole process, because a model does not refer to its own.
    """

    def __init__(self) -> None:
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """The optimizers that have stepped."""
        self._new: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """The optimizers that have stepped for the first time since `have_grown` was last called."""
        self._sizes: dict[int, tuple[weakref.ref[torch.optim.Optimizer], int]] = {}
        """Optimizers that have stepped since `have_grown` was last called, and the sizes of their states before."""
        self.has_stepped = False
        """Whether an optimizer has stepped since this was last set."""
        self._bytes = 0
        """Bytes of the state of the model's optimizers when a new one was last seen."""
        self._handle: Callable[[], object] | None = None
        """Ends what `watch` began."""

    def watch(self, base: nn.Module) -> None:
        """See steps of optimizers until `stop`, or until the model is gone."""
        if self._handle is None:
            # The model's end must end it, too: a hook of the process would live on, once for each model.
            hook = compat.optimizers.call_before(self._on_step)
            self._handle = weakref.finalize(base, hook.remove)

    def stop(self) -> None:
        """See no more steps of optimizers."""
        if self._handle is not None:
            self._handle()
            self._handle = None

    def have_grown(self, base: nn.Module, devices: Collection[torch.device]) -> bool:
        """Whether optimizers of the model hold more than when this was last asked: from now on steps hold it, too."""
        sizes = self._sizes.values()
        have_more = any(len(optimizer.state) != size for ref, size in sizes if (optimizer := ref()) is not None)
        self._sizes.clear()
        if not (self._new or have_more):
            return False
        optimizers = compat.optimizers.of_model(base)
        # A new one may take the place of another, whose state is gone, so that its own is no more than that was.
        older = held_bytes(devices, *(optimizer for optimizer in optimizers if optimizer not in self._new))
        before = min(self._bytes, older)
        self._new.clear()
        self._bytes = held_bytes(devices, *optimizers)
        return self._bytes > before

    def _on_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.has_stepped = True
        # Later steps may add to the state, too: of a group that was added, or once `momentum` is set.
        self._sizes.setdefault(id(optimizer), (weakref.ref(optimizer), len(optimizer.state)))
        # The step that follows makes the state. It is too early to read it, so the next batch does.
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            compat.optimizers.remember(optimizer)
            self._new.add(optimizer)


# --- the budget -------------------------------------------------------------------------------------------------------


def budget_of(spec: Spec, base: nn.Module, devices: Collection[torch.device]) -> int:
    """Return the bytes that a `budget` or `auto` allows the steps of a model.

    Raises `InfeasibleError` if the model itself needs more, and `HfCkptError` for a share of several accelerators.
    """
    accelerators = compat.devices.accelerators(devices)
    if len(accelerators) > 1 and not isinstance(spec.budget, int):  # one card is full before the others are
        cards = " and ".join(map(str, accelerators))
        raise HfCkptError(f"`auto` and shares work for one card, but the model is on {cards}. Give bytes instead.")
    held = held_bytes(devices, base, *compat.optimizers.of_model(base))
    memory = device_memory(held, devices)
    budget = budget_bytes(spec.budget, memory.total_bytes)
    if budget > memory.total_bytes:
        text = (
            "hf_ckpt: the budget of %s exceeds the device's memory, %s: steps within the budget may run out of memory."
        )
        warn_once(log, text, format_bytes(budget), format_bytes(memory.total_bytes))
    if spec.policy == "auto":  # all that other processes leave; a share that a user gives is of the whole memory
        budget -= memory.total_bytes - memory.available_bytes
    if held > budget and compat.distributed.parameters_stay(base):
        raise InfeasibleError(
            budget,
            held,
            {"weights and optimizer state": held},
            ["a smaller model, quantised weights, or parameters that are sharded over more devices"],
            f"no plan fits into {format_bytes(budget)}: the model and the state of its optimizer alone take "
            f"{format_bytes(held)}. What would lower it:",
        )
    return budget


def refuse_without_common_step(base: nn.Module, policy: str) -> None:
    """Raise `HfCkptError` if ranks under ZeRO-3 have no optimizer step in which all of them could agree on a plan."""
    reason = compat.distributed.why_no_common_step(base)
    if reason:
        raise HfCkptError(
            f"policy: {policy} cannot plan for this run: under ZeRO-3 all ranks must recompute the same blocks. They "
            f"agree on them in the optimizer's step, but {reason}. Give `full` or `selective`, or a saved plan."
        )


def refuse_compiled(base: nn.Module, devices: Collection[torch.device], policy: str) -> None:
    """Raise `HfCkptError` if the memory of compiled blocks cannot be measured."""
    accelerators = compat.devices.accelerators(devices)
    has_peaks = bool(accelerators) and all(map(keeps_statistics, accelerators))
    if not (compat.transformers.HOOKS_STAY_OUTSIDE and has_peaks and compat.distributed.parameters_stay(base)):
        raise HfCkptError(
            f"policy: {policy} cannot measure compiled blocks here: that needs transformers 5.23 or later, an "
            "accelerator whose allocator reports peaks, and parameters that are not split over ranks. Give a `share` "
            "with the policy `selective`, or do not compile blocks."
        )
