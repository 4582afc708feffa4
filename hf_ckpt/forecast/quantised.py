"""4-bit and 8-bit linear layers without values: they allocate, save and free the same bytes as bitsandbytes' layers.

bitsandbytes (0.44 to 0.50) stores a weight of n elements as

* 4 bits (`Linear4bit`): n / 2 bytes, and a scale for every 64 elements: 4 bytes, or with double quantisation 1 byte
  and 4 bytes for every 256 scales (QLoRA, https://arxiv.org/abs/2305.14314, section 3);
* 8 bits (`Linear8bitLt`): n bytes, and a scale of 4 bytes for every row.

In 4 bits, both the forward and the backward dequantise the whole weight to the compute type, multiply by it and free it
(`bitsandbytes/autograd/_functions.py`; inputs of only a few rows skip this). In 8 bits, only the backward does:
the forward allocates 8-bit inputs and 32-bit products (on a CPU it dequantises the weight, too). Neither saves the
dequantised weight, but 8-bit layers hold their inputs, even if their block is recomputed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_ckpt import compat

_ELEMENTS_A_SCALE, _SCALES_A_SCALE = 64, 256
_TABLES = 4 * (16 + 256 + 1)
"""Further bytes under double quantisation: the tables of 4-bit and 8-bit values, and an offset."""


class QuantisedLinear(nn.Linear):
    """A linear layer whose frozen weight has 4 or 8 bits per element, with tensors of the right sizes and no values.

    Args:
        source: the layer that it replaces: linear, or a `Conv1D` of transformers.
        bits: 4 or 8.
        compute: the type that its products are computed in.
        double: whether 4-bit layers quantise their scales, too.
        on_cpu: whether it runs on a CPU, where bitsandbytes computes 8-bit products differently.
    """

    def __init__(self, source: nn.Module, bits: int, compute: torch.dtype, *, double: bool, on_cpu: bool) -> None:
        nn.Module.__init__(self)
        self.on_cpu = on_cpu
        weight: Any = source.weight
        rows, columns = weight.shape if isinstance(source, nn.Linear) else weight.shape[::-1]
        self.out_features, self.in_features = rows, columns
        self.bits, self.compute = bits, compute
        held = (-(-rows * columns // 2), 1) if bits == 4 else (rows, columns)
        small = torch.uint8 if bits == 4 else torch.int8
        self.weight = nn.Parameter(torch.empty(held, dtype=small, device=weight.device), requires_grad=False)
        bias: Any = source.bias
        self.bias: Any = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        size = scale_bytes(rows, columns, bits, double=double)
        scales = torch.empty(size, dtype=torch.uint8, device=weight.device)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product with the weight, in the type of `input`, of shape [..., in_features]."""
        given = input.dtype
        if self.bits == 4:
            made: torch.Tensor = _Product4.apply(input.to(self.compute), self)  # type: ignore[no-untyped-call]
        else:
            made = (_Product8OnCpu if self.on_cpu else _Product8).apply(input, self)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            made = made + self.bias.to(made.dtype)
        return made.to(given) if self.bits == 4 else made

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantised weight, of shape [out_features, in_features]. A single operation, because dequantising reads
        the small weight and writes the large one."""
        return self.weight.new_empty((self.out_features, self.in_features), dtype=dtype)


class _Product4(torch.autograd.Function):
    """Like `MatMul4Bit` of bitsandbytes."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, layer: QuantisedLinear) -> torch.Tensor:
        ctx.layer = layer
        return given @ layer.unpacked(given.dtype).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.layer.unpacked(gradient.dtype), None


class _Product8(torch.autograd.Function):
    """Like `MatMul8bitLt` of bitsandbytes, whose context holds the inputs."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, layer: QuantisedLinear) -> torch.Tensor:
        ctx.layer, ctx.given = layer, given
        small = given.new_empty((given.numel() // layer.in_features, layer.in_features), dtype=torch.int8)
        product = torch._int_mm(small, layer.weight.t())
        return product.new_empty((*given.shape[:-1], layer.out_features), dtype=given.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        dtype = ctx.given.dtype
        return gradient.to(dtype) @ ctx.layer.unpacked(dtype), None


class _Product8OnCpu(_Product8):
    """Like `MatMul8bitFp` of bitsandbytes, which multiplies by the weight in the type of the inputs, or of autocast."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, layer: QuantisedLinear) -> torch.Tensor:
        ctx.layer, ctx.given = layer, given
        return nn.functional.linear(given, layer.unpacked(given.dtype))


def scale_bytes(rows: int, columns: int, bits: int, *, double: bool) -> int:
    """Bytes of a quantised weight of shape [rows, columns] in addition to its elements."""
    if bits == 8:
        return 4 * rows
    scales = -(-rows * columns // _ELEMENTS_A_SCALE)
    return _TABLES + scales + 4 * -(-scales // _SCALES_A_SCALE) if double else 4 * 16 + 4 * scales


def quantise(model: nn.Module, bits: int, compute: torch.dtype, *, double: bool, on_cpu: bool) -> None:
    """Replace the layers that transformers replaces for a `BitsAndBytesConfig`, and freeze all parameters.

    Embeddings, heads, modules that a model keeps in float32, and experts with stacked weights instead of linear layers
    are not replaced.

    Args:
        model: a PreTrainedModel.
        bits: 4 or 8.
        compute: the type of products.
        double: whether 4-bit layers quantise their scales, too.
        on_cpu: whether it will run on a CPU.
    """
    for name in compat.quantised_layers(model):
        layer = QuantisedLinear(model.get_submodule(name), bits, compute, double=double, on_cpu=on_cpu)
        model.set_submodule(name, layer)
    model.requires_grad_(False)
    vars(model)["is_loaded_in_4bit" if bits == 4 else "is_loaded_in_8bit"] = True


def prepare_for_kbit_training(model: nn.Module) -> None:
    """Cast 16-bit parameters to float32, as PEFT's `prepare_model_for_kbit_training`: norms, embeddings, the head."""
    for parameter in model.parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.to(torch.float32)
