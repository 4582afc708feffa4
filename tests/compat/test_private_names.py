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

TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in Path(hf_ckpt.__file__).parent.rglob("*.py")}
NAMES = sorted(
    {
        node.args[0].value
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "private" and isinstance(node.args[0], ast.Constant)
    }
)
# Attributes that are read from objects. Names of operations, and of autograd's saved values, are not listed.
OF_TORCH = {
    "Module": "_backward_hooks _backward_pre_hooks _buffers _compiled_call_impl _forward_hooks _forward_pre_hooks "
    "_modules _parameters",
    "Node": "_input_metadata _sequence_nr",
    "OpOverload": "_overloadpacket _schema",
    "Parameter": "_post_accumulate_grad_hooks",
    "Tensor": "_base _indices _make_wrapper_subclass _values _version",
    "UntypedStorage": "_cdata",
    "others": "_checkpoint_wrapped_module _fsdp_wrapped_module _handle _is_replica _local_tensor _orig_mod "
    "_torchdynamo_orig_callable",
}
OF_OTHERS = (
    "_active_collector _attn_implementation _attn_implementation_internal _can_checkpoint_with_cache _from_config "
    "_gradient_checkpointing_func _implementation_internal _keep_in_fp32_modules _output_capturing_hooks_installed "
    "_hf_hook _old_forward _original_forward _shared_state _active_adapter _cast_input_dtype _disable_adapters "
    "_trainer _getframe _asdict _inst _SubParsersAction "
    "_enable _disable _kwargs _hooks _hf_ckpt _hf_ckpt_gathered"
)
"""Private names of transformers, accelerate, PEFT, TRL and Python; and texts of hf_ckpt that look like some."""


def is_private(name):
    return name.isidentifier() and name.startswith("_") and not name.startswith("__")


def own():
    """Names that hf_ckpt defines: functions, classes, variables, and attributes of `self`."""
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_every_private_attribute_is_listed():
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    read = set(filter(is_private, read))
    operations = {name for name in read if hasattr(torch.ops.aten, name)}
    of_torch = set(" ".join(OF_TORCH.values()).split())
    dotted = {part for name in NAMES for part in name.split(".")}
    saved = {name for name in read if name.startswith(("_saved_", "_raw_saved_"))}
    assert read - of_torch - set(OF_OTHERS.split()) - saved - operations - dotted - set(own()) == set()
    assert of_torch - read == set(), "names that nobody reads"


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
