"""Private names of torch: each used name is listed and exists in this torch, and some are optional."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.compat import private as names
from hf_ckpt.errors import HfCkptError

TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in Path(hf_ckpt.__file__).parent.rglob("*.py")}
# Private names of other libraries, and operations with such names.
NOT_OF_TORCH = {
    "transformers": {
        "_attn_implementation",
        "_keep_in_fp32_modules",
        "_attn_implementation_internal",
        "_implementation_internal",
        "_from_config",
        "_can_checkpoint_with_cache",
        "_output_capturing_hooks_installed",
    },
    "accelerate": {"_hf_hook", "_old_forward", "_original_forward", "_shared_state"},
    "sys": {"_getframe"},
    "typing": {"_asdict"},
    "argparse": {"_SubParsersAction"},
    "hf_ckpt": {
        "_hf_ckpt",
        "_hf_ckpt_gathered",
        "_active_collector",
        "_gradient_checkpointing_func",
        "_enable",
        "_disable",
        "_kwargs",
        "_hooks",
    },
    "peft": {"_active_adapter", "_cast_input_dtype", "_disable_adapters"},
    "random": {"_inst"},
    "trl": {"_trainer"},
    "operations": {
        "_int_mm",
        "_to_copy",
        "_unsafe_view",
        "_local_scalar_dense",
        "_safe_softmax",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    },
}


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


def used(tree):
    """Private names that a file reads as attributes, has in strings (for getattr), or imports from other packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            yield node.value
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("hf_ckpt"):
            for alias in node.names:
                yield from filter(is_private, f"{node.module}.{alias.name}".split("."))


def test_every_private_name_of_torch_is_listed():
    """Every private name in use is listed; names below `torch` are looked up only in `compat`."""
    others = set(own()).union(*NOT_OF_TORCH.values())
    dotted = {part for name in names.PRIVATE for part in name.split(".") if is_private(part)}
    attributes = set(itertools.chain(*names.ATTRIBUTES.values()))
    found: set[str] = set()
    for path, tree in TREES.items():
        found |= set(used(tree))
        read = {name for name in used(tree) if name not in others and not name.startswith(("_saved_", "_raw_saved_"))}
        assert read <= attributes | (dotted if path.parent.name == "compat" else set()), path
    assert attributes - {"_saved_*", "_raw_saved_*"} <= found, "names that nobody uses"
    looked_up = {
        node.args[0].value
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "private" and isinstance(node.args[0], ast.Constant)
    }
    imported = {"torch.utils._pytree", "torch.utils._python_dispatch", "torch._subclasses.fake_tensor"}
    assert looked_up | imported == set(names.PRIVATE)


@pytest.mark.compat
@pytest.mark.parametrize("name", names.PRIVATE)
def test_this_torch_has_it(name):
    assert names.private(name) is not None or names.PRIVATE[name]


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
    listed = [(kind, name) for kind in things for name in names.ATTRIBUTES[kind]]
    assert len(listed) > 15
    for kind, name in listed:
        assert any(found.startswith(name.rstrip("*")) for found in dir(things[kind])), f"{kind}.{name}"


def test_what_is_needed_is_an_error_that_names_torch(monkeypatch):
    monkeypatch.delattr(torch.autograd, "_get_sequence_nr")
    with pytest.raises(HfCkptError, match=r"has no torch.autograd._get_sequence_nr, which hf_ckpt needs"):
        names.private("torch.autograd._get_sequence_nr")
    with pytest.raises(KeyError):
        names.private("torch._not_listed")


def test_what_can_be_missing(monkeypatch):
    assert [name for name, without in names.PRIVATE.items() if without] == ["torch._C._accelerator_emptyHostCache"]
    monkeypatch.delattr(torch._C, "_accelerator_emptyHostCache", raising=False)
    compat.devices.empty_host_cache()
