"""A small model to plant faults in, and checkpointing engines with the faults of published ones."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from torch.nn import functional

from hf_ckpt import compat

LAYERS = 3


class ExhibitBlock(compat.transformers.GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.work = work

    def forward(self, hidden_states, shift=None):
        return hidden_states + self.work(self, hidden_states, shift)


class ExhibitConfig(transformers.PretrainedConfig):
    model_type = "exhibit"


class ExhibitModel(transformers.PreTrainedModel):
    config_class = ExhibitConfig
    supports_gradient_checkpointing = True

    def __init__(self, config):
        super().__init__(config)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.layers = nn.ModuleList(ExhibitBlock() for _ in range(LAYERS))
        self.post_init()

    def _init_weights(self, module):
        """Linear layers initialise themselves."""

    def forward(self, hidden_states, shift):
        hidden_states = self.first(hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states, shift=shift)
        return self.last(hidden_states)


def work(block, hidden, shift):
    """What a block without a fault computes."""
    normed = block.norm(hidden)
    return block.two(functional.silu(block.one(normed if shift is None else normed + shift)))


def exhibit_model(at=1, fault=None):
    """A model of three blocks; the block at this place runs `fault` instead."""
    torch.manual_seed(0)
    model = ExhibitModel(ExhibitConfig()).train()
    if fault is not None:
        model.layers[at].work = fault
    return model


def exhibit_loss(model, number=0):
    generator = torch.Generator().manual_seed(number)
    hidden = torch.randn(2, 8, 16, generator=generator)
    return model(hidden, torch.linspace(-1, 1, 16)).float().square().mean()


# --- checkpointing functions --------------------------------------------------------------------------------------


def put_on(model, function):
    """Checkpoint all blocks with a function, the way transformers sets its own."""
    model._set_gradient_checkpointing(True, function)


class _OwnCheckpoint(torch.autograd.Function):
    """A hand-written checkpoint as found in many programs; its backward runs the function `again`."""

    @staticmethod
    def forward(ctx, run, again, parameters, times, *args):
        ctx.again, ctx.parameters, ctx.times, ctx.random = again, parameters, times, torch.get_rng_state()
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return run(*args)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.random)
            output = ctx.again(*inputs)
        found = torch.autograd.grad(output, inputs, gradient, retain_graph=True)
        if ctx.parameters:
            for _ in range(ctx.times):
                torch.autograd.backward(output, gradient, retain_graph=True)
        return None, None, None, None, *found


def own_checkpoint(again=lambda function: function, parameters=True, times=1):
    """A checkpointing function; `again` turns a block's forward into the function that backward runs.

    It adds the gradients of parameters `times` times, or leaves them out.
    """
    return lambda function, *args: _OwnCheckpoint.apply(function, again(function), parameters, times, *args)


def without_shift(function):
    """A block's forward without a keyword argument, which the engine failed to store."""
    keywords = {name: value for name, value in function.keywords.items() if name != "shift"}
    return lambda *args: function.func(*function.args, *args, **keywords)


def under(context):
    """Recompute under a context."""

    def again(function):
        def run(*args):
            with context():
                return function(*args)

        return run

    return again


# --- offloading ---------------------------------------------------------------------------------------------------


def is_activation(tensor):
    return tensor.grad_fn is not None and tensor.shape == (2, 8, 16)


def rounding(dtype):
    """A checkpointing function that recomputes nothing and stores activations in another dtype."""

    def store(tensor):
        return tensor.to(dtype) if is_activation(tensor) else tensor

    def function(run, *args):
        with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor.float()):
            return run(*args)

    return function
