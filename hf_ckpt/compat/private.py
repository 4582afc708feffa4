"""The private names of torch that hf_ckpt relies on, in two lists against which each release of torch is checked.

`private` looks up names below `torch`. Attributes of tensors, modules and autograd nodes are read where they are
needed.
"""

from __future__ import annotations

import functools
import pkgutil
from typing import Any

import torch

from hf_ckpt.errors import HfCkptError

PRIVATE = {
    "torch.autograd._get_sequence_nr": "",
    "torch.autograd.forward_ad._current_level": "",
    "torch.autograd.Variable._execution_engine": "",
    "torch.nn.modules.module._has_any_global_hook": "",
    "torch.utils._pytree": "",
    "torch.utils._python_dispatch": "",
    "torch.utils._python_dispatch._disable_current_modes": "",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "",
    "torch.utils._python_dispatch._pop_mode": "",
    "torch.utils._python_dispatch._push_mode": "",
    "torch._C._accelerator_emptyHostCache": "unused pinned memory is not given back to the system (torch 2.8)",
    "torch._C._autograd._disable_profiler": "",
    "torch._C._autograd._enable_profiler": "",
    "torch._C._autograd._pop_saved_tensors_default_hooks": "",
    "torch._C._autograd._prepare_profiler": "",
    "torch._C._autograd._profiler_enabled": "",
    "torch._C._autograd._push_saved_tensors_default_hooks": "",
    "torch._C._autograd._top_saved_tensors_default_hooks": "",
    "torch._C._current_autograd_node": "",
    "torch._C._current_graph_task_id": "",
    "torch._C.DisableTorchFunctionSubclass": "",
    "torch._C._dynamo.eval_frame._FrameAction": "",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "",
    "torch._C._functorch.get_interpreter_stack": "",
    "torch._C._is_any_autocast_enabled": "",
    "torch._C._profiler": "",
    "torch._C._profiler._EventType": "",
    "torch._C._profiler._ExperimentalConfig": "",
    "torch._dynamo.eval_frame.OptimizedModule": "",
    "torch._dynamo.exc.TorchDynamoException": "",
    "torch._dynamo.utils.counters": "",
    "torch._functorch.config": "",
    "torch._inductor.compile": "",
    "torch._inductor.config": "",
    "torch._inductor.custom_graph_pass.CustomGraphPass": "",
    "torch._inductor.exc.InductorError": "",
    "torch._ops.OpOverload": "",
    "torch._subclasses.fake_impls.op_implementations_dict": "",
    "torch._subclasses.fake_tensor": "",
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager": "",
    "torch._VF": "",
}
"""Name -> what happens if torch lacks it; empty if hf_ckpt needs it."""

ATTRIBUTES = {
    "BackwardCFunction": ("_forward_cls",),
    "CheckpointWrapper": ("_checkpoint_wrapped_module",),
    "DataParallel": ("_is_replica",),
    "DTensor": ("_local_tensor",),
    "FullyShardedDataParallel": ("_fsdp_wrapped_module", "_handle"),
    "Module": (
        "_backward_hooks",
        "_backward_pre_hooks",
        "_buffers",
        "_compiled_call_impl",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_load_state_dict_post_hooks",
        "_load_state_dict_pre_hooks",
        "_modules",
        "_parameters",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
    ),
    "Node": ("_input_metadata", "_raw_saved_*", "_saved_*", "_sequence_nr"),
    "OpOverload": ("_overloadpacket", "_schema"),
    "OptimizedModule": ("_orig_mod",),
    "pack_hook": ("_user_hooks",),
    "Parameter": ("_post_accumulate_grad_hooks",),
    "Reducer": ("_get_zeros_like_grad_buckets",),
    "Tensor": ("_base", "_indices", "_make_wrapper_subclass", "_values", "_version"),
    "UntypedStorage": ("_cdata",),
}
"""Class -> private attributes of its objects."""


def private(name: str) -> Any:
    """Return torch's object of a private name in `PRIVATE`; None if torch lacks a name that hf_ckpt can do without.

    Raises `HfCkptError` if torch lacks a name that hf_ckpt needs.
    """
    without = PRIVATE[name]
    owner, _, attribute = name.rpartition(".")
    try:
        return getattr(_owner(owner), attribute)
    except (AttributeError, ImportError):
        if without:
            return None
        raise HfCkptError(
            f"torch {torch.__version__} has no {name}, which hf_ckpt needs. Install a torch that hf_ckpt is tested "
            "with (docs/versions.md)."
        ) from None


@functools.cache  # blocks call this in every forward, and importing by name is the slowest part
def _owner(name: str) -> Any:
    return pkgutil.resolve_name(name)
