"""Code that depends on transformers' version or private names, mainly the methods that switch checkpointing."""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel as PreTrainedModel
from transformers import masking_utils
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer as GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D as Conv1D

try:
    from transformers.initialization import no_init_weights as no_init_weights
except ImportError:  # transformers 4
    from transformers.modeling_utils import no_init_weights as no_init_weights

_ENABLE_NAMES = ("gradient_checkpointing_enable", "activation_checkpointing_enable")
ENABLE_NAMES = tuple(name for name in _ENABLE_NAMES if hasattr(PreTrainedModel, name))
"""The methods of a model that enable checkpointing, the newest last. Transformers 5.23 renamed the first to the second;
version 6 removes the first. If both exist, hf_ckpt replaces both."""
DISABLE_NAMES = tuple(name.replace("_enable", "_disable") for name in ENABLE_NAMES)
"""The methods of a model that disable checkpointing, in the order of `ENABLE_NAMES`."""
FLAG_NAME = ENABLE_NAMES[-1].removesuffix("_enable")
"""The field of `TrainingArguments` that asks for checkpointing. Its options are in the field of the same name with
`_kwargs`."""
HOOKS_STAY_OUTSIDE = "__init_subclass__" in vars(transformers.modeling_layers.GradientCheckpointingLayer)
"""Whether transformers checkpoints a block's own forward, rather than the call with the block's hooks."""
BLOCKS_TAKE_CACHES = hasattr(GradientCheckpointingLayer, "_can_checkpoint_with_cache")
"""Whether a block can say that it may get a cache while it is checkpointed. Older transformers drop every cache."""
TORCH_OPTIONS = ("use_reentrant", "preserve_rng_state", "determinism_check")
"""Options of an enable call that transformers passes to `torch.utils.checkpoint`, and that hf_ckpt knows, too."""


SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func")
"""Names of the two attributes of a module that its class reads: whether to checkpoint, and the function to call."""
INITIALISED = "_is_hf_initialized"
"""Attribute of modules whose weights are initialised or loaded. No forward reads it."""
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of a forward's cache argument, the newest first. Since transformers 5.24, its own models call it `cache`, and
accept the other names until 5.40. Models with custom code keep their names."""


LAYER_DROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Options of configs, and attributes of stacks, that give the share of blocks to skip at random in training."""


_NO_CACHES = frozenset({type(None), bool, int, float, tuple, dict, torch.Tensor})
"""Other types of blocks' arguments: comparing types is faster than checking each value."""


def skips_blocks(model: nn.Module) -> bool:
    """Whether a model skips blocks at random in training (LayerDrop)."""
    owners = (owner for module in model.modules() for owner in (module, vars(module).get("config")))
    return any(getattr(owner, name, None) for owner in owners for name in LAYER_DROP)


def is_cache(value: object) -> bool:
    """Whether `value` is a key/value cache, which a recomputed block would write twice."""
    return isinstance(value, Cache)


