"""The private names of torch that hf_ckpt relies on, each with the consequence if torch lacks it.

`private` looks up names below `torch`. Attributes of tensors, modules and autograd nodes are read where they are
needed; they are listed, too, so that a release of torch can be checked against one list.
"""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
from typing import Any

import torch

from hf_ckpt.errors import HfCkptError


@dataclasses.dataclass(frozen=True)
class PrivateName:
    """Private names of torch that serve one purpose."""

    names: tuple[str, ...]
    """Dotted names below `torch`; for attributes, the class and the attribute."""
    purpose: str
    """What hf_ckpt does with them."""
    without: str = ""
    """What happens if torch lacks them; empty if hf_ckpt then cannot do what `purpose` says."""


_ROWS = (
    # Looked up below `torch`.
    PrivateName(("torch.autograd._get_sequence_nr",), "tells which autograd nodes a block has made"),
    PrivateName(("torch.autograd.Variable._execution_engine",), "tells whether a measured backward came to its end"),
    PrivateName(("torch.utils._pytree",), "finds the tensors in nested inputs and outputs"),
    PrivateName(("torch.utils._python_dispatch",), "sees every operation, to count live bytes and to trace steps"),
    PrivateName(
        (
            "torch.utils._python_dispatch._push_mode",
            "torch.utils._python_dispatch._pop_mode",
            "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        ),
        "counts the live bytes of a training step below the dispatch modes of others",
    ),
    PrivateName(
        ("torch.utils._python_dispatch._disable_current_modes",),
        "hides from selective checkpointing what it does by itself in backward",
    ),
    PrivateName(("torch.nn.modules.module._has_any_global_hook",), "keeps blocks from being compiled under such hooks"),
    PrivateName(("torch._VF",), "predicts what dropout saves on an accelerator, where there is none"),
    PrivateName(("torch._subclasses.fake_tensor",), "runs a model on tensors without values, to predict its memory"),
    PrivateName(("torch._C.DisableTorchFunctionSubclass",), "reads attributes of logits that are not computed yet"),
    PrivateName(
        ("torch._C._accelerator_emptyHostCache",),
        "gives unused pinned memory back to the system",
        without="torch keeps it for later",
    ),
    PrivateName(
        ("torch._C._autograd._top_saved_tensors_default_hooks",),
        "sees the saved-tensor hooks around a block",
        without="saved-tensor hooks of others are not seen",
    ),
    PrivateName(
        (
            "torch._C._autograd._pop_saved_tensors_default_hooks",
            "torch._C._autograd._push_saved_tensors_default_hooks",
        ),
        "names the block in errors of a recomputation",
        without="errors do not name the block",
    ),
    PrivateName(
        ("torch._C._current_autograd_node",),
        "lets the watch leave out random state that an attention without dropout saves and does not write",
    ),
    PrivateName(
        ("torch._C._is_any_autocast_enabled",),
        "sees autocast without asking for each type of device",
        without="the CPU and the accelerator are asked",
    ),
    PrivateName(
        ("torch._C._functorch.get_interpreter_stack", "torch.autograd.forward_ad._current_level"),
        "sees transforms of torch.func and forward-mode AD",
        without="they are not seen, and may end in an error of torch",
    ),
    PrivateName(
        ("torch._C._dynamo.eval_frame._FrameAction", "torch._C._dynamo.eval_frame._FrameExecStrategy"),
        "keeps torch.compile out of a function at no cost for each call (torch 2.8)",
        without="torch.compiler.disable wraps the function",
    ),
    PrivateName(
        ("torch._subclasses.fake_impls.op_implementations_dict",),
        "runs experts in float32 on tensors without values",
        without="`budget` does not plan for them",
    ),
    PrivateName(
        ("torch._subclasses.fake_tensor.in_kernel_invocation_manager",),
        "makes views of tensors without values in a fifth of the time",
        without="planning takes longer",
    ),
    PrivateName(
        (
            "torch._inductor.compile",
            "torch._inductor.config",
            "torch._inductor.custom_graph_pass.CustomGraphPass",
            "torch._inductor.exc.InductorError",
            "torch._functorch.config",
            "torch._dynamo.eval_frame.OptimizedModule",
            "torch._dynamo.exc.TorchDynamoException",
            "torch._dynamo.utils.counters",
            "torch._ops.OpOverload",
        ),
        "compiles blocks one by one, each with a share of kept bytes",
    ),
    PrivateName(
        (
            "torch._C._autograd._disable_profiler",
            "torch._C._autograd._enable_profiler",
            "torch._C._autograd._prepare_profiler",
            "torch._C._autograd._profiler_enabled",
            "torch._C._current_graph_task_id",
            "torch._C._profiler",
            "torch._C._profiler._EventType",
            "torch._C._profiler._ExperimentalConfig",
        ),
        "records the allocations of a step with compiled blocks on a CPU",
    ),
    # Read from objects.
    PrivateName(
        ("Tensor._version", "Tensor._base", "UntypedStorage._cdata"),
        "sees changes in place, views, and tensors that share memory",
    ),
    PrivateName(("Tensor._indices", "Tensor._values"), "counts the bytes of sparse gradients"),
    PrivateName(("Tensor._make_wrapper_subclass",), "makes the stand-in for logits that are not computed yet"),
    PrivateName(("DTensor._local_tensor",), "counts this rank's part of a tensor", without="the tensor is not split"),
    PrivateName(
        ("Parameter._post_accumulate_grad_hooks",),
        "sees optimizers that step inside backward",
        without="they are not seen",
    ),
    PrivateName(
        ("Node._sequence_nr", "Node._input_metadata", "Node._saved_*", "Node._raw_saved_*"),
        "reads when an operation ran, its constants and operands and who holds them, and what its result looks like",
    ),
    PrivateName(("OpOverload._schema", "OpOverload._overloadpacket"), "reads what an operation changes in place"),
    PrivateName(
        (
            "Module._forward_hooks",
            "Module._forward_pre_hooks",
            "Module._backward_hooks",
            "Module._backward_pre_hooks",
            "Module._compiled_call_impl",
        ),
        "sees hooks of others",
    ),
    PrivateName(
        ("Module._parameters", "Module._buffers", "Module._modules"),
        "compares a block with what its forward saw, and puts that back while it is run again",
    ),
    PrivateName(("DataParallel._is_replica",), "knows blocks that run in a thread", without="no module is a replica"),
    PrivateName(
        (
            "OptimizedModule._orig_mod",
            "FullyShardedDataParallel._fsdp_wrapped_module",
            "CheckpointWrapper._checkpoint_wrapped_module",
        ),
        "leaves out of the names of blocks what wrappers add to them",
        without="blocks keep the names that they have",
    ),
    PrivateName(
        ("pack_hook._user_hooks",),
        "shows selective checkpointing the saved-tensor hooks around a block that is checked",
        without="it does not look for them, until torch 2.13",
    ),
    PrivateName(
        ("BackwardCFunction._forward_cls",),
        "names a custom autograd Function that reads its saved tensors twice",
        without="the error does not name it",
    ),
    PrivateName(("Reducer._get_zeros_like_grad_buckets",), "counts the buckets in which gradients are reduced"),
    PrivateName(("FullyShardedDataParallel._handle",), "counts flat parameters and their gradients"),
)
PRIVATE = {name: row for row in _ROWS for name in row.names}
"""Name -> its row."""


def private(name: str) -> Any:
    """Return torch's object of a private name, which must have a row; None if torch lacks an optional name.

    Raises `HfCkptError` if torch lacks a required name.
    """
    row = PRIVATE[name]
    owner, _, attribute = name.rpartition(".")
    try:
        return getattr(_owner(owner), attribute)
    except (AttributeError, ImportError):
        if row.without:
            return None
        raise HfCkptError(
            f"torch {torch.__version__} has no {name}, which hf_ckpt needs: it {row.purpose}. Install a torch that "
            "hf_ckpt is tested with (docs/versions.md)."
        ) from None


@functools.cache  # blocks call this in every forward, and importing by name is the slowest part
def _owner(name: str) -> Any:
    return pkgutil.resolve_name(name)
