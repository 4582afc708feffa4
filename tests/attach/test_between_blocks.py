"""Values that blocks pass to each other and to the user: position biases, hidden states, attentions."""

from __future__ import annotations

import pytest
import torch
from helpers.steps import assert_same, enable, outcome, recomputed, step, without_cache

import hf_ckpt
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model


@pytest.mark.parametrize("layers", [{"decoder": "1-3"}, {"encoder": "1-3"}, {"encoder": "0"}], ids=str)
def test_the_shared_position_bias_crosses_the_plan(layers):
    """Block 0 returns the position bias and others add it: its gradient passes through planned and kept blocks."""
    model = tiny_model("t5", dropout=0.1)
    expected = step(model, tiny_batch("t5"))
    assert all(gradient.any() for name, gradient in expected.items() if "relative_attention_bias" in name)
    hf_ckpt.install(model, {"layers": layers})
    enable(model)
    # Attention modules inside the blocks carry the flag, too.
    assert {type(m).__name__ for m in model.modules() if getattr(m, "gradient_checkpointing", False)} == {"T5Block"}
    assert_same(expected, step(model, tiny_batch("t5")))
    (stack,) = layers
    assert len(recomputed(model)) > 0
    assert all(name.startswith(stack) for name in recomputed(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_attentions_in_the_loss(family):
    """They keep their order, values and gradients."""
    model = tiny_model(family, dropout=0.1, attention="eager")
    plain = step(model, tiny_batch(family))

    def run():
        model.zero_grad()
        torch.manual_seed(7)
        out = model(**without_cache(model, tiny_batch(family)), output_hidden_states=True, output_attentions=True)
        names = ("encoder_hidden_states", "decoder_hidden_states") if family == "t5" else ("hidden_states",)
        states = [state for name in names for state in out[name]]
        weights = (*out.decoder_attentions, *out.cross_attentions) if family == "t5" else out.attentions
        loss = out.loss + states[2].square().mean() + states[-2].sin().mean() + weights[1].square().sum()
        loss.backward()
        return outcome(model, loss), [found.detach() for found in (*states, *weights)]

    expected, found = run()
    assert len(found) == (10 + 8 if family == "t5" else 5 + 4)
    with pytest.raises(AssertionError, match="differs"):  # they affect the loss
        assert_same(expected, plain)
    hf_ckpt.install(model)
    enable(model)
    got, found_by_ours = run()
    assert_same(expected, got)
    assert all(torch.equal(one, other) for one, other in zip(found, found_by_ours, strict=True))
    assert set(hf_ckpt.describe(model).recomputed.values()) == {1}