def caches_among(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the caches among a forward's arguments, whatever their names and positions: name -> value.

    `names` are those of the forward's parameters, in order (`forward_parameters`).
    """
    # `*args` of a forward may take more than it has names for.
    placed = {names[place] if place < len(names) else f"args[{place}]": value for place, value in enumerate(args)}
    named = {name: value for name, value in {**placed, **kwargs}.items() if value is not None}
    # By name, too: code from before transformers had cache objects passes tuples.
    return {name: value for name, value in named.items() if name in CACHE_NAMES or is_cache(value)}


def block_call(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return what a block passes to its checkpointing function, with hidden states first and caches replaced by None.

    Some layers (Mllama, Llama 4) pass hidden states by keyword. Engines look for them, and for their device, in the
    first argument.

    A recomputed block would write into a cache twice. The layer removes only caches passed by a name that its
    transformers knows: GPT-2 passes its own by position, and code from the hub uses names from before 5.24. A
    block that only reads its cache keeps it.
    """
    if not args and isinstance(function, functools.partial):
        function, args = _hidden_states_first(function)
    keywords = function.keywords if isinstance(function, functools.partial) else {}
    values = [*keywords.values(), *args]
    # The first test decides for nearly all calls. Every block comes here in every step.
    if _NO_CACHES.issuperset(map(type, values)) or not any(map(is_cache, values)):
        return function, tuple(args)
    if getattr(module_of(function), "_can_checkpoint_with_cache", False):
        return function, tuple(args)
    if isinstance(function, functools.partial):
        cleared = {name: None if is_cache(value) else value for name, value in keywords.items()}
        function = functools.partial(function.func, *function.args, **cleared)
    return function, without_caches(args)


def without_caches(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return positional arguments with caches replaced by None.

    Use it in place of `block_call` while compiling: torch 2.8 cannot trace the checks there.
    """
    return tuple(None if is_cache(arg) else arg for arg in args)


def _hidden_states_first(function: functools.partial[Any]) -> tuple[functools.partial[Any], tuple[Any, ...]]:
    """Return a block's forward and its first argument, if that was bound as a keyword."""
    module = module_of(function)
    name = None if module is None else next(iter(forward_parameters(module)), None)
    if name not in function.keywords:
        return function, ()
    others = {key: value for key, value in function.keywords.items() if key != name}
    return functools.partial(function.func, *function.args, **others), (function.keywords[name],)


def copied_context() -> contextvars.Context:
    """Return a copy of the current context, with the values that context variables have now.

    transformers 5 collects hidden states and router logits in a context variable. It is empty in the copy: otherwise a
    recomputation would collect its results, too, and the copy would keep all results of the forward alive.
    """
    context = contextvars.copy_context()
    # Without this module (transformers 4), nothing is collected in a context variable.
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    if collector is not None and context.get(collector.context_var) is not None:
        context.run(collector.context_var.set, None)
    return context


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """Return the module whose forward is `function`, in the form that a block passes to its checkpointing function.

    That is `partial(forward, self, ...)`, before transformers 5.18 `partial(self.__call__, ...)`. Else returns None.
    """
    if isinstance(function, functools.partial):
        first = function.args[0] if function.args else None
        if isinstance(first, nn.Module):
            return first
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def config_of(module: nn.Module) -> object | None:
    """Return the config that a module reads at run time, which says how attention is computed; None without one."""
    # The property `_attn_implementation`, which models read, is stored under this name.
    config = vars(module).get("config")
    return config if "_attn_implementation_internal" in getattr(config, "__dict__", ()) else None


def set_layer_types(config: Any, types: Sequence[str]) -> None:
    """Set a config's type of each layer, which some models look up at run time.

    Some configs compute the list and reject another one; such a config gets a new subclass with this list.
    """
    try:
        config.layer_types = list(types)
    except AttributeError:  # a property without a setter
        name = getattr(config, "attribute_map", {}).get("layer_types", "layer_types")
        config.__class__ = type(type(config).__name__, (type(config),), {name: list(types)})


def quantised_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that `from_pretrained` replaces for a `BitsAndBytesConfig`.

    These are linear and `Conv1D` layers, except for the head, layers tied to it, and those kept in float32.
    """
    from transformers.quantizers import quantizers_utils
    from transformers.quantizers.base import HfQuantizer

    exceptions = HfQuantizer.get_modules_to_not_convert(model, None, getattr(model, "_keep_in_fp32_modules", None))
    converts = getattr(quantizers_utils, "should_convert_module", None)

    def is_replaced(name: str, module: nn.Module) -> bool:
        if type(module) is not nn.Linear and not isinstance(module, Conv1D):
            return False
        if converts is None:  # transformers 4 compares names in this way
            return not any(key in name for key in exceptions)
        return bool(converts(name, exceptions))

    return [name for name, module in model.named_modules() if is_replaced(name, module)]


def forward_parameters(module: nn.Module) -> list[str]:
    """Return the names of the forward's parameters, in order."""
    return list(inspect.signature(module.forward).parameters)


def takes(module: nn.Module, name: str) -> bool:
    """Whether the forward of a module takes a keyword argument of this name, if only to pass it on."""
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def cache_hides_packing(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> bool:
    """Whether a forward with these arguments would build a cache, and keeps packed rows apart only without one.

    transformers recognises packed rows by position ids that begin anew, unless there is a mask or a cache
    (`masking_utils._preprocess_mask_arguments`). FlashAttention recognises them in any case.
    """
    # Values come last, because reading them makes the host wait for the device.
    positions = kwargs.get("position_ids")
    if not isinstance(positions, torch.Tensor) or kwargs.get("attention_mask") is not None:
        return False
    config: Any = model.config.get_text_config()
    builds_cache = kwargs.get("use_cache", getattr(config, "use_cache", False))
    if not builds_cache or "flash" in str(config._attn_implementation):
        return False
    return hasattr(masking_utils, "find_packed_sequence_indices") and bool((positions.diff(dim=-1) != 1).any())


def makes_inputs_require_gradients(hook: object) -> bool:
    """Whether an embedding's forward hook is that of `enable_input_require_grads`, or PEFT's copy of it."""
    # Both are functions inside of functions, so that there is no object to compare with.
    name = str(getattr(hook, "__qualname__", ""))
    return name.endswith(("make_inputs_require_grads", "make_inputs_require_grad"))


ATTENTION_KEY = "_attn_implementation_internal"
"""Attribute of configs with the attention that modules call. The property without `_internal` takes a Python call."""


def is_filled(value: Any) -> bool:
    """Whether a cache argument holds anything: keys and values, or states of linear attention. Also True if unknown.

    Old code passes tuples instead of cache objects.
    """
    if isinstance(value, (tuple, list)):
        return bool(value) and value[0] is not None
    cache = getattr(value, "self_attention_cache", value)  # what writes the one for cross-attention writes both
    if not hasattr(cache, "layers"):
        return True  # better refused than written twice
    return any(
        (hasattr(layer, "get_seq_length") and layer.get_seq_length() > 0)
        or any((getattr(layer, "has_previous_state", None) or {}).values())  # of linear attention
        for layer in cache.layers
    )


def forget_evaluation_loaders(trainer: Any) -> None:
    """Let a Trainer make its loaders of evaluation data anew: with persistent workers, it keeps them and their batch
    size."""
    vars(trainer).pop("_eval_dataloaders", None)


def counters_of(trainer: Any) -> dict[str, Any]:
    """Return what TRL's trainers that generate keep from one micro-step to the next: its number, and the completions
    from which it takes its batch (GRPO, RLOO, distillation). Names of attributes -> values; empty for other trainers.
    """
    return {name: vars(trainer)[name] for name in ("_step", "_buffered_inputs") if name in vars(trainer)}
