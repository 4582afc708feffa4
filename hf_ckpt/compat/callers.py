"""How a trainer calls a model and what it makes of the outputs, read from the frames of the callers.

Nobody hands this on: Trainer takes the labels away where it smooths them or has a loss function of its own, TRL puts
another forward on the model, and PEFT calls the forward past its hooks. A plan has to be made for what really runs.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""Makes the loss from a model's outputs and the labels."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a model's forward."""

    has_labels: bool
    """Whether the model is given labels, so that it computes a loss."""
    options: Mapping[str, Any]
    """The plain values (numbers, truth values and names) among its arguments."""
    forward: types.MethodType | None = None
    """The forward that was put on this model in place of its class's; None without one."""
    float32_outputs: bool = False
    """Whether accelerate casts the outputs to float32."""
    trainer: Any = None
    """The Trainer that computes a loss with the call; None without one."""
    loss: Loss | None = None
    """What the trainer computes the loss with; None where that is the model, or where it is not known."""


_LIBRARIES = {"accelerate", "hf_ckpt", "peft", "torch", "transformers", "trl"}
_METHODS = {"compute_loss", "forward"}
"""Packages, and names of functions anywhere, whose frames lie between trainer and model. Other frames are not read:
before Python 3.13, reading the variables of a frame keeps them alive until it ends, and training loops are long."""
_MOST_SAMPLES = 20_000
"""Most samples whose lengths are looked at one by one."""
_NO_OPTIONS = {"return_dict", "use_cache"}
"""Arguments that a trace chooses by itself."""


def call_of(base: nn.Module, given: Mapping[str, Any] | None) -> Call | None:
    """Return how the forward of `base` is being called right now; None where it is not.

    Args:
        base: the model.
        given: keyword arguments of the call; None where they are to be read from the frame of the forward.
    """
    trainers = sys.modules.get("transformers.trainer")
    trainer, casts = None, False
    frame = sys._getframe(1)
    while frame is not None and trainer is None and _is_between(frame):
        library = str(frame.f_globals.get("__name__")).partition(".")[0]
        name = frame.f_code.co_name
        caller = frame.f_locals.get("self")
        if given is None and caller is base and library != "torch":
            given = _arguments(frame)
        elif type(caller).__name__ == "ConvertOutputsToFp32":
            casts = True
        elif name == "compute_loss" and trainers and isinstance(caller, trainers.Trainer):
            trainer = caller
        frame = frame.f_back  # type: ignore[assignment]
    if given is None:
        return None
    plain = {name: value for name, value in given.items() if isinstance(value, (bool, int, float, str))}
    options = {name: value for name, value in plain.items() if name not in _NO_OPTIONS}
    has_labels = given.get("labels") is not None
    loss = None if has_labels or trainer is None else _loss_of(trainer, base)
    return Call(has_labels, options, _forward_of(base), casts, trainer, loss)


