"""The plug-in for axolotl (https://docs.axolotl.ai/docs/custom_integrations.html). In the YAML of a training:

plugins:
  - hf_ckpt.integrations.axolotl.HfCkptPlugin
gradient_checkpointing: true
gradient_checkpointing_kwargs: {policy: budget, budget: 20GiB}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin

from hf_ckpt.errors import OwnerConflictError, SpecError
from hf_ckpt.spec.spec import Spec
from hf_ckpt.training.callback import MemoryTimeCallback
from hf_ckpt.training.install import install

OTHERS = ("activation_offloading", "selective_checkpointing", "layer_offloading")
"""Keys of axolotl by which it checkpoints or moves activations and layers itself."""


class HfCkptPlugin(BasePlugin):
    """Lets hf_ckpt answer `gradient_checkpointing` in axolotl, with any key of a spec in its kwargs.

    The memory and the time of steps are logged as by `hf_ckpt.MemoryTimeCallback`.
    """

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Check the config before anything is loaded.

        Raises `SpecError` for kwargs that are no spec, and where `gradient_checkpointing` is not true, so that nothing
        would happen; `OwnerConflictError` where axolotl is to checkpoint or to offload by itself as well.
        """
        others = [name for name in OTHERS if cfg.get(name)]
        if others:
            raise OwnerConflictError(
                f"axolotl's {' and '.join(f'`{name}`' for name in others)} cannot be used with hf_ckpt: checkpointing "
                "needs one owner. Take these keys out, or the plug-in."
            )
        asked = cfg.get("gradient_checkpointing")
        if asked is not True:
            raise SpecError([f"`gradient_checkpointing` must be true for hf_ckpt to do anything, but is {asked!r}"])
        Spec.parse(dict(cfg.get("gradient_checkpointing_kwargs") or {}))

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Install on the model, before axolotl enables checkpointing and before adapters are added."""
        install(model)

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return the callback that logs memory and time."""
        return [MemoryTimeCallback()]
