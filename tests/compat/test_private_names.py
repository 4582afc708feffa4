"""Private names of torch: `private` looks them up, this torch has them, and a torch without one is told by name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_ckpt
from hf_ckpt.compat.private import private
from hf_ckpt.errors import HfCkptError

NAMES = sorted(
    {
        node.args[0].value
        for path in Path(hf_ckpt.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "private" and isinstance(node.args[0], ast.Constant)
    }
)
# Attributes that hf_ckpt reads from objects.
OF_TORCH = {
    "Module": "_backward_hooks _backward_pre_hooks _buffers _compiled_call_impl _forward_hooks _forward_pre_hooks "
    "_modules _parameters",
    "Node": "_input_metadata _sequence_nr",
    "OpOverload": "_overloadpacket _schema",
    "Parameter": "_post_accumulate_grad_hooks",
    "Tensor": "_base _indices _make_wrapper_subclass _values _version",
    "UntypedStorage": "_cdata",
}


@pytest.mark.compat
@pytest.mark.parametrize("name", NAMES)
def test_this_torch_has_it(name):
    assert private(name) is not None


@pytest.mark.compat
def test_tensors_modules_and_nodes_have_their_attributes():
    tensor = torch.ones(2, requires_grad=True)
    things = {
        "Tensor": tensor,
        "UntypedStorage": tensor.untyped_storage(),
        "Parameter": nn.Parameter(torch.ones(1)),
        "Node": (tensor * tensor).grad_fn,
        "OpOverload": torch.ops.aten.mul.Tensor,
        "Module": nn.Linear(1, 1),
    }
    for kind, thing in things.items():
        assert set(OF_TORCH[kind].split()) <= set(dir(thing))


def test_a_torch_without_a_name_is_told(monkeypatch):
    monkeypatch.delattr(torch.autograd, "_get_sequence_nr")
    with pytest.raises(HfCkptError, match=r"has no torch.autograd._get_sequence_nr, which hf_ckpt needs"):
        private("torch.autograd._get_sequence_nr")
