"""The watch of a training run: which block is checked when, and what happens if a check finds a difference.

For one block and one step, `engines.check.Check` compares the tensors that backward gets with those that the forward
saved. The watch checks the blocks in turn, in the third training forward and in every n-th one after it. A check holds
what the block would save without checkpointing. It uses only free memory: the budget minus the plan's peak,
or what the device has left.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import put_check
from hf_ckpt.attach.record import FUNCTION, Installation, is_on
from hf_ckpt.engines.check import CAUSES, Check, Difference
from hf_ckpt.errors import MismatchError
from hf_ckpt.measure.memory import spare_bytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.spec.description import Watched

log = logging.getLogger(__name__)

FIRST = 3
"""The first training forward that is checked. Whoever measures memory in the first two steps measures no check."""


class Watch:
    """Checks one block at a time while a model trains.

    Args:
        check_every: check in every n-th training forward.
        on_mismatch: `warn`, or `raise` to raise `MismatchError` in the wrong backward.
    """

    def __init__(self, check_every: int, on_mismatch: str = "warn") -> None:
        self.check_every, self.on_mismatch = check_every, on_mismatch
        self.differences: list[Difference] = []
        """The first difference of each check that found one."""
        self.updated: dict[str, str] = {}
        """What recomputations updated once more: qualified name -> that, in words."""
        self._forwards = 0
        """Training forwards so far, without those in which a session measures actions."""
        self._due = False
        """Whether to check a block in the next forward that allows it."""
        self._turn = 0
        self._checks = self._compared = self._left_out = 0
        self._not_checked: dict[str, str] = {}
        """What cannot be checked -> why."""
        self._check: weakref.ref[Check] | None = None
        """The last check. It holds the inputs of its block, so only the graph of that step may hold it."""

    def on_forward(self, base: nn.Module, record: Installation | None, running: nn.Module | None = None) -> None:
        """Check a block of the training forward that is about to begin, if a check is due.

        Args:
            base: the model, plain.
            running: the module whose forward begins, if it is not the model. Compiled modules in it may hold blocks.
            record: the record of hf_ckpt on the model; None if something else checkpoints it.
        """
        self.stop()
        first = min(FIRST, self.check_every)
        if record is not None and record.planned is not None and record.planned.measures:
            return
        self._forwards += 1
        self._due |= self._forwards % self.check_every == first % self.check_every
        if record is not None and record.session is not None and record.session.recorder is not None:
            return  # a check would disturb it
        if not self._due or compat.devices.is_capturing():  # a check waits for the device, which a graph does not allow
            return
        blocks = self._blocks(base, record, running or base)
        devices = compat.distributed.devices_of_model(base)
        room = _room_bytes(record)
        if room is None and self._forwards == 1 and compat.devices.accelerators(devices):
            return  # the first step shows what is left
        if room is None:
            room = spare_bytes(devices)
        self._due = False
        if not blocks:
            return
        if room is None:
            why = f"torch does not report how much memory the model leaves on {compat.devices.device_name(devices)}"
            self._say_once("blocks", why, logging.WARNING)
            return
        if room <= 0:
            self._say_once("blocks", "the plan leaves no room")
            return
        name, module = blocks[self._turn % len(blocks)]
        self._turn += 1
        whole = compat.distributed.parameters_stay(base)
        check = put_check(module, name, room_bytes=room, whole=whole, done=self._has_ended)
        self._check = weakref.ref(check)

    def _blocks(self, base: nn.Module, record: Installation | None, running: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return (name, block) for the blocks that can be checked, in order."""
        if record is None:
            found = find_blocks(base).modules.items()
            blocks = [(name, module) for name, module in found if is_on(module) and getattr(module, FUNCTION, None)]
        else:
            checked = {name for name, region in record.regions.items() if not region.compiles_block}
            if len(checked) < len(record.regions):
                self._say_once("compiled blocks", "a graph hides what its backward gets; use `hf_ckpt.verify`")
            elif not checked:
                self._say_once("blocks under `keep`", "their backward uses what autograd saved")
            blocks = [(name, module) for name, module in record.blocks.items() if name in checked]
        compiled = {
            inner for module in running.modules() if compat.compiler.is_compiled(module) for inner in module.modules()
        }
        if compiled.intersection(module for _, module in blocks):
            self._say_once("blocks that something else compiles", "to check one, torch would compile it once more")
        return [(name, module) for name, module in blocks if module not in compiled]

    def _say_once(self, what: str, why: str, level: int = logging.INFO) -> None:
        if what not in self._not_checked:
            self._not_checked[what] = why
            log.log(level, "hf_ckpt: %s are not checked: %s.", what, why)

    def _has_ended(self, check: Check) -> None:
        """Count a check that has ended, and warn of the first difference.

        What the recomputation only updated once more is no difference: backward got what the forward saved. Raises
        `MismatchError` if the check found a difference and `on_mismatch` is `raise`.
        """
        if not (check.saved or check.compared or check.differences):  # a frozen block, which saves nothing
            return
        self._checks += 1
        self._compared += check.compared
        self._left_out += check.left_out
        for name in check.updated:
            what_to_do = CAUSES["updated"].format(updated="it")
            text = f"`{check.block}.{name}` was updated once more by the recomputation. {what_to_do}"
            if not self.updated:
                log.warning("hf_ckpt: %s By itself, this makes no gradient wrong.", text)
            self.updated[f"{check.block}.{name}"] = text
        if not check.differences:
            return
        first = check.differences[0]
        self.differences.append(first)
        if self.on_mismatch == "raise":
            raise MismatchError(first.block, str(first))
        if len(self.differences) == 1:
            log.warning(
                "hf_ckpt: gradients of this step are wrong, and those of later steps may be: backward was not given "
                "what the forward saved, %s (%d of %d compared tensors differ)",
                first,
                len(check.differences),
                check.compared,
            )

    def stop(self) -> None:
        """Remove a check whose forward has not begun."""
        waiting = None if self._check is None else self._check()
        if waiting is not None:
            waiting.put_back(waiting)

    def report(self) -> Watched:
        """Return the results so far."""
        differences = tuple(map(str, self.differences))
        updated = tuple(self.updated.values())
        return Watched(self._checks, self._compared, self._left_out, differences, updated, dict(self._not_checked))


def _room_bytes(record: Installation | None) -> int | None:
    """Return the bytes that the plan of a budget leaves to a check; None without a budget."""
    planned: Any = None if record is None else record.planned
    if planned is None:
        return None
    prediction = planned.plan.prediction
    peak: int = max(planned.measured_bytes or 0, 0 if prediction is None else prediction.peak_bytes)
    return int(planned.limit_bytes - peak) if peak else None
