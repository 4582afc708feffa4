"""Names for kept tensors: the module or operation that produced them, such as `down_proj` or `gate_proj * up_proj`.

Names are looked up once in the graph of a block's forward, because later forwards keep the same tensors.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_ckpt import compat

PARAMETER = "torch::autograd::AccumulateGrad"
_SAME = re.compile(
    "(Unsafe)?View|ReshapeAlias|Transpose|Permute|Expand|Slice|Split|Chunk|Select|Squeeze|Unsqueeze|Clone|ToCopy|Alias|"
    "AsStrided|Unbind|Cat|Neg|T(?=Backward)|Index|Div|NativeDropout"
)
"""Prefixes of autograd nodes whose result has the name of their input."""
_WORDS = {"Mul": " * ", "Add": " + ", "Sub": " - "}
_WITHIN = {"base_layer", "default", "weight", "bias", "original_module", "modules_to_save"}
"""Parts that adapters and parameters add to the qualified name of a layer."""


class Names:
    """Names the tensors that one forward of a block keeps.

    Args:
        known: (autograd node, name) of each tensor that the previous forward kept, in order. It is updated.
        block: the block, or None.
        first: the first sequence number of the block's nodes.
    """

    def __init__(self, known: list[tuple[str, str]], block: nn.Module | None, first: int) -> None:
        self._known, self._first = known, first
        self._block = None if block is None else weakref.ref(block)
        self._place = 0
        self._layers: dict[int, str] | None = None
        self._weights: dict[int, int] | None = None if known else {}
        """Sequence number of a node -> id of a parameter that it saved. None if names are known."""

    def saved(self, parameter: nn.Parameter) -> None:
        """Note that the node being created saves a parameter: the graph does not show frozen ones."""
        if self._weights is not None:
            self._weights[compat.next_autograd_sequence_number() - 1] = id(parameter)

    def name_of(self, node: Any) -> str:
        """Return the name of a node's result."""
        place, known, kind = self._place, self._known, node.name()
        self._place += 1
        if place < len(known) and known[place][0] == kind:
            return known[place][1]
        if self._layers is None:
            self._layers = layer_names(None if self._block is None else self._block())
        name = name_of(node, self._layers, self._weights or {}, self._first)
        known[place:] = [(kind, name)]
        return name


def layer_names(block: nn.Module | None) -> dict[int, str]:
    """Return the id of each parameter of a block -> the name of its layer, such as `q_proj` or `q_proj.lora_A`."""
    found: dict[int, str] = {}
    for name, parameter in block.named_parameters() if block is not None else ():
        parts = [part for part in name.split(".") if part not in _WITHIN]
        adapter = len(parts) > 1 and parts[-1].startswith("lora_")
        found[id(parameter)] = ".".join(parts[-2:] if adapter else parts[-1:]) or name
    return found


def name_of(node: Any, layers: Mapping[int, str], weights: Mapping[int, int], first: int, depth: int = 2) -> str:
    """Return the name of an autograd node's result.

    Args:
        node: the node.
        layers: what `layer_names` returns.
        weights: sequence number of a node -> id of a parameter that it has saved.
        first: the first sequence number of the block's nodes.
        depth: how many levels of nested operations the name shows.
    """
    while True:
        if node._sequence_nr() < first:
            return "block input"
        kind = node.name()
        sources = [source for source, _ in node.next_functions if source is not None]
        own = not kind[-1].isdigit()  # a custom autograd function, which may do anything with the parameters
        layer = None if own else weights.get(node._sequence_nr()) or next(filter(None, map(_parameter, sources)), None)
        if layer is not None and layer in layers:
            return layers[layer]
        inner = [source for source in sources if source.name() != PARAMETER]
        if not inner or not (_SAME.match(kind) or (kind.startswith(("Mul", "Add")) and len(inner) == 1)):
            break
        node = inner[0]
    plain = re.sub(r"Backward\d*$", "", kind)
    word = plain if own else plain.lower()
    if "Attention" in plain:
        return "attention"
    if plain.endswith("Softmax"):
        return "softmax"
    if not depth or not inner:
        return "..." if plain in _WORDS else word
    parts = list(dict.fromkeys(name_of(source, layers, weights, first, depth - 1) for source in inner))
    if plain == "Bmm" and "softmax" in parts:  # times the values
        return "attention"
    adapted = [part.removesuffix(".lora_B") for part in parts if part.endswith(".lora_B")]
    if plain == "Add" and adapted and len(inner) == 2 and any(_is_linear(source) for source in inner):
        return adapted[0]  # a frozen layer, whose weight was cast or is quantised, and its adapter
    if plain in _WORDS:
        return _WORDS[plain].join(parts)
    return f"{word}({', '.join(parts)})"


def _is_linear(node: Any) -> bool:
    """Whether a node is a linear layer, or a view of its result."""
    while _SAME.match(node.name()) and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return bool(re.match("(Add)?mm|MatMul(4|8)bit", node.name(), re.IGNORECASE))


def _parameter(node: Any) -> int | None:
    """Return the id of the parameter of a node, seen through transposes and casts; None for other nodes."""
    while (
        node.name() in ("TBackward0", "ToCopyBackward0", "TransposeBackward0") and node.next_functions[0][0] is not None
    ):
        node = node.next_functions[0][0]
    return id(node.variable) if node.name() == PARAMETER else None
