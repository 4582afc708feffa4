"""`torch.utils.checkpoint`: its record of a checkpointed call, and errors of recomputations."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from hf_ckpt.compat.autograd import SavedTensorHooks, top_saved_tensor_hooks
from hf_ckpt.compat.private import private
from hf_ckpt.compat.torch import untraced

StopRecomputation: type[Exception] = private("torch.utils.checkpoint._StopRecomputationError")
"""The exception by which torch ends a recomputation as soon as it has made every tensor that backward needs."""
_READ = frozenset({"early_stop", "metadata_fn", "recomp_counter", "recomputed", "weak_holders", "x_metadatas"})
"""Attributes of torch's record of a checkpointed call that are read here."""


_default_metadata = private("torch.utils.checkpoint._default_meta_extractor")
_metadata = operator.attrgetter("shape", "dtype", "device")
"""Returns the same as `_default_metadata`, without a Python call: torch needs it twice for every saved tensor."""


_Holder = private("torch.utils.checkpoint._Holder")
_Handle = private("torch.utils.checkpoint._Handle")
_running_backward = private("torch._C._current_graph_task_id")


class _WatchedFrame(torch.utils.checkpoint._CheckpointFrame):
    """torch's record of a checkpointed call, which passes the errors of its recomputations to a function first."""

    on_error: Callable[[Exception], None]

    def get_inputs(self) -> Any:
        """Return the arguments. Raises an error if one of them was changed in place. torch 2.8 does not call it."""
        try:
            return super().get_inputs()  # type: ignore[no-untyped-call]
        except Exception as error:
            self.on_error(error)
            raise

    def check_recomputed_tensors_match(self, gid: Any) -> None:
        """Raise `CheckpointError` if a recomputation saved other tensors than the forward, as torch's method does.

        That method makes five Python calls for each tensor, a tenth of the calls of a step. So compare all tensors at
        once, and let torch's method tell what differs.
        """
        recomputed = self.recomputed[gid].data.values()  # type: ignore[attr-defined]
        # Autograd may have dropped a saved tensor: no backward needs it.
        expected = [kind for kind, holder in zip(self.x_metadatas, self.weak_holders, strict=True) if holder()]
        are_all = self.recomp_counter[gid] == len(self.weak_holders)
        if are_all and list(map(self.metadata_fn, recomputed)) == expected:
            return
        try:
            super().check_recomputed_tensors_match(gid)
        except Exception as error:
            self.on_error(error)
            raise


def run_watched(on_error: Callable[[Exception], None], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that a checkpoint of torch runs, and pass errors of its recomputation to `on_error`.

    These are errors that torch raises before and after it calls the function again. `on_error` may raise another one.
    """
    hooks = top_saved_tensor_hooks()
    if hooks is None:  # nothing will be recomputed
        return function(*args)
    pack, unpack = hooks
    frame = _frame_of(pack)
    if frame is not None:
        # torch has made the record already, and offers no way to make another kind of it.
        frame.on_error = on_error
        frame.__class__ = _WatchedFrame
        if frame.metadata_fn is _default_metadata:
            frame.metadata_fn = _metadata
            pack = _packing_for(frame)

    @untraced
    def unpack_watched(packed: Any) -> torch.Tensor:
        if frame is not None:
            # What torch's own hook does for all but the first tensor, in six Python calls.
            backward = _running_backward()
            handle = packed.handles.get(backward)
            if handle is not None:
                packed.handles[backward] = None
                tensor: torch.Tensor = frame.recomputed[backward].data.pop(weakref.ref(handle))
                return tensor
        try:
            return unpack(packed)
        except Exception as error:
            on_error(error)
            raise

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack_watched):
        return function(*args)


def _packing_for(frame: Any) -> Callable[[Any], Any]:
    """Return a pack hook that does what torch's own does for a record.

    For the metadata of each tensor, torch's turns gradients off and on, which takes six Python calls.
    """
    weak_holders = frame.weak_holders
    metadatas = frame.x_metadatas

    @untraced
    def pack(tensor: torch.Tensor) -> Any:
        holder = _Holder()
        weak_holders.append(weakref.ref(holder))
        metadatas.append(_metadata(tensor))
        return holder

    return pack


def run_again(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that a checkpoint of torch runs again in backward.

    torch wraps its pack hook to keep torch.compile from tracing it: nine calls for every tensor that the function
    saves. `untraced` has the same effect at no cost per call. torch 2.8 has no wrapper.
    """
    hooks = top_saved_tensor_hooks()
    if hooks is None:
        return function(*args)
    pack, unpack = hooks
    pack = getattr(pack, "_torchdynamo_orig_callable", pack)
    with torch.autograd.graph.saved_tensors_hooks(_repacking_for(pack) or untraced(pack), unpack):
        return function(*args)


_REPACKING = {
    *("requires_grad", "detach", "recomp_counter", "len", "weak_holders", "early_stop", "forward_completed", "handles"),
    *("ignore_saved_mismatch", "CheckpointError", "_debug_tip_msg", "_internal_assert", "get", "_Handle", "recomputed"),
    "_StopRecomputationError",
}
"""What the `pack` hook of a recomputation names in torch 2.8 to 2.14. One that names more may do more."""


def _repacking_for(pack: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what does the same as the `pack` hook of a recomputation by torch, which makes two calls more.

    None if that hook is not as expected.
    """
    # `pack` is a closure of `_recomputation_hook.__init__` (torch/utils/checkpoint.py).
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    if cells.keys() != {"gid", "target_frame_ref"} or set(pack.__code__.co_names) - {"AssertionError"} != _REPACKING:
        return None
    frame = cells["target_frame_ref"].cell_contents()
    if type(frame) is not _WatchedFrame:
        return None
    backward = cells["gid"].cell_contents
    weak_holders = frame.weak_holders
    counts = frame.recomp_counter
    recomputed: Any = frame.recomputed[backward]
    tensors = recomputed.data
    remove = recomputed._remove
    expected = len(weak_holders)
    stops_early = frame.early_stop

    @untraced
    def repack(tensor: torch.Tensor) -> torch.Tensor:
        number = counts[backward]
        if number >= expected:
            result: torch.Tensor = pack(tensor)  # torch's own tells what is wrong
            return result
        counts[backward] = number + 1
        if tensor.requires_grad:
            tensor = tensor.detach()
        holder = weak_holders[number]()
        if holder is not None:  # a backward inside the forward may have used it up
            handle = holder.handles[backward] = _Handle()
            tensors[weakref.ref(handle, remove)] = tensor
        if stops_early and number + 1 == expected:
            raise StopRecomputation
        return tensor

    return repack


def _frame_of(pack: Any) -> Any:
    """Return the record that a pack hook of torch's checkpoint writes to; None if it is not as expected."""
    # `pack` is a closure of `_checkpoint_hook.__init__` (torch/utils/checkpoint.py). Its cell holds the record.
    for cell in pack.__closure__ or ():
        frame = cell.cell_contents
        if type(frame) is _WatchedFrame.__base__ and vars(frame).keys() >= _READ:
            return frame
    return None


def are_of_a_checkpoint(hooks: SavedTensorHooks) -> bool:
    """Whether hooks belong to a checkpoint (torch's, DeepSpeed's), which pairs tensors of two runs by number."""
    return "checkpoint" in str(getattr(hooks[0], "__module__", ""))
