"""Budgets under what a Trainer does beside the model's own loss: losses of its own, accumulation, 16-bit types."""

from __future__ import annotations

import pytest
import torch
from helpers.adapters import with_lora
from helpers.budgets import SHARES, assert_budgets_hold, count_steps
from helpers.sparing import sparing
from helpers.trainers import FLAG, Rows, trainer
from torch.nn import functional

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.models.tiny import tiny_model

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("few_actions")]
WORDS = 2000


def weighted(outputs, labels, num_items_in_batch=None):
    """A loss of the user's, which takes several times the logits."""
    scores = outputs.logits.float().log_softmax(-1)
    return (scores.exp() * scores).mean() + functional.nll_loss(scores.flatten(0, 1), labels.flatten())


KINDS = {
    "label smoothing": {"label_smoothing_factor": 0.1},
    "label smoothing, accumulated, bf16": {
        "label_smoothing_factor": 0.1,
        "gradient_accumulation_steps": 2,
        "bf16": True,
    },
    "a loss of the user": {"compute_loss_func": weighted},
    "accumulated, evaluated": {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1},
}


def training(folder, settings, tokens=64):
    """A function that trains LoRA adapters under a spec, as `assert_budgets_hold` takes it."""

    def train(spec):
        model = tiny_model("llama", layers=3, hidden=64, vocab_size=WORDS, attention="sdpa")
        if spec is not None:
            hf_ckpt.install(model)
        own = {**settings}
        loss = own.pop("compute_loss_func", None)
        keys = {FLAG: spec is not None, f"{FLAG}_kwargs": spec, "max_steps": 2, "per_device_train_batch_size": 4}
        made = trainer(
            folder,
            with_lora(model, "llama", lora_dropout=0.0),
            rows=Rows(count=16, tokens=tokens),
            evaluate="eval_steps" in own,
            **{**keys, **own},
        )
        made.compute_loss_func = loss
        peaks = count_steps(made)
        made.train()
        return made, peaks

    return train


@pytest.mark.long
@sparing(
    ("kind", "shares"), [("label smoothing", (0.5,)), *((kind, SHARES) for kind in KINDS)], ("label smoothing", (0.5,))
)
def test_real_peaks_stay_within_budgets(kind, shares, tmp_path):
    assert_budgets_hold(training(tmp_path, KINDS[kind]), shares)


@pytest.mark.long
def test_a_loss_that_cannot_be_traced_is_planned_for_as_the_models_own(tmp_path):
    """One that looks at values, as fake tensors have none; the planning leaves no gradients and calls no hooks."""

    def looking(outputs, labels, num_items_in_batch=None):
        scores = functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return scores if float(scores) > 0 else -scores

    train = training(tmp_path, {"compute_loss_func": looking})
    made, _ = train({"policy": "budget", "budget": "1GiB"})
    assert installation(made.model).planned is not None
    assert all(type(p.grad) in (type(None), torch.Tensor) for p in made.model.parameters())
