"""Values that blocks pass to each other and to the user: position biases, hidden states, attentions, encoder states."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from helpers.steps import assert_same, enable, outcome, recomputed, step, without_cache

import hf_ckpt
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model


def test_only_t5_blocks_are_driven():
    """Only T5's blocks are checkpointed, although attention modules inside them carry the flag, too."""
    model = tiny_model("t5")
    carriers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    assert len(carriers) > 8  # there are modules to leave alone
    hf_ckpt.install(model)
    enable(model)
    assert {type(module).__name__ for module in carriers if module.gradient_checkpointing} == {"T5Block"}


@pytest.mark.parametrize(
    "layers", [{"decoder": "0-3"}, {"decoder": "1-3"}, {"encoder": "1-3"}, {"encoder": "0"}], ids=str
)
def test_the_shared_position_bias_crosses_the_plan(layers):
    """Block 0 returns the position bias and others add it: its gradient passes through planned and kept blocks."""
    model = tiny_model("t5", dropout=0.1)
    expected = step(model, tiny_batch("t5"))
    assert all(gradient.any() for name, gradient in expected.items() if "relative_attention_bias" in name)
    assert all(gradient.any() for name, gradient in expected.items() if name.startswith("encoder.block"))
    hf_ckpt.install(model, {"layers": layers})
    enable(model)
    assert_same(expected, step(model, tiny_batch("t5")))
    (stack,) = layers
    assert len(recomputed(model)) > 0
    assert all(name.startswith(stack) for name in recomputed(model))


def same_outputs(model, run):
    """Check that `run` gives the same gradients and tensors after installing; returns those from before."""
    expected, tensors = run()
    hf_ckpt.install(model)
    enable(model)
    got, got_tensors = run()
    assert_same(expected, got)
    assert all(torch.equal(one, other) for one, other in zip(tensors, got_tensors, strict=True))
    assert set(hf_ckpt.describe(model).recomputed.values()) == {1}
    return expected, tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_in_the_loss(family):
    """Hidden states in the loss keep their order, values and gradients."""
    model = tiny_model(family, dropout=0.1)
    plain = step(model, tiny_batch(family))

    def run():
        model.zero_grad()
        torch.manual_seed(7)
        out = model(**without_cache(model, tiny_batch(family)), output_hidden_states=True)
        names = ("encoder_hidden_states", "decoder_hidden_states") if family == "t5" else ("hidden_states",)
        states = [state for name in names for state in out[name]]
        loss = out.loss + states[2].square().mean() + states[-2].sin().mean()
        loss.backward()
        return outcome(model, loss), [state.detach() for state in states]

    expected, states = same_outputs(model, run)
    assert len(states) == (10 if family == "t5" else 5)
    with pytest.raises(AssertionError, match="differs"):  # hidden states affect the loss
        assert_same(expected, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_attentions_in_the_loss(family):
    """Attention weights from inside a block can be part of the loss."""
    model = tiny_model(family, attention="eager")

    def run():
        model.zero_grad()
        out = model(**without_cache(model, tiny_batch(family)), output_attentions=True)
        found = out.decoder_attentions if family == "t5" else out.attentions
        loss = out.loss + found[1].square().sum()
        loss.backward()
        return outcome(model, loss), [weights.detach() for weights in found]

    _, weights = same_outputs(model, run)
    assert len(weights) == 4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gpt2_cross_attention(attention):
    """Gradients of GPT-2's cross-attention reach the encoder's states."""
    model = tiny_model("gpt2", add_cross_attention=True, attention=attention, dropout=0.1)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])

    def run():
        encoder = states.clone().requires_grad_(True)
        got = step(model, {**tiny_batch("gpt2"), "encoder_hidden_states": encoder, "encoder_attention_mask": mask})
        return {**got, "encoder": encoder.grad}, []

    expected, _ = same_outputs(model, run)
    assert expected["encoder"][0].any()
    assert len(recomputed(model)) == 4


def test_bert_as_a_decoder():
    """BERT works with causal masks, cross-attention and a cache."""
    config = copy.deepcopy(tiny_model("bert").config)
    config.is_decoder = config.add_cross_attention = True
    config.hidden_dropout_prob = 0.1
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel(config).train()
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    same_outputs(model, lambda: (step(model, {**tiny_batch("llama"), "encoder_hidden_states": states}), []))
    assert len(recomputed(model)) == 4
