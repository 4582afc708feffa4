"""Fake tensors: operations return what torch returns, and products that torch does not know have their shapes."""

from __future__ import annotations

import pytest
import torch

from hf_ckpt import compat
from hf_ckpt.compat.fakes import run_on_fakes

pytestmark = pytest.mark.compat
aten = torch.ops.aten
VIEWS = {
    aten.as_strided.default: ([4, 4], [1, 4], 2),
    aten.detach.default: (),
    aten.expand.default: ([3, 2, 4, 8],),
    aten.permute.default: ([2, 0, 1],),
    aten.select.int: (1, 2),
    aten.slice.Tensor: (1, 1, 3),
    aten.squeeze.dim: (0,),
    aten.transpose.int: (0, 2),
    aten.unsqueeze.default: (1,),
    aten.view.default: ([8, 8],),
    aten._unsafe_view.default: ([8, 8],),
    aten.neg.default: (),
    aten.split.Tensor: (1,),
    aten.add_.Tensor: (1,),
}


@pytest.fixture
def mode():
    with compat.torch.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def traits(result):
    found = []
    for tensor in (result,) if isinstance(result, torch.Tensor) else result:
        storage = tensor.untyped_storage()._cdata
        kind = type(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
        found.append((*kind, storage))
    return found


@pytest.mark.parametrize("function", VIEWS, ids=str)
def test_operations_return_what_torch_returns(mode, function):
    source = torch.empty(2, 4, 8, dtype=torch.bfloat16)
    ours = traits(run_on_fakes(function, (source, *VIEWS[function]), {}))
    torchs = traits(function(source, *VIEWS[function]))
    new = function is aten.neg.default  # a result of its own
    assert [found[: 6 + (not new)] for found in ours] == [found[: 6 + (not new)] for found in torchs]


def test_known_values_stay_known(mode):
    """Constants that torch keeps on fake tensors stay available to models."""
    constant = torch.tensor([3.0])
    assert constant.constant is not None
    assert run_on_fakes(aten.view.default, (constant, [1, 1]), {}).constant is not None


@pytest.mark.parametrize(
    ("a", "b", "shape"),
    [
        ((6, 4), (3, 4, 2), (6, 2)),
        ((4, 6), (6, 2), (3, 4, 2)),
        ((3, 5, 4), (4, 2), (5, 2)),
        ((3, 5, 4), (3, 4, 2), (3, 5, 2)),
    ],
)
def test_grouped_products_of_float32(mode, a, b, shape):
    offsets = torch.empty(3, dtype=torch.int32)
    function = aten._grouped_mm.default
    assert run_on_fakes(function, (torch.empty(a), torch.empty(b), offsets), {}).shape == shape


def test_real_tensors_are_left_alone():
    result = run_on_fakes(aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {})
    assert torch.equal(result, torch.full((2, 2), 2.0))