def call_past_hooks(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of the forward of `module` that is running, if it was called past the module's hooks.

    PEFT calls the forward of the model that it wraps in this way, so that only the frames of the callers tell what goes
    into it. Returns (positional, keyword arguments); None where the hooks were called, or where no forward is running.
    """
    frame, found = sys._getframe(1), None
    while frame is not None and _is_between(frame):
        of_module = frame.f_locals.get("self") is module
        if of_module and frame.f_code.co_name == "_call_impl":
            return None
        if of_module:
            found = frame  # the outermost one: decorators of the forward have frames of their own
        elif found is not None:
            break
        frame = frame.f_back  # type: ignore[assignment]
    if found is None:
        return None
    names, rest, keywords, values = inspect.getargvalues(found)
    given = {name: values[name] for name in names[1:] if name in values}
    return tuple(values[rest]) if rest else (), given | (values[keywords] if keywords else {})


def input_of_dropout() -> torch.Tensor | None:
    """Return what is given to the `nn.functional.dropout` that hf_ckpt is called from, as a saved-tensor hook is.

    `nn.Dropout` calls that function, too. None where hf_ckpt is called from anything else. A function that somebody has
    put in its place does not count.
    """
    frame = _caller()
    if frame is None or frame.f_code is not _DROPOUT or frame.f_code.co_filename != functional.__file__:
        return None
    given: torch.Tensor = frame.f_locals["input"]
    return given


_DROPOUT = getattr(functional.dropout, "__code__", None)


class LayerUnderDora(NamedTuple):
    """A frozen linear layer whose DoRA adapter is running."""

    weight: nn.Parameter
    """Its weight."""
    cast: torch.Tensor
    """The same values in the type of the adapter's input."""
    bias: torch.Tensor | None
    """The bias that is taken off the layer's result; None without one, and before it is."""
    result: torch.Tensor | None
    """The layer's result without the bias; None where the adapter makes its own."""


def layer_under_dora() -> LayerUnderDora | None:
    """Return the layer whose DoRA adapter hf_ckpt is called from, as a saved-tensor hook is; None where there is none.

    Nor for a weight that is trained, or that is no plain parameter, as a quantised one.
    """
    dora = sys.modules.get("peft.tuners.lora.dora")
    if dora is None:
        return None
    frame, running = _caller(), getattr(dora.DoraLinearLayer.forward, "__code__", None)
    if frame is None or frame.f_code is not running:
        return None
    names = frame.f_locals
    base, cast, bias = names.get("base_layer"), names.get("weight"), names.get("bias")
    weight = getattr(base, "weight", None)
    if type(weight) is not nn.Parameter or weight.requires_grad or not isinstance(cast, torch.Tensor):
        return None
    if cast.shape != weight.shape:
        return None
    frozen = bias if isinstance(bias, torch.Tensor) and not bias.requires_grad else None
    return LayerUnderDora(weight, cast, frozen, names.get("base_result"))


def _caller() -> types.FrameType | None:
    """The frame that hf_ckpt is called from."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("hf_ckpt."):
        frame = frame.f_back
    return frame


def _is_between(frame: types.FrameType) -> bool:
    """Whether a frame may lie between a trainer and its model, and so ends soon."""
    library, name = str(frame.f_globals.get("__name__")).partition(".")[0], frame.f_code.co_name
    return name != "training_step" and (library in _LIBRARIES or name in _METHODS)


def _arguments(frame: types.FrameType) -> dict[str, Any]:
    """Return the arguments of a running function by name, except those that it was given by position beyond names."""
    names, _, keywords, values = inspect.getargvalues(frame)
    return {**{name: values[name] for name in names}, **(values[keywords] if keywords else {})}


def _loss_of(trainer: Any, base: nn.Module) -> Loss | None:
    """Return what a Trainer computes the loss with when it keeps the labels from the model; None where it does not."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    own, smoother = trainer.compute_loss_func, trainer.label_smoother
    if own is not None:
        return lambda outputs, labels: own(outputs, labels, num_items_in_batch=1)
    if smoother is None:
        return None
    shift = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return lambda outputs, labels: smoother(outputs, labels, shift_labels=shift)


def longest_of(trainer: Any) -> int:
    """Return the tokens of the longest sequence that a Trainer's data hold; 0 where that cannot be told at little cost.

    It is read from the sampler's lengths (`group_by_length`), a column of lengths, the column `input_ids`, or samples
    that lie in a list. Shorter padding or truncation by the collator does not show.
    """
    handler = getattr(trainer, "callback_handler", None)
    sampler = getattr(getattr(handler, "train_dataloader", None), "sampler", None)
    lengths = getattr(sampler, "lengths", None)
    return max(map(int, lengths or _lengths_in(trainer) or ()), default=0)


def _lengths_in(trainer: Any) -> Iterable[int]:
    """Return the lengths of the samples of a Trainer's training data; none where there may be too many to look at."""
    data: Any = getattr(trainer, "train_dataset", None)
    columns: Any = getattr(data, "column_names", None)
    named = getattr(trainer.args, "length_column_name", None) if trainer is not None else None
    if isinstance(columns, list) and named in columns:
        return list(data[named])
    if isinstance(columns, list) and "input_ids" in columns and len(data) <= _MOST_SAMPLES:
        return [len(ids) for ids in data["input_ids"]]
    if isinstance(data, list) and len(data) <= _MOST_SAMPLES:
        return [len(row["input_ids"]) for row in data if isinstance(row, Mapping) and "input_ids" in row]
    return ()


def _forward_of(base: nn.Module) -> types.MethodType | None:
    """Return the forward that was put on a model itself, as by TRL; accelerate's wrapper around a forward is left out.

    https://github.com/huggingface/accelerate/blob/main/src/accelerate/accelerator.py (`prepare_model`)
    """
    found = vars(base).get("_original_forward", vars(base).get("forward"))
    if not isinstance(found, types.MethodType) or found.__self__ is not base:
        return None
    return None if found.__func__ is type(base).forward else found


def float32_outputs(outputs: Any) -> Any:
    """Return a model's outputs as accelerate's mixed precision casts them."""
    from accelerate.utils.operations import convert_to_fp32

    return convert_to_fp32(outputs)


def rebound(forward: types.MethodType, other: nn.Module) -> types.MethodType:
    """Return a forward that was put on one model as a forward of `other`.

    Functions remember in their closures what they were made with: the model, its methods, and functions around these.
    """
    known: dict[int, Any] = {id(forward.__self__): other}
    return types.MethodType(_rebound(forward.__func__, known), other)


def _rebound(value: Any, known: dict[int, Any]) -> Any:
    """Return `value` with what `known` has (id of an object -> what stands in its place) in the closures below it."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in known:
        return types.MethodType(_rebound(value.__func__, known), known[id(value.__self__)])
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    cells = tuple(types.CellType() for _ in value.__closure__)
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__ = value.__kwdefaults__
    made.__dict__.update(value.__dict__)
    known[id(value)] = made
    for cell, old in zip(cells, value.__closure__, strict=True):
        try:
            cell.cell_contents = _rebound(old.cell_contents, known)
        except ValueError:  # an empty cell stays empty
            continue
    return made
