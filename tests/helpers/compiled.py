"""The ways in which users compile models, and the bytes that a step keeps."""

import torch

from helpers.steps import step
from hf_ckpt.models.blocks import base_model, find_blocks


def each_block(model, **options):
    """Compile each block in place."""
    for block in find_blocks(model).modules.values():
        block.compile(**options)
    return model


def each_block_replaced(model, **options):
    """Replace each block by a compiled module."""
    for name, block in find_blocks(model).modules.items():
        parent, _, place = name.rpartition(".")
        setattr(base_model(model).get_submodule(parent), place, torch.compile(block, **options))
    return model


def each_forward(model, **options):
    """Compile the forward of each block."""
    for block in find_blocks(model).modules.values():
        block.forward = torch.compile(block.forward, **options)
    return model


def in_place(model, **options):
    """Compile the whole model in place."""
    model.compile(**options)
    return model


def kept(model, batch):
    """Run a step; returns its results and the bytes that autograd keeps for it, without parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = step(model, batch)
    return found, sum(seen.values())
