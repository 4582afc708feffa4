"""Small models whose code hf_ckpt does not know, such as code from the hub: each block runs a function of the test."""

import threading

import torch
import transformers
from torch import nn
from torch.nn import functional

import hf_ckpt
from helpers.steps import assert_same, outcome, planned
from hf_ckpt import compat
from hf_ckpt.engines.state import ForwardState

LAYERS = 3


def work(block, hidden, shift):
    """What a block computes if the test says nothing else."""
    normed = block.norm(hidden)
    return hidden + block.two(functional.silu(block.one(normed if shift is None else normed + shift)))


class CustomBlock(compat.transformers.GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)  # as with adapters
        self.work = work

    def forward(self, hidden_states, shift=None):
        return self.work(self, hidden_states, shift)


class CustomConfig(transformers.PretrainedConfig):
    model_type = "custom"


class CustomModel(transformers.PreTrainedModel):
    config_class = CustomConfig
    supports_gradient_checkpointing = True

    def __init__(self, config):
        super().__init__(config)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.layers = nn.ModuleList(CustomBlock() for _ in range(LAYERS))
        self.post_init()

    def _init_weights(self, module):
        """Linear layers initialise themselves."""

    def forward(self, hidden_states, shift):
        hidden_states = self.first(hidden_states).clone()  # the output of a linear layer is a view
        for layer in self.layers:
            hidden_states = layer(hidden_states, shift=shift)
        return self.last(hidden_states)


def custom_model(run=work, at=None, dtype=torch.float32):
    """A model of three blocks, in which all blocks, or only the one `at` a place, run `run(block, hidden, shift)`."""
    torch.manual_seed(0)
    model = CustomModel(CustomConfig()).to(dtype).train()
    for layer in model.layers if at is None else (model.layers[at],):
        layer.work = run
    return model


def moving_average(block, hidden, shift):
    """Replaces a buffer of the block in each forward, and computes with it."""
    block.average = 0.5 * block.average + hidden.detach().mean()
    return work(block, hidden, shift) * (1 + block.average)


def model_of_averages():
    """A model whose blocks replace a buffer."""
    model = custom_model(moving_average)
    for layer in model.layers:
        layer.register_buffer("average", torch.ones(()))
    return model


def custom_loss(model, number=0):
    """The loss of step `number`."""
    dtype = model.first.weight.dtype
    hidden = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(number)).to(dtype)
    return model(hidden, torch.linspace(-1, 1, 16, dtype=dtype)).float().square().mean()


def steps_of(model, steps=3):
    """Loss and gradients of some steps, each with its own seed."""
    found = []
    for number in range(steps):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(number)
        loss = custom_loss(model, number)
        loss.backward()
        found.append(outcome(model, loss))
    return found


def in_threads(*works):
    """Call functions at the same time, each in a thread of its own."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def without_forward_state(region, fn, inputs=None):
    """Replaces `FullRegion.state_for`: a recomputation draws the same numbers, and no other state is restored."""
    return ForwardState(region.block, None, keeps_draws=True)


def same_under(spec, run, make=custom_model, *, times=1):
    """Check that `run(model)` gives the same on a plain model and under a plan, and that every block was recomputed.

    `run` returns a step's outcome or a list of them, and perhaps, as a second value, what else must be equal. Returns
    the model with the plan.
    """
    plain, ours = make(), planned(make(), spec)
    for expected, got in zip(_results(run(plain)), _results(run(ours)), strict=True):
        if isinstance(expected, dict):
            assert_same(expected, got)
        else:
            assert expected == got
    assert min(hf_ckpt.describe(ours).recomputed.values()) >= times
    return ours


def _results(returned):
    """The outcomes, and what else `run` returned."""
    outcomes, *others = returned if isinstance(returned, tuple) else (returned,)
    return [*(outcomes if isinstance(outcomes, list) else [outcomes]), *others]
