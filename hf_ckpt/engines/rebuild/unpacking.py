"""How autograd gets a tensor back from its value, and how the forward gets the value of what a node has saved."""

from __future__ import annotations

import threading
from typing import Any

import torch

from hf_ckpt import compat
from hf_ckpt.engines.rebuild.replay import Inside
from hf_ckpt.engines.rebuild.values import Rebuilt, Stored, Value, View
from hf_ckpt.engines.seen import Kept, refuse


class _Reading(threading.local):
    """How `read_saved` gets a value from behind autograd, which returns only tensors. `unpack` sees that it is on."""

    on = False
    """Whether this thread reads what a node has saved."""
    value: Rebuilt | View | Stored | None = None
    """What `unpack` was called with, in place of a tensor."""


_reading = _Reading()
_PLACEHOLDER = torch.empty(0, device="cpu")
"""What `unpack` returns to `read_saved`, because autograd accepts only a tensor."""


def read_saved(node: Any, name: str) -> Any:
    """Return what an autograd node has saved under a name; for a dropped or stored tensor its value, without fetching.

    Args:
        node: the node.
        name: the name. Returns None if the node has saved nothing under it.
    """
    _reading.on = True
    try:
        saved = getattr(node, f"_saved_{name}", None)
        return saved if _reading.value is None else _reading.value
    finally:
        _reading.on = False
        _reading.value = None


@compat.torch.untraced
def unpack(value: Value | Inside) -> torch.Tensor:
    """Saved-tensor hook: return the tensor, and end its use; see `values`.

    It is rebuilt without autocast: its operands have the right types.
    """
    # First, because most are of this kind; and not by `is_overwritten`, which is a Python call.
    if type(value) is Kept and not value.address and value.version >= 0 and value.tensor._version == value.version:
        return value.tensor
    if _reading.on and isinstance(value, (Rebuilt, View, Stored)):
        _reading.value = value
        return _PLACEHOLDER
    if type(value) is Stored and value.original is not None:  # read from a node during the forward
        if value.original.is_overwritten:
            refuse(value.original, value.block, "a tensor")
        return value.original.tensor
    if torch.is_grad_enabled() or compat.devices.autocast_is_on():
        with torch.no_grad(), compat.devices.autocast_off():
            return unpack(value)
    tensor = value.value()
    root = value.root if type(value) is View else value
    if type(root) is Rebuilt or type(root) is Stored:
        root.end_use()
    return tensor
