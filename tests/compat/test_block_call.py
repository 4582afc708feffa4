"""What engines get from a block: hidden states first, and no cache."""

import functools

import pytest
import torch
from transformers import DynamicCache

from hf_ckpt import compat

pytestmark = pytest.mark.compat
HIDDEN = torch.ones(1, 2, 4)


class Block(compat.transformers.GradientCheckpointingLayer):
    def forward(self, hidden_states, cache=None, number=0):
        return hidden_states * (1 if cache is None else 2) + number


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["forward", "call with hooks"])
def test_a_cache_is_left_out_wherever_it_is(reads, whole):
    """By position, as in GPT-2, and by keyword; a block that only reads its cache keeps it."""
    block = Block()
    cache = DynamicCache()
    block._can_checkpoint_with_cache = reads
    forward = (block.__call__,) if whole else (Block.forward, block)
    for function, args in (
        (functools.partial(*forward), (HIDDEN, cache, 3)),
        (functools.partial(*forward, cache=cache, number=3), (HIDDEN,)),
        (functools.partial(*forward, hidden_states=HIDDEN, cache=cache, number=3), ()),
    ):
        function, args = compat.transformers.block_call(function, args)
        assert args[0] is HIDDEN
        assert compat.transformers.module_of(function) is block
        assert torch.equal(function(*args), HIDDEN * (2 if reads else 1) + 3)
