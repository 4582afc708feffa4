"""Losses that the chunked head computes in chunks, and other uses of its logits, which are computed or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.heads import (
    HIDDEN,
    TOKENS,
    WORDS,
    Doubled,
    Passed,
    differentiate,
    error,
    labels_for,
    lazy,
    loss_of,
    same_toys,
    selected,
    toy,
)
from helpers.steps import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers.trainer_pt_utils import LabelSmoother

from hf_ckpt.engines.head.chunked import chunked, tokens_per_chunk
from hf_ckpt.engines.head.logits import by_rule
from hf_ckpt.errors import HfCkptError


def _selected_by_rows(logits):
    """The log probabilities of `selected`, row by row, as TRL computes them in 16 bits."""
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
    "other ignored": lambda logits: functional.cross_entropy(
        logits.flatten(0, 1), labels_for(ignored=0.0).view(-1) % 3, ignore_index=1
    ),
    "module": lambda logits: nn.CrossEntropyLoss()(logits[..., :-1, :].reshape(-1, WORDS), labels_for()[:, 1:].ravel()),
    "word bias": lambda logits: loss_of()((logits + BIAS) * torch.tensor(0.5) / 0.7),
    "capped": lambda logits: loss_of()(torch.tanh(logits / 2.0) * 2.0),
    "selected at a temperature": lambda logits: selected(logits / 1.3),
    "selected by rows": _selected_by_rows,
    "one row": lambda logits: logits[1, 2].logsumexp(-1) - logits[0, 0].gather(0, torch.tensor([3])).sum(),
    "label smoother": _smoothed,
    "part": lambda logits: functional.cross_entropy(logits[labels_for() >= 0], labels_for()[labels_for() >= 0]),
    "pieces": lambda logits: torch.cat(
        [part.logsumexp(-1) for part in logits.contiguous().reshape(-1, WORDS).split(split_size=6)]
    ),
    "added losses": lambda logits: loss_of()(logits) + 0.1 * logits.logsumexp(-1).square().mean(),
}


@pytest.mark.compat
@pytest.mark.parametrize("name", LOSSES)
def test_losses_stay_in_chunks(name, whole):
    same_toys(LOSSES[name], whole)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_16_bits_are_hardly_worse(name, whole):
    """Errors in 16 bits are at most 1.5 times those of a plain head.

    The weight's gradient is rounded for each chunk and again for the sum, and so are contributions of single rows. If a
    plain head rounds only that gradient, this is up to sqrt(2) times its error. Few values need several draws.
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
    """Gradients include the loss scale: otherwise frequent tokens would overflow and rare ones vanish."""
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
    """If no token has a label, the mean is 0 / 0 and all gradients are zero, as with a plain head."""
    head, hidden = toy()
    head.requires_grad_(trains)
    labels = labels_for(ignored=1.1).view(-1)
    plain, ours = (
        differentiate(
            lambda logits: functional.cross_entropy(logits.view(-1, WORDS), labels, reduction=reduction),
            make,
            head,
            hidden,
        )
        for make in (nn.Module.__call__, lazy)
    )
    assert bool(ours["loss"].isnan()) == (reduction == "mean")
    for name, value in plain.items():
        assert (value is None) == (ours[name] is None)
        assert value is None or torch.equal(value.nan_to_num(), ours[name].nan_to_num())
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
    """A head in which two parameters get the same gradient tensor from autograd."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WORDS, HIDDEN)) for _ in range(2))
        self.c = nn.Parameter(torch.tensor(0.3))

    def forward(self, hidden):
        return functional.linear(hidden, self.a + self.b) + self.c.expand(WORDS)


def test_gradients_that_share_memory_are_summed_apart(whole):
    same_toys(loss_of(), whole, head=Shared())


def test_nothing_to_train(whole):
    """A frozen head on frozen hidden states gives the right loss, without a graph."""
    for head in (nn.Linear(HIDDEN, WORDS), Shared()):
        head, hidden = toy(head=head.requires_grad_(False))
        loss = loss_of()(lazy(head, hidden.detach()))
        assert not loss.requires_grad
        torch.testing.assert_close(loss, loss_of()(head(hidden.detach())))
    assert not whole


def test_a_reparametrised_head_is_run_whole():
    """A reparametrised head runs as a whole: its weight has a graph, which each chunk would have to go through."""
    head, hidden = toy()
    head = torch.nn.utils.weight_norm(head)
    head(hidden)  # its hook computes the weight
    assert type(chunked(head, head.forward, hidden, 4)) is torch.Tensor


def test_how_many_tokens():
    assert tokens_per_chunk(7, 10**6, trained=True) == 7
    assert [tokens_per_chunk("auto", tokens, trained=False) for tokens in (10, 4096, 10**6)] == [256, 512, 1024]
    assert tokens_per_chunk("auto", 10**6, trained=True) == 4096


def test_keywords(whole):
    """Keywords of a rule are passed to it; torch handles or refuses all others."""
    head, hidden = toy()
    parts = torch.split(lazy(head, hidden), split_size_or_sections=6, dim=1)
    assert [part.shape for part in parts] == [(3, 6, WORDS), (3, 1, WORDS)]
    assert all(part.computed is None for part in parts)
    assert by_rule(torch.Tensor.split, (parts[0],), {"split_size": 2, "dim": 1})[0].shape == (3, 2, WORDS)
    assert by_rule(torch.Tensor.split, (parts[0],), {"sizes": 2}) is NotImplemented
    assert by_rule(torch.Tensor.cos, (parts[0],), {}) is NotImplemented
    assert not whole


# --- other uses -------------------------------------------------------------------------------------------------------


def _masked(logits):
    logits[..., 3:9] = -5.0
    return loss_of()(logits)


def _changed_copy(logits):
    bare = logits.clone()
    bare[..., 3:9] = 0
    return loss_of()(logits) + bare.square().mean()


def _watched(logits):
    logits.register_hook(lambda gradient: 3 * gradient)
    return loss_of()(logits)


def _looked_at_in_inference_mode(logits):
    with torch.inference_mode():
        assert logits.exp().min() > 0
    return loss_of()(logits)


USES = {
    "loss and square": lambda logits: loss_of()(logits) + logits.square().mean(),
    "function, then loss": lambda logits: loss_of()(Doubled.apply(logits)),
    "identity function, then loss": lambda logits: loss_of()(Passed.apply(logits)),
    "added to": lambda logits: loss_of()(logits + torch.linspace(0, 1, 7).view(7, 1)),
    "added to by name": lambda logits: loss_of()(logits.add(other=torch.linspace(0, 1, 7).view(7, 1))),
    "masked in place": _masked,
    "copy changed": _changed_copy,
    "looked at in inference mode": _looked_at_in_inference_mode,
    "gradient watched": _watched,
    "columns": lambda logits: logits[..., 3:7].square().sum() + logits[0, :, 1].sum() + logits[1, 2, 3],
    "flat": lambda logits: logits.flatten().logsumexp(0),
    "new places": lambda logits: logits[:, None].square().sum(),
    "last place": lambda logits: functional.cross_entropy(logits.transpose(1, 2), labels_for()),
}


@pytest.mark.compat
@pytest.mark.parametrize("name", USES)
def test_other_uses_get_plain_logits(name, whole, caplog):
    """For other uses, logits are computed as a whole, once, and hf_ckpt says so once."""
    same_toys(USES[name], whole, computed=1)
    said = [record.args[0] for record in caplog.records if "the chunked head does not compute" in record.message]
    assert said
    assert len(said) == len(set(said))


def test_what_is_known_needs_no_values(whole):
    head, hidden = toy()
    logits, plain = lazy(head, hidden), head(hidden)
    for ask in (
        lambda x: (x.shape, x.size(-1), x.dim(), x.dtype, x.device, x.numel(), len(x), x.nbytes, x.requires_grad),
        lambda x: (torch.is_floating_point(x), torch.numel(x), x.is_leaf, x.is_contiguous(), x.stride()),
        lambda x: (x.bfloat16().dtype, x.to(x.device).dtype, x[0].shape, x[..., :2, :].shape),
        lambda x: (x.detach().requires_grad, x.detach().float().requires_grad),
        lambda x: torch.log_softmax(x.bfloat16(), -1, torch.float32).dtype,
    ):
        assert ask(logits) == ask(plain)
    with torch.no_grad():
        right = logits[:, :-1].argmax(dim=-1)
    assert torch.equal(right, plain[:, :-1].argmax(-1))
    assert not right.requires_grad
    assert "computed=False" in repr(logits)
    assert not whole
    assert logits.type() == plain.type()
    assert logits.view(torch.int32).shape == plain.shape


def test_logits_without_a_graph(whole):
    """Results of detached logits, and of logits computed under `no_grad`, have no gradient."""
    head, hidden = toy()
    logits = lazy(head, hidden)
    with torch.no_grad():
        ungraphed = logits.float() / 2
    for found in (logits.detach(), logits.detach().bfloat16(), ungraphed):
        assert not loss_of()(found).requires_grad
        assert not found.logsumexp(-1).requires_grad
    assert not whole
    assert logits.detach().numpy().shape == logits.shape
    assert torch.equal(logits.detach().cpu(), head(hidden))
    assert torch.equal(ungraphed.tanh().exp(), (head(hidden) / 2).tanh().exp())
    leaf = logits.detach().requires_grad_()
    loss_of()(leaf).backward()
    assert head.weight.grad is None
    assert leaf.grad.abs().sum() > 0
    assert loss_of()(logits).requires_grad


def test_gradients_for_what_is_asked_for(whole):
    """Gradients are right if computed repeatedly, scaled, for one input only, or from given gradients of the logits."""
    head, hidden = toy()
    for work in (loss_of(), selected):
        expected = differentiate(work, nn.Module.__call__, head, hidden)
        head.zero_grad()
        hidden.grad = None
        loss = work(lazy(head, hidden)).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, hidden)
        got = {"loss": loss.detach(), "hidden": hidden.grad, "weight": head.weight.grad, "bias": head.bias.grad}
        twice = {name: value.sum() if name == "loss" else 2 * value for name, value in expected.items()}
        assert_near(twice, got)
    plain, ours = (
        torch.autograd.grad(loss_of()(make(head, hidden)), head.weight, torch.tensor(3.0))[0]
        for make in (nn.Module.__call__, lazy)
    )
    torch.testing.assert_close(plain, ours)
    assert not whole
    down, hidden.grad = torch.randn(*TOKENS, WORDS), None
    torch.autograd.backward([lazy(head, hidden)], [down])
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(head(hidden), hidden, down)[0])


def _part_then_change(logits):
    rest = logits[:, 1:]
    logits[:, 1] = 0
    return rest.exp()


def _change_part(logits):
    rest = logits[:, 1:]
    functional.relu(rest, inplace=True)
    return loss_of()(logits)


def _change_part_of_computed(logits):
    rest = logits[:, 1:]
    logits.exp()
    logits[:, 2].zero_()
    return rest.exp()


def _hook_after_loss(logits):
    loss_of()(logits)
    logits.retain_grad()


def _change_below_autograd(logits):
    class Changes(Doubled):
        @staticmethod
        def forward(ctx, given):
            with torch._C.DisableTorchFunctionSubclass():
                return given.mul_(2)

    return Changes.apply(logits)


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (_part_then_change, "changed in place"),
        (_change_part, "changed in place"),
        (_change_part_of_computed, "changed in place"),
        (_hook_after_loss, "cannot be watched"),
        (_change_below_autograd, "in place"),
    ],
)
def test_what_cannot_be_followed_is_refused(work, says):
    """Uses that would give other values with chunks than with plain logits raise an error."""
    head, hidden = toy()
    with pytest.raises(HfCkptError, match=says):
        work(lazy(head, hidden))
    work(head(hidden) * 1)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_logits_after_the_optimizers_step_are_refused(optimizer):
    head, hidden = toy()
    logits, kept = lazy(head, hidden), lazy(head, hidden)
    kept.exp()
    loss_of()(logits).backward()
    after = logits.softmax(-1)  # still this forward's logits after backward
    torch.testing.assert_close(after, head(hidden).softmax(-1))
    late = lazy(head, hidden)
    optimizer(head.parameters(), lr=0.1).step()
    with pytest.raises(HfCkptError, match="parameters of the head had changed"):
        late.argmax(-1)
    assert torch.equal(logits.softmax(-1), after)
    assert torch.equal(kept.softmax(-1), after)
    hidden = hidden * 1
    late = lazy(head, hidden)
    hidden.detach().zero_()
    with pytest.raises(HfCkptError, match="input of the chunked head was changed"):
        late.exp()
