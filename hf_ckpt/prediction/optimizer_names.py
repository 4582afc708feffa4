"""Optimizers whose memory is predicted by name: Trainer's `optim` names, and short names. Does not import torch."""

from __future__ import annotations

TRIED = (
    *("adamw", "adam", "adamw_torch_fused", "adamw_torch", "sgd", "momentum"),
    *("adagrad", "rmsprop", "adafactor"),
)
"""Optimizers of torch and transformers, which `optimizers` runs on fake tensors."""
COUNTED: dict[str, tuple[int, int | None]] = {
    "lion": (1, None),
    "lion_32bit": (1, 4),
    "lion_8bit": (1, 1),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw8bit"), (2, 1)),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_32bit"), (1, 4)),
    "rmsprop_bnb_8bit": (1, 1),
    "ademamix": (3, 4),
    "ademamix_8bit": (3, 1),
    "paged_adamw_32bit": (2, 4),
    "paged_adamw_8bit": (2, 1),
    "paged_lion_32bit": (1, 4),
    "paged_lion_8bit": (1, 1),
    "paged_ademamix_32bit": (3, 4),
    "paged_ademamix_8bit": (3, 1),
}
"""Name -> (state tensors of a parameter's size, bytes per element; None for the parameter's own element size). One byte
means 8-bit blocks. All come from other packages, mostly bitsandbytes; paged state counts as if on the device."""
NAMES = (*TRIED, *COUNTED)
"""Names of all optimizers whose memory can be predicted."""
