"""4-bit and 8-bit linear layers without values: they allocate, save and free the same bytes as those of bitsandbytes.

`Linear4bit` (bitsandbytes 0.44 to 0.50) stores a weight of n elements as n / 2 bytes, and a scale for every 64
elements: 4 bytes, or with double quantisation 1 byte and 4 bytes for every 256 scales (QLoRA,
https://arxiv.org/abs/2305.14314, section 3). Forward and backward dequantise the whole weight to the compute type,
multiply by it and free it (`bitsandbytes/autograd/_functions.py`; inputs of only a few rows skip this). Neither saves
the dequantised weight.

`Linear8bitLt` stores a byte an element, and a float32 scale a row (LLM.int8(), https://arxiv.org/abs/2208.07339). It
keeps its input for backward in an attribute of the autograd node, whether that needs it or not: no hook on saved
tensors sees it, and it lives as long as the graph. A CPU dequantises the whole weight in the forward, too; accelerators
cast the input to float16 and to bytes, and the product from 32-bit integers. Outlier columns, whose number depends on
values, are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_ckpt import compat

_TABLES = 4 * (16 + 256 + 1)
"""Further bytes under double quantisation: the tables of 4-bit and 8-bit values, and an offset."""


class _FrozenLinear(nn.Linear):
    """A linear layer without values, whose frozen weight has fewer bits.

    Args:
        source: the layer that it replaces: linear, or a `Conv1D` of transformers.
    """

    def __init__(self, source: nn.Module) -> None:
        nn.Module.__init__(self)
        weight: Any = source.weight
        shape = weight.shape if isinstance(source, nn.Linear) else weight.shape[::-1]
        self.out_features, self.in_features = shape
        self.bias: Any = source.bias

    def _allocate(self, like: Any, shape: tuple[int, ...], dtype: torch.dtype, scale_bytes: int) -> None:
        """Allocate the weight and its scales, on the device of another tensor."""
        weight = torch.empty(shape, dtype=dtype, device=like.device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        # In bitsandbytes, scales hang on the weight. Here they are a parameter, so that they count among the weights'
        # bytes like all others; of bytes, because PEFT's preparation casts floating types.
        scales = torch.empty(scale_bytes, dtype=torch.uint8, device=like.device)
        self.scales = nn.Parameter(scales, requires_grad=False)


class QuantisedLinear(_FrozenLinear):
    """A linear layer whose frozen weight has 4 bits per element, with tensors of the right sizes and no values.

    Args:
        source: the layer that it replaces.
        compute: the type that its products are computed in.
        double: whether scales are quantised, too.
    """

    def __init__(self, source: nn.Module, compute: torch.dtype, *, double: bool) -> None:
        super().__init__(source)
        self.compute = compute
        elements = self.out_features * self.in_features
        scales = -(-elements // 64)
        size = _TABLES + scales + 4 * -(-scales // 256) if double else 4 * 16 + 4 * scales
        self._allocate(source.weight, (-(-elements // 2), 1), torch.uint8, size)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product with the weight, in the type of `input`, of shape [..., in_features]."""
        product: torch.Tensor = _FourBitProduct.apply(input.to(self.compute), self)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            product = product + self.bias.to(product.dtype)
        return product.to(input.dtype)

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantised weight, of shape [out_features, in_features]. A single operation, because dequantising reads
        the small weight and writes the large one."""
        return self.weight.new_empty((self.out_features, self.in_features), dtype=dtype)


class _FourBitProduct(torch.autograd.Function):
    """Like `MatMul4Bit` of bitsandbytes."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: QuantisedLinear) -> torch.Tensor:
        ctx.layer = layer  # not the unpacked weight: it would be kept until backward, in 16 bits
        return hidden @ layer.unpacked(hidden.dtype).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.layer.unpacked(gradient.dtype), None


class EightBitLinear(_FrozenLinear):
    """A linear layer whose frozen weight has 8 bits per element, with tensors of the right sizes and no values.

    Args:
        source: the layer that it replaces.
    """

    on_accelerator = True
    """Whether it runs as on an accelerator."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__(source)
        self._allocate(source.weight, (self.out_features, self.in_features), torch.int8, 4 * self.out_features)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product with the weight, in the type of `input`, of shape [..., in_features]."""
        product: torch.Tensor = _EightBitProduct.apply(input, self.bias, self)  # type: ignore[no-untyped-call]
        return product

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantised weight, of shape [out_features, in_features]."""
        return self.weight.to(dtype).mul_(2.0)


class _EightBitProduct(torch.autograd.Function):
    """Like `MatMul8bitLt` of bitsandbytes, or `MatMul8bitFp` on a CPU."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, bias: torch.Tensor | None, layer: EightBitLinear) -> torch.Tensor:
        ctx.layer = layer
        ctx.hidden = hidden  # as bitsandbytes does, although a frozen weight does not need it
        if not layer.on_accelerator:
            return functional.linear(hidden, layer.unpacked(hidden.dtype), bias)
        codes = hidden.reshape(-1, layer.in_features).to(torch.float16).to(torch.int8)
        summed = torch._int_mm(codes, layer.weight.t())
        product = summed.to(torch.float16).to(hidden.dtype)
        return product.view(*hidden.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.layer.unpacked(gradient.dtype), None, None


def quantise(model: nn.Module, compute: torch.dtype, *, bits: int, double: bool) -> None:
    """Replace the layers that transformers replaces for a `BitsAndBytesConfig`, and freeze all parameters.

    Embeddings, heads, modules that a model keeps in float32, and experts with stacked weights instead of linear layers
    are not replaced. `compute` is the type of products in 4 bits; with `double`, their scales are quantised, too.
    """
    for name in compat.transformers.quantised_layers(model):
        source = model.get_submodule(name)
        four = bits == 4
        model.set_submodule(name, QuantisedLinear(source, compute, double=double) if four else EightBitLinear(source))
    model.requires_grad_(False)
    vars(model)[f"is_loaded_in_{bits}bit"] = True  # as transformers marks a quantised model
