"""Blocks whose code hf_ckpt does not know, such as code from the hub, and their in-place changes."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from torch.nn import functional

from helpers.steps import outcome
from hf_ckpt import compat


class WorkingBlock(compat.transformers.GradientCheckpointingLayer):
    def __init__(self, work):
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)  # as with adapters
        self.work = work

    def forward(self, hidden_states):
        return self.work(self, hidden_states)


class UnknownConfig(transformers.PretrainedConfig):
    model_type = "from_the_hub"


class WorkingModel(transformers.PreTrainedModel):
    config_class = UnknownConfig
    supports_gradient_checkpointing = True

    def __init__(self, config, work):
        super().__init__(config)
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(WorkingBlock(work) for _ in range(3))
        self.post_init()

    def _init_weights(self, module):
        """Linear layers initialise themselves."""

    def forward(self, hidden_states):
        hidden_states = self.first(hidden_states).clone()  # the output of a linear layer is a view
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


def working(work, dtype=torch.float32):
    """A model of three blocks, each of which runs `work(block, hidden_states)`."""
    torch.manual_seed(0)
    return WorkingModel(UnknownConfig(), work).to(dtype).train()


def steps_of(model, steps=3):
    """Loss and gradients of some steps, each with its own seed."""
    found = []
    for number in range(steps):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(number)
        loss = model(torch.randn(2, 8, 16).to(model.first.weight.dtype)).float().square().mean()
        loss.backward()
        found.append(outcome(model, loss))
    return found


def rms(hidden):
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(hidden.dtype)


def adds_to_its_input(block, hidden):
    hidden += block.frozen(hidden)
    return block.one(functional.silu(hidden))


def scales_its_input(block, hidden):
    hidden *= 0.5
    return block.frozen(hidden).tanh() + block.one(hidden).clone()


def adds_a_norm_to_its_input(block, hidden):
    hidden += block.one(rms(hidden))  # in 16 bits nothing saves `hidden`
    return hidden


def adds_to_a_residual(block, hidden):
    middle = block.one(hidden)
    middle += block.two(rms(middle))
    return middle + hidden


def relu_in_place(block, hidden):
    return block.two(functional.relu(block.one(hidden), inplace=True))


def masks_scores(block, hidden):
    scores = block.one(hidden) @ block.two(hidden).transpose(-1, -2)
    scores.masked_fill_(torch.ones(8, 8, dtype=torch.bool).triu(1), -1e4)
    return scores.softmax(-1) @ hidden


def changes_an_operand(block, hidden):
    one, two = block.one(hidden), block.two(hidden)
    result = functional.silu(one + two)
    one.mul_(2.0)
    return hidden + result + one


def clamps_without_a_graph(block, hidden):
    result = functional.silu(block.one(hidden))
    with torch.no_grad():
        result.clamp_(-0.1, 0.05)
    return functional.silu(result * 2.0)


def writes_data(block, hidden):
    result = functional.silu(block.one(hidden))
    result.data.mul_(2.0)
    return functional.silu(result * 2.0)


def writes_data_of_a_norm(block, hidden):
    result = block.norm(hidden)
    result.data.mul_(2.0)
    return functional.silu(result * 1.5) + block.one(hidden)


def changes_a_norm(block, hidden):
    result = block.norm(hidden)
    with torch.no_grad():
        result.mul_(2.0)
    return functional.silu(result) * result + block.one(hidden)


def clamps_what_is_saved(block, hidden):
    result = functional.silu(block.one(hidden))
    with torch.no_grad():
        result.clamp_(-0.1, 0.5)
    return functional.silu(result) * result


def adds_its_norm(block, hidden):
    hidden.add_(block.norm(hidden.clone()))
    return functional.silu(hidden) * hidden


def adds_to_what_it_has_read(block, hidden):
    result = torch.tanh(hidden)
    hidden.add_(1.0)
    return result * 2.0 + block.one(hidden)


def drops_its_input(block, hidden):
    return block.one(functional.silu(functional.dropout(hidden, 0.5, True, True)))


def writes_to_parts(block, hidden):
    result = functional.silu(block.one(hidden)) * 2.0
    result[:, :4].mul_(3.0)
    result[:, 0] = 0.0
    return functional.silu(result) * result


def drops_in_place(block, hidden):
    return block.two(functional.dropout(functional.silu(block.one(hidden)), 0.3, True, True))


def adds_rows(block, hidden):
    out = torch.zeros_like(hidden)
    out.index_add_(0, torch.tensor([0, 1]), block.one(hidden))
    out[:, 0] = 0.0
    return functional.silu(out) * hidden
