"""Fake tensors: operations return what torch returns, and products that torch does not know have their shapes."""

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from hf_ckpt import compat
from hf_ckpt.compat.fakes import run_on_fakes

pytestmark = pytest.mark.compat
aten = torch.ops.aten
OPERATIONS = {
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
    aten.copy_.default: (0,),
    aten.resize_.default: ([2, 2],),
    aten.transpose_.default: (0, 1),
}


@pytest.fixture
def mode():
    with compat.torch.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@pytest.mark.parametrize("function", OPERATIONS, ids=str)
def test_operations_return_what_torch_returns(mode, function):
    """Also when they run again, on tensors of the same shapes."""

    def run(operation):
        source = torch.empty(2, 4, 8, dtype=torch.bfloat16)
        result = operation(source, *OPERATIONS[function])
        return [(tensor is source, *traits(tensor, source)) for tensor in pytree.tree_leaves(result)]

    def traits(tensor, source):
        shares = tensor.untyped_storage()._cdata == source.untyped_storage()._cdata
        shape = tensor.shape, tensor.stride(), tensor.storage_offset()
        return shares, type(tensor), shape, tensor.dtype, tensor.device, vars(tensor).keys()

    for _ in range(2):
        assert run(lambda *args: run_on_fakes(function, args, {})[0]) == run(function)


def test_what_has_values_is_left_to_torch(mode):
    """Constants that torch keeps on fake tensors stay available to models, and real tensors are computed."""
    constant = torch.tensor([3.0])
    assert constant.constant is not None
    assert run_on_fakes(aten.view.default, (constant, [1, 1]), {})[0].constant is not None
    with _disable_current_modes():
        assert run_on_fakes(aten.view.default, (torch.ones(4), [2, 2]), {})[0].tolist() == [[1, 1], [1, 1]]


def test_grouped_products_of_float32(mode):
    offsets = torch.empty(3, dtype=torch.int32)
    for a, b, shape in (
        ((6, 4), (3, 4, 2), (6, 2)),
        ((4, 6), (6, 2), (3, 4, 2)),
        ((3, 5, 4), (4, 2), (5, 2)),
        ((3, 5, 4), (3, 4, 2), (3, 5, 2)),
    ):
        got, _ = run_on_fakes(aten._grouped_mm.default, (torch.empty(a), torch.empty(b), offsets), {})
        assert got.shape == shape


def test_what_is_known_tells_a_tensor_given_twice_from_two_of_one_shape(mode):
    one, other = torch.empty(4), torch.empty(4)
    known = [run_on_fakes(aten.mul.Tensor, pair, {})[1] for pair in ((one, one), (one, other), (other, other))]
    assert known[0] is known[2]
    assert known[0] is not known[1]
