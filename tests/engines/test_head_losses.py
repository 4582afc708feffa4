"""Losses that the chunked head computes a chunk at a time, of every form that libraries call them in."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.heads import HIDDEN, WORDS, differentiate, error, labels_for, lazy, loss_of, same_toys, selected, toy
from helpers.steps import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers.trainer_pt_utils import LabelSmoother

from hf_ckpt.engines.head.chunked import chunked, tokens_per_chunk
from hf_ckpt.engines.head.logits import by_rule


def _selected_by_rows(logits):
    """The same logarithms as `selected`, row by row, as TRL computes them in 16 bits."""
    found = []
    for row, labels in zip(logits, labels_for(ignored=0.0), strict=True):
        found.append(functional.log_softmax(row, dim=-1).gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(found)


def _smoothed(logits):
    return LabelSmoother(epsilon=0.1)({"logits": logits}, labels_for(), shift_labels=True)


BIAS = torch.linspace(0, 3, WORDS).view(1, WORDS)
LOSSES = {
    "mean": loss_of(),
    "sum": loss_of(reduction="sum"),
    "none": loss_of(reduction="none"),
    "smoothed": loss_of(label_smoothing=0.1),
    "smoothed sum": loss_of(label_smoothing=0.1, reduction="sum"),
    "other ignored": lambda logits: functional.cross_entropy(
        logits.flatten(0, 1), labels_for(ignored=0.0).view(-1) % 3, ignore_index=1
    ),
    "module": lambda logits: nn.CrossEntropyLoss()(logits[..., :-1, :].reshape(-1, WORDS), labels_for()[:, 1:].ravel()),
    "nll": lambda logits: functional.nll_loss(logits.log_softmax(-1).view(-1, WORDS), labels_for().view(-1)),
    "temperature": lambda logits: loss_of()(logits / 0.7),
    "word bias": lambda logits: loss_of()((logits + BIAS) * torch.tensor(0.5) - 1.0),
    "capped": lambda logits: loss_of()(torch.tanh(logits / 2.0) * 2.0),
    "selected": selected,
    "selected at a temperature": lambda logits: selected(logits / 1.3),
    "selected by rows": _selected_by_rows,
    "one row": lambda logits: logits[1, 2].logsumexp(-1) - logits[0, 0].gather(0, torch.tensor([3])).sum(),
    "label smoother": _smoothed,
    "part": lambda logits: functional.cross_entropy(logits[labels_for() >= 0], labels_for()[labels_for() >= 0]),
    "pieces": lambda logits: torch.cat([part.logsumexp(-1) for part in logits.reshape(-1, WORDS).split(6)]),
    "pieces by name": lambda logits: torch.cat(
        [part.logsumexp(-1) for part in logits.reshape(-1, WORDS).split(split_size=6)]
    ),
    "copy": lambda logits: loss_of()(logits.clone().contiguous()),
    "added losses": lambda logits: loss_of()(logits) + 0.1 * logits.logsumexp(-1).square().mean(),
}


@pytest.mark.compat
@pytest.mark.parametrize("name", LOSSES)
def test_losses_stay_in_chunks(name, whole):
    same_toys(LOSSES[name], whole)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_16_bits_are_hardly_worse(name, whole):
    """The weight's gradient is rounded once a chunk and once in all, and so is what each row gives by itself: where
    plain heads round nothing but that gradient, that is up to sqrt(2) of their error. So few values need several draws.
    """
    gaps = []
    for seed in range(8):
        head, hidden = toy(torch.bfloat16, seed=seed)
        exact = copy.deepcopy(head).float(), hidden.detach().float().requires_grad_()
        truth = differentiate(LOSSES[name], nn.Module.__call__, *exact)
        found = (differentiate(LOSSES[name], make, head, hidden) for make in (nn.Module.__call__, lazy))
        gaps.append([error(truth, one) ** 2 for one in found])
    plain, ours = (sum(parts) ** 0.5 for parts in zip(*gaps, strict=True))
    assert 0 < ours <= 1.5 * plain
    assert not whole


def test_float16_gradients_fit_as_well_as_plain_ones(whole):
    """Gradients are of the scaled loss: else those of many like tokens overflow, and those of rare words vanish."""
    head, hidden = toy(torch.float16, tokens=(4, 64))
    hidden = (500 * hidden.detach()).requires_grad_()
    labels = torch.zeros(256, dtype=torch.long)

    def work(logits):
        return functional.cross_entropy(logits.view(-1, WORDS).float() / 1000, labels) * 64

    expected = differentiate(work, nn.Module.__call__, head, hidden)
    got = differentiate(work, lambda head, hidden: lazy(head, hidden, 200), head, hidden)
    assert all(bool(value.isfinite().all()) for value in got.values())
    assert_near(expected, got, 2e-3)
    assert not whole


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_label_at_all(reduction, trains, whole):
    """Where no token has a label, plain heads give a mean of 0 / 0, and gradients that are all zero."""
    head, hidden = toy()
    head.requires_grad_(trains)
    results = []
    for make in (nn.Module.__call__, lazy):
        hidden.grad = head.weight.grad = None
        loss = functional.cross_entropy(
            make(head, hidden).view(-1, WORDS), labels_for(ignored=1.1).view(-1), reduction=reduction
        )
        loss.backward()
        results.append((loss.detach(), hidden.grad, head.weight.grad))
    (loss, *gradients), (our_loss, *ours) = results
    assert torch.equal(loss.isnan(), our_loss.isnan())
    assert bool(loss.isnan()) == (reduction == "mean")
    for value, our in zip(gradients, ours, strict=True):
        assert (value is None) == (our is None)
        assert value is None or torch.equal(value, our)
    assert not whole


@settings(max_examples=25)
@given(
    chunk=st.integers(1, 12),
    tokens=st.tuples(st.integers(1, 4), st.integers(4, 9)),
    ignored=st.sampled_from([0.0, 0.3, 0.9]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    bias=st.booleans(),
)
def test_any_sizes(chunk, tokens, ignored, reduction, bias):
    head, hidden = toy(tokens=(tokens[0], tokens[1] + 12), head=nn.Linear(HIDDEN, WORDS, bias=bias))
    labels = labels_for(tuple(hidden.shape[:-1]), ignored, seed=chunk).view(-1)
    labels[0] = 1

    def work(logits):
        return functional.cross_entropy(logits.view(-1, WORDS), labels, reduction=reduction)

    expected = differentiate(work, nn.Module.__call__, head, hidden)
    assert_near(expected, differentiate(work, lambda head, hidden: lazy(head, hidden, chunk), head, hidden))


class Shared(nn.Module):
    """A head for two of whose parameters autograd gives one and the same gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WORDS, HIDDEN)) for _ in range(2))
        self.c = nn.Parameter(torch.tensor(0.3))

    def forward(self, hidden):
        return functional.linear(hidden, self.a + self.b) + self.c.expand(WORDS)


