"""Every fact that depends on a version or a feature of torch, transformers or accelerate; no such test anywhere else.

Facts are detected (`hasattr`, `inspect.signature`), not inferred from version numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import importlib.metadata
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar, cast

import numpy
import torch
import torch.utils.checkpoint
import transformers
from packaging.version import Version
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel as PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer as GradientCheckpointingLayer

from hf_ckpt.errors import MissingDependencyError

# The hook and its new name (transformers 5.23 renamed it; the old name goes in v6). Both are driven where both exist.
ENABLE_NAMES = tuple(
    name
    for name in ("gradient_checkpointing_enable", "activation_checkpointing_enable")
    if hasattr(PreTrainedModel, name)
)
DISABLE_NAMES = tuple(name.replace("_enable", "_disable") for name in ENABLE_NAMES)

# torch's own activation checkpoint wrapper, which accelerate's FSDP plugin applies.
FOREIGN_OWNER_SEGMENT = "_checkpoint_wrapped_module"
# Segments that wrappers put into qualified names: torch.compile of a block, FSDP1, the wrapper above.
WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", FOREIGN_OWNER_SEGMENT})

# What transformers 5 marks a model with once its hooks that capture outputs (hidden states, router logits) are on.
CAPTURING_FLAG = "_output_capturing_hooks_installed"


def is_cache(value: object) -> bool:
    """Whether `value` is a key/value cache, which a recomputed block would write a second time."""
    return isinstance(value, (Cache, EncoderDecoderCache))


def is_compiling() -> bool:
    """Whether torch.compile is tracing the current call."""
    return bool(torch.compiler.is_compiling())


def is_replica(module: nn.Module) -> bool:
    """Whether `nn.DataParallel` made this copy, which runs in a thread beside others."""
    return bool(getattr(module, "_is_replica", False))


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def accelerator_type() -> str | None:
    """`cuda`, `xpu`, `mps`, ... of the accelerator in use, or None on a CPU-only machine."""
    if hasattr(torch, "accelerator"):
        device = torch.accelerator.current_accelerator(check_available=True)
        return None if device is None else device.type
    return "cuda" if torch.cuda.is_available() else None


def memory_module(device_type: str) -> Any | None:
    """The module that answers `max_memory_allocated()` and its kin for this device; None where nothing does.

    torch 2.9 moved the allocator's figures to `torch.accelerator`; before, they were kept by device, if at all.
    """
    for module in (getattr(torch, "accelerator", None), getattr(torch, device_type, None)):
        if module is not None and all(
            hasattr(module, name) for name in ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats")
        ):
            return module
    return None


def synchronize(device_type: str) -> None:
    """Wait for the accelerator's current device."""
    module: ModuleType | None = getattr(torch, "accelerator", None) or getattr(torch, device_type, None)
    if module is not None:
        module.synchronize()


def empty_host_cache() -> None:
    """Have torch give pinned memory that nobody uses back to the system, where it can."""
    empty = getattr(torch._C, "_accelerator_emptyHostCache", None)
    if empty is not None and accelerator_type() is not None:
        empty()


def timing_event(device_type: str) -> Any:
    """A recorded-later event of the accelerator that can measure time."""
    return torch.Event(device_type, enable_timing=True)


def gguf_arguments() -> dict[str, Any]:
    """What `from_pretrained(gguf_file=...)` needs to give plain dense weights.

    transformers 5 keeps GGUF blocks packed unless told otherwise; before, weights were always unpacked. Raises
    `MissingDependencyError` without gguf.
    """
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError("gguf", "reading GGUF weights", "pip install 'hf-ckpt[demo]'")
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def forked_random_state() -> contextlib.AbstractContextManager[None]:
    """Random state of the CPU and of every accelerator device, put back on exit."""
    device_type = accelerator_type()
    if device_type is None:
        return torch.random.fork_rng(devices=[])
    count = torch.accelerator.device_count() if hasattr(torch, "accelerator") else torch.cuda.device_count()
    return torch.random.fork_rng(devices=range(count), device_type=device_type)


def attach_oom_observer(on_oom: Callable[[], None]) -> bool:
    """Call `on_oom` when the CUDA allocator is about to raise out-of-memory; False where torch has no such hook.

    The history recorded from here on is what a snapshot shows. https://pytorch.org/docs/stable/torch_cuda_memory.html
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None or not torch.cuda.is_available():
        return False
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    attach(lambda device, alloc, device_alloc, device_free: on_oom())
    return True


def dump_memory_snapshot(path: str) -> None:
    """Write the CUDA allocator's snapshot (view it at https://pytorch.org/memory_viz)."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, has no memory left; accelerate knows most of their texts."""
    from accelerate.utils.memory import should_reduce_batch_size

    kind: type[BaseException] | tuple[()] = getattr(torch, "OutOfMemoryError", ())
    texts = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return (
        isinstance(error, kind)
        or (isinstance(error, Exception) and should_reduce_batch_size(error))
        or (isinstance(error, RuntimeError) and any(text in str(error) for text in texts))
    )


