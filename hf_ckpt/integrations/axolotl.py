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
"""Keys of axolotl that enable its own checkpointing or offloading."""


class HfCkptPlugin(BasePlugin):
    """Makes hf_ckpt handle `gradient_checkpointing` in axolotl. Its kwargs may contain any key of a spec.

    `hf_ckpt.MemoryTimeCallback` logs the memory and time of steps.
    """

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Check the config before anything is loaded.

        Raises `SpecError` if the kwargs are not a valid spec, or if `gradient_checkpointing` is not true, so that
        nothing would happen; `OwnerConflictError` if axolotl's own checkpointing or offloading is on, too.
        """
        others = [name for name in OTHERS if cfg.get(name)]
        if others:
            raise OwnerConflictError(
                f"axolotl's {' and '.join(f'`{name}`' for name in others)} cannot be used with hf_ckpt: checkpointing "
                "needs one owner. Take these keys out, or the plug-in."
            )
        flag = cfg.get("gradient_checkpointing")
        if flag is not True:  # axolotl also takes "offload" and others, by which it replaces the checkpointing itself
            raise SpecError([f"`gradient_checkpointing` must be true for hf_ckpt to do anything, but is {flag!r}"])
        Spec.parse(dict(cfg.get("gradient_checkpointing_kwargs") or {}))

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Install on the model, before axolotl enables checkpointing and before adapters are added."""
        install(model)  # the spec comes with axolotl's enable call, as `gradient_checkpointing_kwargs`

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return the callback that logs memory and time."""
        return [MemoryTimeCallback()]
