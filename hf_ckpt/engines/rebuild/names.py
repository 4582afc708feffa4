"""Names for kept tensors: the layer or operation that produced them, such as `down_proj`, `add` or `attention`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

_SAME = re.compile(
    "(Unsafe)?View|ReshapeAlias|Transpose|Permute|Expand|Slice|Split|Chunk|Select|Squeeze|Unsqueeze|Clone|ToCopy|Alias|"
    "AsStrided|Unbind|Cat|Neg|T(?=Backward)|Index|Div|NativeDropout"
)
"""Prefixes of autograd nodes whose result has the name of their input."""
_WITHIN = {"base_layer", "default", "weight", "bias", "original_module", "modules_to_save"}
"""Parts that adapters and parameters add to the qualified name of a layer."""


def layer_names(block: nn.Module) -> dict[int, str]:
    """Return the id of each parameter of a block -> the name of its layer, such as `q_proj` or `q_proj.lora_A`."""
    found: dict[int, str] = {}
    for name, parameter in block.named_parameters():
        parts = [part for part in name.split(".") if part not in _WITHIN]
        adapter = len(parts) > 1 and parts[-1].startswith("lora_")
        found[id(parameter)] = ".".join(parts[-2:] if adapter else parts[-1:]) or name
    return found


def name_of(node: Any, layers: Mapping[int, str], weights: Mapping[int, int], first: int) -> str:
    """Return the name of an autograd node's result.

    Args:
        node: the node.
        layers: what `layer_names` returns.
        weights: sequence number of a node -> id of a parameter that it has saved: the graph does not show frozen ones.
        first: the first sequence number of the block's nodes.
    """
    while node._sequence_nr() >= first:
        kind = node.name()
        sources = [source for source, _ in node.next_functions if source is not None]
        if not kind[-1].isdigit():  # a custom autograd function, which may do anything with the parameters
            return re.sub(r"Backward$", "", kind)
        leaves = [weights.get(node._sequence_nr(), 0), *map(_parameter, sources)]
        layer = next((layers[leaf] for leaf in leaves if leaf in layers), None)
        if layer is not None:
            return layer
        if not sources or not (_SAME.match(kind) or (kind.startswith(("Mul", "Add")) and len(sources) == 1)):
            word = re.sub(r"Backward\d*$", "", kind).lower()
            return "attention" if "attention" in word or word == "bmm" else word
        node = sources[0]
    return "block input"


def _parameter(node: Any) -> int:
    """Return the id of the parameter of a node, seen through transposes and casts; 0 for other nodes."""
    while node is not None and node.name() in ("TBackward0", "ToCopyBackward0", "TransposeBackward0"):
        node = node.next_functions[0][0]
    return id(node.variable) if node is not None and hasattr(node, "variable") else 0
