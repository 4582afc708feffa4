"""What a step changes in a module beside gradients, for code that runs a step again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.settings import Settings
from hf_ckpt.engines.snapshot import Snapshot


class StepState:
    """What a step changes in a module beside gradients: random state, and what a `Snapshot` records of attributes and
    buffers.

    Hooks and functions are as they are then, because another plan has others.

    Args:
        module: the module.
        devices: the devices whose random state to include besides the CPU's.
        copies_codes: see `Snapshot`.
        parameters_stay: see `Snapshot`. If not, what the step writes to parameters stays.
        earlier: the state before the last step of this module, if it is known. Large buffers that this step has left
            alone are not copied again.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Iterable[torch.device],
        *,
        copies_codes: bool = True,
        parameters_stay: bool = False,
        earlier: StepState | None = None,
    ) -> None:
        self.random = compat.process_state.RandomState(devices)
        settings = Settings(module) if earlier is None else earlier.settings_now()
        self.before = Snapshot(
            "", module, settings, parameters_stay=parameters_stay, is_step=True, copies_codes=copies_codes
        )
        dicts = (vars(part).get("_buffers") for part in module.modules())
        self.dicts = [(tensors, tensors.copy()) for tensors in dicts if isinstance(tensors, dict)]
        """The dict of each module's buffers, and what it holds. A forward may replace a buffer (`self.ema = ...`)."""

    def settings_now(self) -> Settings:
        """Return the settings of the module after the step, which know what the step has changed."""
        earlier = self.before.settings
        module = self.before.block
        learned = earlier.learned
        for each in self.before.stored:
            may_have_changed = each.values is not None and not learned.has_run
            if each.seen.is_overwritten or (may_have_changed and each.has_changed()):
                learned.changing.add(each.place)
        learned.has_run = True
        if earlier.still_apply(module):
            return earlier
        settings = Settings(module)
        if list(map(id, settings.dicts(module))) == list(map(id, earlier.dicts(module))):  # places mean the same
            settings.learned.changing = learned.changing
            settings.learned.has_run = True
        return settings

    def restore(self) -> None:
        """Reset the module's attributes and buffers, and the random state.

        Raises `OutOfPlansError` for a large buffer that no step before this one has changed.
        """
        self.random.restore()
        for tensors, content in self.dicts:
            tensors.clear()
            tensors.update(content)
        self.before.restore()