def test_gradients_that_share_memory_are_summed_apart(whole):
    same_toys(loss_of(), whole, head=Shared())


def test_nothing_to_train(whole):
    """A frozen head on frozen hidden states gives the loss, and a loss without a graph."""
    for head in (nn.Linear(HIDDEN, WORDS), Shared()):
        head, hidden = toy(head=head.requires_grad_(False))
        loss = loss_of()(lazy(head, hidden.detach()))
        assert not loss.requires_grad
        torch.testing.assert_close(loss, loss_of()(head(hidden.detach())))
    assert not whole


def test_a_reparametrised_head_is_run_whole():
    """The weight of such a head is a result of autograd itself, whose graph cannot be gone through for each chunk."""
    head, hidden = toy()
    head = torch.nn.utils.weight_norm(head)
    head(hidden)  # its hook makes the weight
    assert type(chunked(head, head.forward, hidden, 4)) is torch.Tensor


def test_how_many_tokens():
    assert tokens_per_chunk(7, 10**6, trained=True) == 7
    assert [tokens_per_chunk("auto", tokens, trained=False) for tokens in (10, 4096, 10**6)] == [256, 512, 1024]
    assert tokens_per_chunk("auto", 10**6, trained=True) == 4096


def test_keywords(whole):
    """Those that a rule has are its arguments; others are for torch to take or to refuse."""
    head, hidden = toy()
    parts = torch.split(lazy(head, hidden), split_size_or_sections=6, dim=1)
    assert [part.shape for part in parts] == [(3, 6, WORDS), (3, 1, WORDS)]
    assert all(part.computed is None for part in parts)
    assert by_rule(torch.Tensor.split, (parts[0],), {"split_size": 2, "dim": 1})[0].shape == (3, 2, WORDS)
    assert by_rule(torch.Tensor.split, (parts[0],), {"sizes": 2}) is NotImplemented
    assert by_rule(torch.Tensor.cos, (parts[0],), {}) is NotImplemented
    assert not whole