def release_memory() -> None:
    """Let go of what only cycles of objects hold, and of what the accelerator's allocator keeps for later."""
    gc.collect()
    device_type = accelerator_type()
    empty = getattr(getattr(torch, device_type or "cpu", None), "empty_cache", None)
    if empty is not None:
        empty()


def random_state(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Read the state of every source of random numbers a step may draw from; the result puts it back."""
    python, numbers, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    known = [(device, getattr(torch, device.type, None)) for device in devices if device.type != "cpu"]
    found = [(device, module, module.get_rng_state(device)) for device, module in known if module is not None]

    def put_back() -> None:
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(cpu)
        for device, module, state in found:
            module.set_rng_state(state, device)

    return put_back


def data_parallel(model: nn.Module) -> Any | None:
    """`model`, if it is torch's DistributedDataParallel over more than one rank."""
    from torch.nn.parallel import DistributedDataParallel

    model = getattr(model, "_orig_mod", model)  # torch.compile goes around it
    if isinstance(model, DistributedDataParallel) and torch.distributed.get_world_size(model.process_group) > 1:
        return model
    return None


def own_reduction(wrapped: Any) -> str | None:
    """What makes a DistributedDataParallel reduce gradients in a way of its own, if anything does."""
    if getattr(wrapped, "_comm_hooks", None):
        return "its communication hook"
    # Its first backward reduces everything at its end, under `no_sync`, too.
    return "`static_graph`" if wrapped.static_graph else None


def rank() -> int:
    """Of this process; 0 without torch.distributed."""
    return torch.distributed.get_rank() if is_distributed() else 0


def ranks() -> int:
    """How many processes train together; 1 without torch.distributed."""
    return torch.distributed.get_world_size() if is_distributed() else 1


def has_gradient_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether something runs in backward as soon as a gradient is there, as optimizers inside the backward do."""
    return any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters)


def collectives(wrapped: Any) -> int:
    """How many collective operations this rank has started on the group of a DistributedDataParallel."""
    return int(wrapped.process_group._get_sequence_number_for_group())


def leave_note(key: str, text: str) -> None:
    """Write a text where all ranks of the process group can read it, without waiting for any."""
    torch.distributed.distributed_c10d._get_default_store().set(key, text)


def forget_note(key: str) -> None:
    """Take back what `leave_note` wrote, where the store can; a note that stays does no harm, no other has its key."""
    with contextlib.suppress(RuntimeError):
        torch.distributed.distributed_c10d._get_default_store().delete_key(key)


def read_notes(keys: Sequence[str], seconds: float) -> list[str] | None:
    """The texts that ranks left, once all are there; None if that takes longer than so many seconds."""
    store = torch.distributed.distributed_c10d._get_default_store()
    try:
        store.wait(list(keys), datetime.timedelta(seconds=seconds))
    except RuntimeError:
        return None
    return [store.get(key).decode() for key in keys]


def steps_in_lockstep(model: nn.Module) -> bool:
    """Whether ranks meet inside the forward and backward of `model` (FSDP, DeepSpeed), so that none can step back."""
    return is_sharded(model) or any(
        kind.__name__ == "DeepSpeedEngine" for module in model.modules() for kind in type(module).__mro__
    )


def forward_parameters(module: nn.Module) -> set[str]:
    """Names of the arguments that a forward takes."""
    return set(inspect.signature(module.forward).parameters)


def wants_use_cache(module: nn.Module) -> bool:
    """Whether a forward of `module` takes `use_cache`."""
    return "use_cache" in forward_parameters(module)


def makes_inputs_require_gradients(hook: object) -> bool:
    """Whether a forward hook of an embedding is the one of `enable_input_require_grads`, or PEFT's copy of it."""
    name = str(getattr(hook, "__qualname__", ""))
    return name.endswith(("make_inputs_require_grads", "make_inputs_require_grad"))


def cached_tokens(value: Any) -> int:
    """How many tokens a key/value cache holds; 0 for None and for an empty one."""
    if isinstance(value, (tuple, list)):  # the format before caches were classes
        return int(value[0][0].shape[-2]) if value and value[0] else 0
    return int(value.get_seq_length()) if is_cache(value) else 0


def accelerate_owns_checkpointing() -> bool:
    """Whether accelerate's FSDP plugin of this process is set to checkpoint activations itself."""
    state_module = sys.modules.get("accelerate.state")
    if state_module is None or not state_module.AcceleratorState._shared_state:
        return False
    plugin = state_module.AcceleratorState._shared_state.get("fsdp_plugin")
    return bool(plugin is not None and getattr(plugin, "activation_checkpointing", False))


def accelerator_class() -> Any:
    """`accelerate.Accelerator`. Raises `MissingDependencyError` without accelerate."""
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise MissingDependencyError(
            "accelerate", "enabling a plan when a model is prepared", "pip install accelerate"
        ) from error
    return Accelerator


def trainer_class() -> Any:
    """`transformers.Trainer`, which every other Trainer comes from."""
    return transformers.Trainer


def callback_handler_of(callback: object) -> Any | None:
    """The Trainer's callback handler that is calling `callback` right now, or None outside an event.

    transformers gives callbacks no way to reach the handler, and puts users' callbacks behind the reporters, so figures
    that a callback adds to the logs would never be reported. The handler is the caller: read it from its frame.
    """
    from transformers.trainer_callback import CallbackHandler

    frame = sys._getframe(1)
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and any(found is callback for found in handler.callbacks):
            return handler
        frame = frame.f_back  # type: ignore[assignment]
    return None


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers of this process that step parameters of `model`; wrappers around one are left out.

    Nothing that a model or a forward is given refers to its optimizer, so Python's own list of objects is searched.
    """
    mine = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    found = []
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.optim.Optimizer) or not hasattr(thing, "param_groups"):
            continue
        if isinstance(getattr(thing, "optimizer", None), torch.optim.Optimizer):  # accelerate's
            continue
        if any(id(parameter) in mine for group in thing.param_groups for parameter in group["params"]):
            found.append(thing)
    return found


def accumulated_steps() -> int:
    """Micro-steps a step, as accelerate of this process was told; 1 where nobody told it."""
    state_module = sys.modules.get("accelerate.state")
    shared = state_module.GradientState._shared_state if state_module is not None else {}
    return int((shared.get("plugin_kwargs") or {}).get("num_steps", 1))


def is_distributed() -> bool:
    """Whether this process is one of several ranks."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are split over ranks: by FSDP, or by ZeRO-3."""
    return any(
        type(module).__name__.startswith(("FSDP", "FullyShardedDataParallel")) for module in model.modules()
    ) or any(hasattr(parameter, "ds_id") for parameter in model.parameters())


@dataclasses.dataclass(frozen=True)
class Shard:
    """One parameter under FSDP2, as this rank has it."""

    parameter: nn.Parameter
    """A DTensor; on the model only while it is not gathered."""
    gathered: nn.Parameter | None
    """The whole one, once there was one."""
    ranks: int
    """That share it."""
    numel: int
    """Elements of this rank's part, padded to the size of the largest."""
    compute: torch.dtype
    """Of the gathered parameter, and of its gradient."""
    reduce: torch.dtype
    """That gradients are summed up in."""
    copied: bool
    """Whether a copy in `compute` is sent."""
    on_device: bool
    """Whether this rank's part lies where the model runs."""


@dataclasses.dataclass(frozen=True)
class ShardUnit:
    """What one call of `fully_shard` gathers, reduces and lets go at once."""

    modules: tuple[nn.Module, ...]
    shards: tuple[Shard, ...]
    let_go: bool
    """Whether the gathered parameters are let go after the forward."""


def shard_units(model: nn.Module) -> list[ShardUnit]:
    """How FSDP2 splits the model and, once a forward has begun, whatever wraps it; empty without FSDP2."""
    units = []
    for group in _shard_groups(model):
        shards = tuple(_shard(found, getattr(group.mesh_info, "shard_mesh_size", 1)) for found in group.fsdp_params)
        let_go = group._reshard_after_forward and not group._use_post_forward_mesh
        units.append(ShardUnit(tuple(group.modules), shards, let_go))
    return units


def holds_gradients_back(model: nn.Module) -> bool:
    """Whether FSDP2 was told not to reduce gradients in the next backward: they stay whole until it does."""
    return any(not group.reduce_grads for group in _shard_groups(model))


def _shard_groups(model: nn.Module) -> Iterator[Any]:
    # Private, because no public name tells what a forward or backward gathers.
    modules: Iterator[Any] = model.modules()
    own = (module._get_fsdp_state() for module in modules if hasattr(module, "_get_fsdp_state"))
    states = {id(state): state for found in own for state in (found, *getattr(found._state_ctx, "all_states", ()))}
    for state in states.values():
        several = getattr(state, "_fsdp_param_groups", None)
        yield from several if several is not None else filter(None, [state._fsdp_param_group])  # one, in older torch


def _shard(found: Any, ranks: int) -> Shard:
    policy, own = found.mp_policy, found.sharded_param.dtype
    compute = policy.param_dtype or own
    return Shard(
        parameter=found.sharded_param,
        gathered=getattr(found, "_unsharded_param", None),
        ranks=ranks,
        numel=found.padded_sharded_param_size.numel(),
        compute=compute,
        reduce=policy.reduce_dtype or compute,
        copied=policy.param_dtype is not None,
        on_device=not found.offload_to_cpu or found.device.type == "cpu",
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before FSDP2 swapped it for a subclass called FSDP<name>."""
    return next((kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP")), type(module))


COMPOSABLE_STATE = "__composable_api_state_key"
"""Where FSDP2 and its kin keep what they know of a module, among its attributes: a prefix."""
GATHERED = "_hf_ckpt_gathered"
"""A mark on copies of modules whose parameters come and go during a step, while those of the copies stay."""


LAST_DEEPSPEED_WITH_EMPTY_SHAPES = "0.19.2"  # https://github.com/huggingface/transformers/issues/47254


def deepspeed_with_empty_shapes(model: nn.Module) -> str | None:
    """The version of a DeepSpeed that gives frozen parameters of this model no shape while a block is recomputed; None
    where there are no such parameters under ZeRO-3, or a later DeepSpeed."""
    if not any(hasattr(parameter, "ds_id") and not parameter.requires_grad for parameter in model.parameters()):
        return None
    found = importlib.metadata.version("deepspeed")
    return found if Version(found) <= Version(LAST_DEEPSPEED_WITH_EMPTY_SHAPES) else None


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile wraps the model or one of its modules: then nothing can be counted inside."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def top_saved_tensor_hooks() -> SavedTensorHooks | None:
    """The innermost saved-tensor hooks that are active now; None also where torch cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    found: SavedTensorHooks | None = top(True) if top is not None else None
    return found


def next_autograd_sequence_number() -> int:
    """Nodes of this thread that are made from now on have this number or a larger one."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def checkpoint_frame(
    again: Callable[..., None], args: tuple[Any, ...], *, preserve_rng_state: bool, determinism_check: str
) -> Generator[None, None, None]:
    """Torch's non-reentrant checkpoint around what runs between two `next` calls; `again(*args)` is run in backward.

    The generator that `torch.utils.checkpoint.checkpoint` itself, and torch's composable checkpoint, are made of.
    """
    make = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    early_stop = [True] if "early_stop" in inspect.signature(make).parameters else []  # torch 2.9
    frame: Generator[None, None, None] = make(
        again, preserve_rng_state, torch.utils.checkpoint.noop_context_fn, determinism_check, False, *early_stop, *args
    )
    return frame


@contextlib.contextmanager
def same_hook_number(hooks: Mapping[int, Any]) -> Iterator[None]:
    """A hook that is registered here into `hooks` gets the first free number below 0, not torch's next one.

    torch.compile guards on the numbers of hooks with `always_call`, so that every block would be compiled by itself,
    and again after every registration, up to the limit where nothing is compiled any more.
    """
    following = RemovableHandle.next_id
    RemovableHandle.next_id = min((0, *hooks)) - 1
    try:
        yield
    finally:
        RemovableHandle.next_id = following


_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """torch.compile leaves this function, and all it calls, alone. Where torch can mark the code itself that costs
    nothing per call; `torch.compiler.disable` wraps every call."""
    frames: Any = torch._C._dynamo.eval_frame
    try:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    except AttributeError:  # before torch 2.8
        disable: Any = torch.compiler.disable
        return cast(_Function, disable(function))
    return function


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast computes in on that device now; None while it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def same_autocast(device_type: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What enters the autocast of that device as it is now, on or off."""
    dtype = autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)


def depends_on_values(error: Exception) -> bool:
    """Whether fake tensors could not go on because they have no values."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


def is_changed_in_place(error: RuntimeError) -> bool:
    """Whether torch's selective checkpointing means that a result which stays was changed."""
    return "cached during selective activation checkpoint" in str(error)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values."""
    return isinstance(tensor, FakeTensor)


def autocast_is_on() -> bool:
    """Whether autocast is enabled for any device."""
    return bool(torch._C._is_any_autocast_enabled())


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """No autocast on the CPU and on the accelerator."""
    with contextlib.ExitStack() as around:
        for device_type in {"cpu", accelerator_type() or "cpu"}:
            around.enter_context(torch.autocast(device_type, enabled=False))
        yield


def parameters_stay(module: nn.Module) -> bool:
    """Whether all parameters lie whole on their device throughout a step: not sharded by FSDP or ZeRO-3, not split by
    tensor parallelism, and not moved in and out by accelerate's hooks."""
    return not any(
        type(inner).__name__.startswith(("FSDP", "FullyShardedDataParallel"))
        or hasattr(inner, "_hf_hook")
        or GATHERED in vars(inner)
        or any(hasattr(p, "ds_id") or hasattr(p.data, "device_mesh") for p in inner.parameters(recurse=False))
        for inner in module.modules()
    )


def causal_loss(logits: torch.Tensor, labels: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """transformers' loss of causal language models. Shapes: [batch, tokens, vocabulary], [batch, tokens]."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss: torch.Tensor = ForCausalLMLoss(logits, labels, vocabulary)
    return loss


HAS_OWN_OFFLOAD = "offload" in inspect.signature(getattr(PreTrainedModel, ENABLE_NAMES[-1])).parameters
"""Whether transformers itself can keep the inputs of blocks in host memory."""
HAS_EVERY_N_LAYERS = "every_n_layers" in inspect.signature(getattr(PreTrainedModel, ENABLE_NAMES[-1])).parameters
"""Whether transformers itself can checkpoint every n-th layer."""


def uninitialised() -> contextlib.AbstractContextManager[None]:
    """transformers makes models without filling their weights in."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights
    context: contextlib.AbstractContextManager[None] = no_init_weights()
    return context


@contextlib.contextmanager
def fake_values_count() -> Iterator[None]:
    """transformers asks fake tensors for their values, too, as it asks real ones: whether a mask masks anything decides
    which attention kernel runs. transformers 4 does so anyway."""
    from transformers.utils import import_utils

    name = "is_fake_tensor"
    original = getattr(import_utils, name, None)
    if original is None:
        yield
        return
    setattr(import_utils, name, lambda value: False)
    try:
        yield
    finally:
        setattr(import_utils, name, original)


Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def own_checkpointing(
    model: PreTrainedModel,
    *,
    context_fn: Callable[[], Contexts] | None = None,
    only: Container[nn.Module] | None = None,
    **options: Any,
) -> Iterator[Callable[[], int]]:
    """Checkpointing of a model by transformers alone for a while; the embedding hooks it adds go, too.

    Args:
        model: to be checkpointed.
        context_fn: as `torch.utils.checkpoint.checkpoint` takes it.
        only: of the blocks, these; None for all.
        options: of the enable call.

    Yields how often a block has been run again so far.
    """
    count = 0

    @contextlib.contextmanager
    def recomputing(inside: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        nonlocal count
        count += 1
        with inside:
            yield

    def contexts() -> Contexts:
        first, again = (contextlib.nullcontext(), contextlib.nullcontext()) if context_fn is None else context_fn()
        return first, recomputing(again)

    arguments = {"use_reentrant": False, "context_fn": contexts}
    getattr(model, ENABLE_NAMES[-1])(arguments, **options)
    if only is not None:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer) and module not in only:
                module.gradient_checkpointing = False
    try:
        yield lambda: count
    finally:
        getattr(model, DISABLE_NAMES[-1])()
        model.disable_input_require_grads()


def cpu_allocations(profile: Any) -> list[int]:
    """Bytes of every allocation (negative: release) of the CPU's allocator under a finished profile, in their order."""
    from torch._C._profiler import _EventType

    found: list[tuple[int, int]] = []
    left = list(profile.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left.extend(event.children)
        if event.typed[0] == _EventType.Allocation and event.typed[1].device.type == "cpu":
            found.append((event.start_time_ns, event.typed[1].alloc_size))
    return [size for _, size in sorted(found, key=lambda pair: pair[0])]


def compiled_within(share: float) -> contextlib.AbstractContextManager[Any]:
    """torch.compile keeps at most this share of a graph's activations for backward, and recomputes the others."""
    from torch._functorch import config

    patched: contextlib.AbstractContextManager[Any] = config.patch(activation_memory_budget=share)
    return patched


def checkpoints_beside_blocks(model: nn.Module) -> bool:
    """Whether transformers' own switch also changes modules inside of blocks: T5's attention then computes gradients of
    its position bias, which takes another kernel."""
    blocks_and_stacks = GradientCheckpointingLayer, PreTrainedModel
    found = (module for module in model.modules() if hasattr(module, "gradient_checkpointing"))
    return any(not isinstance(module, blocks_and_stacks) for module in found)
