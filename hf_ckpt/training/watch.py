"""The watch of a training run: which block is checked when, and what happens if a check finds a difference.

For one block and one step, `engines.check.Check` compares the tensors that backward gets with those that the forward
saved. The watch checks the blocks in turn, in training forward `min(FIRST_CHECK, n)` and in every n-th one after it. A
check holds what the block would save without checkpointing. It uses only free memory: the budget minus the plan's
peak, or what the device has left.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.enable import exchange
from hf_ckpt.attach.for_a_while import put_check
from hf_ckpt.attach.record import Installation
from hf_ckpt.attach.switches import function_of
from hf_ckpt.engines.check import Check, Difference
from hf_ckpt.errors import MismatchError
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.memory import spare_bytes
from hf_ckpt.spec.actions import KEEP, SELECTIVE
from hf_ckpt.spec.description import Watched
from hf_ckpt.training.session import Session

log = logging.getLogger(__name__)

FIRST_CHECK = 3
"""The first training forward that is checked. Users read the peak of the first steps, to which a check would add."""

AVOIDS_NOT = "hf_ckpt: under ZeRO-3, `on_mismatch: avoid` only reports: all ranks must recompute the same blocks."


class Watch:
    """Checks one block at a time while a model trains.

    Args:
        check_every: check in every n-th training forward.
        on_mismatch: `warn`; `raise` to raise `MismatchError` in the wrong backward; or `avoid` to run the block under
            another action from the next forward on.
    """

    def __init__(self, check_every: int, on_mismatch: str) -> None:
        self.check_every = check_every
        self.on_mismatch = on_mismatch
        self.differences: list[Difference] = []
        """The first difference of each check that found one."""
        self._to_avoid: set[str] = set()
        """Blocks that get another action before the next forward."""
        self._forwards = 0
        """Training forwards so far, without those in which a session measures actions."""
        self._next = min(FIRST_CHECK, check_every)
        """The forward to check next. If a check is not possible in it, a later one is checked in its place."""
        self._turn = 0
        self._checks = 0
        self._compared = 0
        self._not_checked: dict[str, str] = {}
        """What cannot be checked -> why."""
        self._check: weakref.ref[Check] | None = None
        """The last check. It holds the inputs of its block, so only the graph of that step may hold it."""

    def avoid(self, base: nn.Module, record: Installation) -> None:
        """If checks have found differences, and `on_mismatch` is `avoid`, run these blocks under another action.

        That is `selective`, which runs no block twice, or `keep` if the block already has `selective`. Under `budget`
        and `auto`, steps are measured again, because their plans count on what the block kept before. With several
        ranks under ZeRO-3, nothing changes, because the other ranks would not know of it.

        Args:
            base: the model, plain.
            record: the record on it.
        """
        names = self._to_avoid & record.regions.keys()
        self._to_avoid = set()
        if not names:
            return
        if compat.distributed.ranks() > 1 and compat.distributed.ranks_recompute_together(base):
            warn_once(log, AVOIDS_NOT)
            return
        for name in sorted(names):
            runs_twice = record.regions[name].runs_block_again
            before = record.plan.active()[name]
            record.avoided[name] = SELECTIVE if runs_twice else KEEP
            log.warning(
                "hf_ckpt: `%s` runs under `%s` from now on, instead of `%s`.", name, record.avoided[name], before
            )
        if record.session is not None:
            record.session.stop(record)
            record.session.close()
            record.session = None
        exchange(base, record, record.plan)

    def on_forward(self, base: nn.Module, record: Installation, running: nn.Module, session: Session | None) -> None:
        """Check a block of the training forward that is about to begin, if a check is due.

        Args:
            base: the model, plain.
            record: the record on it.
            running: the module whose forward begins. Compiled modules in it may hold blocks.
            session: the session of the run under `budget` and `auto`.
        """
        self.stop()
        if record.measuring is not None:
            return
        self._forwards += 1
        if session is not None and session.recorder is not None:
            return  # the peak of the first step under a plan is measured, and a check would add to it
        if self._forwards < self._next:  # most forwards: the walks over the model below take longer than a block
            return
        has_budget = session is not None and not session.gave_up
        devices = compat.distributed.devices_of_model(base)
        if not self._is_due(has_budget, devices):
            return
        self._next = self._forwards + self.check_every  # also if this forward cannot be checked: the next is alike
        self._not_checked |= _never_checked(record, running)
        blocks = _checkable(record, running)
        room = session.room_bytes() if session is not None and has_budget else spare_bytes(devices)
        if not blocks:
            return
        if room is None:
            why = f"torch does not report how much memory the model leaves on {compat.devices.device_name(devices)}"
            self._not_checked["blocks"] = why
            warn_once(log, "hf_ckpt: blocks are not checked: %s.", why)
            return
        if room <= 0:
            self._not_checked["blocks"] = "the plan leaves no room"
            return
        name, module = blocks[self._turn % len(blocks)]
        self._turn += 1
        parameters_stay = compat.distributed.parameters_stay(base)
        check = put_check(module, name, room_bytes=room, whole=parameters_stay, done=self._has_ended)
        self._check = weakref.ref(check)

    def _is_due(self, has_budget: bool, devices: Collection[torch.device]) -> bool:
        """Whether to check a block of this forward."""
        if compat.devices.is_capturing():
            return False  # a check waits for the device, which a captured graph does not allow
        # What a device has left is known once the allocator has seen the peak of a step.
        return has_budget or self._forwards > 1 or not compat.devices.accelerators(devices)

    def _has_ended(self, check: Check) -> None:
        """Count a check that has ended, and warn of the first difference.

        Raises `MismatchError` if the check found a difference and `on_mismatch` is `raise`.
        """
        if not (check.saved or check.compared or check.differences):  # a frozen block, which saves nothing
            return
        self._checks += 1
        for what in ("blocks", "blocks under `keep`"):  # what kept an earlier forward from a check
            self._not_checked.pop(what, None)
        self._compared += check.compared
        if not check.differences:
            return
        first = check.differences[0]
        self.differences.append(first)
        if self.on_mismatch == "avoid":
            self._to_avoid.add(first.block)
        if self.on_mismatch == "raise":
            raise MismatchError(first.block, str(first))
        if len(self.differences) == 1:
            log.warning(
                "hf_ckpt: gradients of this step are wrong, and those of later steps may be: backward did "
                "not get what the forward saved, %s",
                first,
            )

    def stop(self) -> None:
        """Remove a check whose forward has not begun."""
        waiting = None if self._check is None else self._check()
        if waiting is not None:
            waiting.put_back(waiting)

    def report(self) -> Watched:
        """Return the results so far."""
        differences = tuple(map(str, self.differences))
        return Watched(self._checks, self._compared, differences, dict(self._not_checked))


def _eager(record: Installation) -> list[str]:
    """The blocks that hf_ckpt runs eagerly, in order."""
    regions = record.regions
    # Something else may have taken a function off its block.
    present = [name for name, module in record.blocks.items() if function_of(module) is regions.get(name, module)]
    return [name for name in present if not regions[name].compiles_block]


def _checkable(record: Installation, running: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, block) for the blocks that can be checked, in order."""
    graphs = [module for module in running.modules() if compat.compiler.is_compiled(module)]
    compiled = {inner for module in graphs for inner in module.modules()}
    return [(name, record.blocks[name]) for name in _eager(record) if record.blocks[name] not in compiled]


def _never_checked(record: Installation, running: nn.Module) -> dict[str, str]:
    """What cannot be checked in this forward -> why."""
    reasons = {}
    if any(region.compiles_block for region in record.regions.values()):
        reasons["compiled blocks"] = "what its backward gets is inside a graph; use `hf_ckpt.verify`"
    elif not record.regions:
        reasons["blocks under `keep`"] = "their backward uses what autograd saved"
    if len(_checkable(record, running)) < len(_eager(record)):
        reasons["blocks that something else compiles"] = "torch would compile one once more to check it"
    return reasons
