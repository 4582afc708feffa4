"""Other uses of the logits of a chunked head, which are then computed as a whole, or refused."""

from __future__ import annotations

import pytest
import torch
from helpers.heads import TOKENS, WORDS, differentiate, labels_for, lazy, loss_of, same_toys, selected, toy
from helpers.steps import assert_near
from torch import nn
from torch.nn import functional

from hf_ckpt.errors import HfCkptError


class Squared(torch.autograd.Function):
    """A function of autograd as users write it: it takes the logits as a whole."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


class Doubled(torch.autograd.Function):
    """A function with a gradient of its own, which a loss behind it must go through."""

    @staticmethod
    def forward(ctx, logits):
        return logits * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Passed(Doubled):
    """A function that changes nothing, as DDP puts behind what a model returns."""

    @staticmethod
    def forward(ctx, logits):
        return logits


def _masked(logits):
    logits[..., 3:9] = -5.0
    return loss_of()(logits)


def _scaled_in_place(logits):
    logits *= 0.5
    return loss_of()(logits)


def _changed_copy(logits):
    bare = logits.clone()
    bare[..., 3:9] = 0
    return loss_of()(logits) + bare.square().mean()


def _looked_at_first(logits):
    with torch.no_grad():
        assert logits.max() > -100
    return loss_of()(logits)


def _watched(logits):
    logits.register_hook(lambda gradient: 3 * gradient)
    return loss_of()(logits)


def _looked_at_in_inference_mode(logits):
    with torch.inference_mode():
        assert logits.exp().min() > 0
    return loss_of()(logits)


# Name -> (function, how many logits were computed as a whole)
USES = {
    "square": (lambda logits: logits.square().mean(), 1),
    "loss and square": (lambda logits: loss_of()(logits) + logits.square().mean(), 1),
    "function": (Squared.apply, 1),
    "function, then loss": (lambda logits: loss_of()(Doubled.apply(logits)), 1),
    "identity function, then loss": (lambda logits: loss_of()(Passed.apply(logits)), 1),
    "probabilities": (lambda logits: loss_of()(logits) + torch.softmax(logits, -1).square().sum(), 1),
    "added to": (lambda logits: loss_of()(logits + torch.linspace(0, 1, 7).view(7, 1)), 1),
    "added to by name": (lambda logits: loss_of()(logits.add(other=torch.linspace(0, 1, 7).view(7, 1))), 1),
    "masked in place": (_masked, 1),
    "scaled in place": (_scaled_in_place, 1),
    "copy changed": (_changed_copy, 1),
    "looked at first": (_looked_at_first, 1),
    "looked at in inference mode": (_looked_at_in_inference_mode, 1),
    "gradient watched": (_watched, 1),
    "columns": (lambda logits: logits[..., 3:7].square().sum() + logits[0, :, 1].sum() + logits[1, 2, 3], 1),
    "last place": (lambda logits: functional.cross_entropy(logits.transpose(1, 2), labels_for()), 1),
}


@pytest.mark.compat
@pytest.mark.parametrize("name", USES)
def test_other_uses_get_plain_logits(name, whole, caplog):
    work, computed = USES[name]
    same_toys(work, whole, computed=computed)
    assert any("which the chunked head does not compute" in record.message for record in caplog.records)


def test_what_was_computed_is_said_once(caplog):
    head, hidden = toy()
    for _ in range(3):
        lazy(head, hidden).exp()
        _ = lazy(head, hidden).data
    assert [record.args[0] for record in caplog.records] == ["exp", "data"]


def test_counting_right_answers_stays_in_chunks(whole):
    head, hidden = toy()
    logits = lazy(head, hidden)
    with torch.no_grad():
        found = logits[:, :-1].argmax(dim=-1)
    assert torch.equal(found, head(hidden)[:, :-1].argmax(-1))
    assert not whole
    assert not found.requires_grad


def test_what_is_known_needs_no_values(whole):
    head, hidden = toy()
    logits, plain = lazy(head, hidden), head(hidden)
    for ask in (
        lambda x: (x.shape, x.size(-1), x.dim(), x.dtype, x.device, x.numel(), len(x), x.nbytes, x.requires_grad),
        lambda x: (torch.is_floating_point(x), torch.numel(x), x.is_leaf, x.is_contiguous(), x.stride()),
        lambda x: (
            x.type(torch.float64).dtype,
            x.bfloat16().dtype,
            x.to(x.device).dtype,
            x[0].shape,
            x[..., :2, :].shape,
        ),
        lambda x: (x.detach().requires_grad, x.detach().float().requires_grad, x.clone().requires_grad),
        lambda x: torch.log_softmax(x.bfloat16(), -1, torch.float32).dtype,
    ):
        assert ask(logits) == ask(plain)
    assert "computed=False" in repr(logits)
    assert not whole
    assert logits.type() == plain.type()
    assert logits.view(torch.int32).shape == plain.shape


def test_logits_without_a_graph(whole):
    """What is computed from detached logits, or from those made under `no_grad`, has no gradient."""
    head, hidden = toy()
    logits = lazy(head, hidden)
    with torch.no_grad():
        ungraphed = logits.float() / 2
    for found in (logits.detach(), logits.detach().double(), ungraphed):
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


def test_backward_twice(whole):
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
        twice = {name: value if name == "loss" else 2 * value for name, value in expected.items()}
        twice["loss"] = twice["loss"].sum()
        assert_near(twice, got)
    assert not whole


def test_gradients_for_what_is_asked_for(whole):
    """Gradients may be scaled, asked of one input only, or given for the logits by hand."""
    head, hidden = toy()
    plain = torch.autograd.grad(loss_of()(head(hidden)), head.weight, torch.tensor(3.0))[0]
    ours = torch.autograd.grad(loss_of()(lazy(head, hidden)), head.weight, torch.tensor(3.0))[0]
    torch.testing.assert_close(plain, ours)
    assert not whole
    down = torch.randn(*TOKENS, WORDS)
    logits = lazy(head, hidden)
    torch.autograd.backward([logits], [down])
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
    """Logits in chunks would give other values than plain ones there, so they raise an error."""
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
    after = logits.softmax(-1)  # after backward they are still those of this forward
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
