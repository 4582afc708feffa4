"""Generation and scoring in train mode: blocks run without checkpointing, with their cache, and training continues."""

from __future__ import annotations

import pytest
import torch
from helpers.installed import ALL
from helpers.steps import assert_same, enable, gradients, recomputed, step

import hf_ckpt
from hf_ckpt.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_generate_in_train_mode_gives_the_same_tokens(family, dropout):
    """generate() in train mode gives the same tokens with checkpointing enabled, because blocks keep their cache."""
    model = tiny_model(family, dropout=dropout)
    prompt = {"input_ids": tiny_batch(family)["input_ids"][:, :5]}
    keys = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}

    def tokens_and_logits():
        torch.manual_seed(7)
        done = model.generate(**prompt, **keys, output_logits=True, return_dict_in_generate=True)
        return done.sequences, torch.stack(done.logits)

    sequences, logits = tokens_and_logits()
    hf_ckpt.install(model)
    enable(model)
    got_sequences, got_logits = tokens_and_logits()
    assert torch.equal(sequences, got_sequences)
    assert torch.equal(logits, got_logits)  # tokens could agree by chance
    with hf_ckpt.paused(model):
        assert torch.equal(sequences, tokens_and_logits()[0])
    assert sum(hf_ckpt.describe(model).forwards.values()) == 0
    step(model, tiny_batch(family))
    assert len(recomputed(model)) == len(hf_ckpt.describe(model).plan.actions)


def log_probabilities(model, sequences):
    logits = model(input_ids=sequences, use_cache=False).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, sequences[:, 1:, None]).squeeze(-1)


def two_steps_of_grpo(model, pause, context):
    """Sequences, scores and gradients of each of two steps."""
    found = []
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prompt = tiny_batch("llama")["input_ids"][:, :4]
    for _ in range(2):
        with pause(model):
            sequences = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=True)
        with context():
            old = log_probabilities(model, sequences)
        new = log_probabilities(model, sequences)
        optimizer.zero_grad()
        (new - old.clone()).exp().mean().neg().backward()
        found.append({"sequences": sequences, "loss": old.clone(), **gradients(model)})
        optimizer.step()
    return found


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_loop_shaped_like_grpo(context, paused):
    """GRPO's loop works on one model in train mode: generate, score under no_grad, train."""

    def no_pause(model):
        return torch.enable_grad()

    expected = two_steps_of_grpo(tiny_model("llama", dropout=0.1), no_pause, context)
    model = tiny_model("llama", dropout=0.1)
    hf_ckpt.install(model)
    enable(model)
    got = two_steps_of_grpo(model, hf_ckpt.paused if paused else no_pause, context)
    for before, after in zip(expected, got, strict=True):
        assert_same(before, after)
    assert recomputed(model) == [name for name in ALL for _ in range(2)]  # only the training forward counts
    assert set(hf_ckpt.describe(model).forwards.values()) == {2}
