"""Feed-forwards that are split into tiles by plain code."""

import functools

import torch

from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.parts import feed_forwards


def split_by_hand(model, tokens):
    """Split the input of each feed-forward of the model, and leave the rest to autograd, which keeps everything."""

    def split(plain, hidden):
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        return torch.cat([plain(tile) for tile in rows.split(tokens, dim=1)], dim=1).view(hidden.shape)

    for block in find_blocks(model).modules.values():
        for name in feed_forwards(block):
            module = block.get_submodule(name)
            vars(module)["forward"] = functools.partial(split, functools.partial(type(module).forward, module))
    return model
