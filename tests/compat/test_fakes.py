"""hf_ckpt's own fake-tensor operations return what torch returns."""

from __future__ import annotations

import pytest
import torch

from hf_ckpt import compat
from hf_ckpt.compat import fakes

pytestmark = pytest.mark.compat
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(fakes, "_known", {})


@pytest.fixture
def mode():
    with compat.torch.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def traits(tensor):
    return type(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


def is_view(tensor, source):
    return tensor.untyped_storage()._cdata == source.untyped_storage()._cdata


VIEWS = {
    aten.as_strided.default: ([4, 4], [1, 4], 2),
    aten.detach.default: (),
    aten.expand.default: ([3, 2, 4, 8],),
    aten.permute.default: ([2, 0, 1],),
    aten.select.int: (1, 2),
    aten.slice.Tensor: (1, 1, 3),
    aten.squeeze.dim: (0,),
    aten.t.default: (),
    aten.transpose.int: (0, 2),
    aten.unsqueeze.default: (1,),
    aten.view.default: ([8, 8],),
    aten._unsafe_view.default: ([8, 8],),
}


@pytest.mark.parametrize("function", VIEWS, ids=str)
def test_views(mode, function):
    assert set(VIEWS) == fakes._VIEWS
    source = torch.empty(2, 4, 8, dtype=torch.bfloat16)
    source = source[0] if function is aten.t.default else source
    found = fakes.run_on_fakes(function, (source, *VIEWS[function]), {})
    assert traits(found) == traits(function(source, *VIEWS[function]))
    assert is_view(found, source)


CALLS = {
    "product": (aten.mm.default, lambda: (torch.empty(4, 8), torch.empty(8, 2))),
    "broadcast": (aten.mul.Tensor, lambda: (torch.empty(4, 1, 8), torch.empty(3, 8))),
    "another type": (aten.mul.Tensor, lambda: (torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(4, 8))),
    "number": (aten.add.Tensor, lambda: (torch.empty(4, 8), 2)),
    "transposed": (aten.neg.default, lambda: (torch.empty(4, 8).t(),)),
    "part": (aten.neg.default, lambda: (torch.empty(4, 8)[:, 2:5],)),
    "sum": (aten.sum.dim_IntList, lambda: (torch.empty(4, 8), [0], True)),
}


@pytest.mark.parametrize("name", CALLS)
def test_new_tensors_the_first_and_the_second_time(mode, name):
    function, arguments = CALLS[name]
    expected = traits(function(*arguments()))
    first = fakes.run_on_fakes(function, arguments(), {})
    assert len(fakes._known) == 1
    given = arguments()
    second = fakes.run_on_fakes(function, given, {})
    assert traits(first) == traits(second) == expected
    assert len({tensor.untyped_storage()._cdata for tensor in (first, second, given[0])}) == 3


def test_keywords_tell_calls_apart(mode):
    source = torch.empty(4, 8)
    for dtype in (torch.bfloat16, torch.float64) * 2:
        assert fakes.run_on_fakes(aten._to_copy.default, (source,), {"dtype": dtype}).dtype is dtype
    assert len(fakes._known) == 2


def test_numbers_of_different_types_are_different(mode):
    source = torch.empty(4, dtype=torch.int64)
    types = [fakes.run_on_fakes(aten.mul.Tensor, (source, number), {}).dtype for number in (1, 1.0, True)]
    assert types == [torch.int64, torch.float32, torch.int64]


LEFT = {
    aten.add_.Tensor: lambda: (torch.empty(4), 1),  # changes its argument
    aten.split.Tensor: lambda: (torch.empty(4), 2),  # returns several tensors
    aten.alias.default: lambda: (torch.empty(4),),  # returns its argument
    aten.view_as_real.default: lambda: (torch.empty(4, dtype=torch.complex64),),
    aten.neg.default: lambda: (torch.empty(0),),
}


@pytest.mark.parametrize("function", LEFT, ids=str)
def test_what_is_left_to_torch(mode, function):
    fakes.run_on_fakes(function, LEFT[function](), {})
    assert not fakes._known


def test_known_values_stay_known(mode):
    """Constants that torch keeps on fake tensors stay available to models."""
    constant = torch.tensor([3.0])
    assert constant.constant is not None
    found = fakes.run_on_fakes(aten.view.default, (constant, [1, 1]), {})
    assert found.constant is not None
    assert not fakes._known


def test_real_tensors_are_left_alone():
    result = fakes.run_on_fakes(aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {})
    assert torch.equal(result, torch.full((2, 2), 2.0))
    assert not fakes._known


def test_it_does_not_grow_for_ever(mode, monkeypatch):
    monkeypatch.setattr(fakes, "_MOST", 3)
    for size in range(1, 8):
        fakes.run_on_fakes(aten.neg.default, (torch.empty(size),), {})
        assert len(fakes._known) <= 3


def test_a_torch_without_the_private_name(mode, monkeypatch):
    monkeypatch.setattr(fakes, "_in_kernel", None)
    source = torch.empty(2, 4)
    assert is_view(fakes.run_on_fakes(aten.detach.default, (source,), {}), source)
    fakes.run_on_fakes(aten.neg.default, (source,), {})
    assert not fakes._known
