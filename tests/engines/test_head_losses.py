"""Losses that the chunked head computes in chunks, and other uses of its logits, which are computed or refused."""

import ctypes

import pytest
import torch
from helpers.steps import assert_near, without_collector
from torch import nn
from torch.nn import functional
from transformers.trainer_pt_utils import LabelSmoother

from hf_ckpt import compat
from hf_ckpt.engines.head.chunked import chunked, tokens_per_chunk
from hf_ckpt.engines.head.logits import Logits
from hf_ckpt.errors import ChangedBlockError, DoubleBackwardError, HfCkptError
from hf_ckpt.measure.live import LiveBytes

TOKENS, HIDDEN, WORDS = (3, 7), 8, 50
LABELS = torch.randint(0, WORDS, TOKENS, generator=torch.Generator().manual_seed(0))
CHOSEN = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1)) > 0.3
SOME = LABELS.masked_fill(~CHOSEN, -100)
BIAS = torch.linspace(0, 3, WORDS).view(1, WORDS)


class Shared(nn.Module):
    """A head in which two parameters get the same gradient tensor from autograd, and one gets an expanded tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WORDS, HIDDEN)) for _ in range(2))
        self.c = nn.Parameter(torch.randn(3))

    def forward(self, hidden):
        return functional.linear(hidden, self.a + self.b) + self.c.sum() * BIAS


def linear(bias=True, trained=True):
    head = nn.Linear(HIDDEN, WORDS, bias=bias)
    head.weight.requires_grad_(trained)
    return head


HEADS = {"no bias": {"bias": False}, "bias": {}, "only bias": {"trained": False}, "shared": {"kind": Shared}}


def toy(kind=linear, dtype=torch.float32, tokens=TOKENS, **options):
    """A head, and hidden states for it."""
    torch.manual_seed(2)
    return kind(**options).to(dtype), torch.randn(*tokens, HIDDEN, dtype=dtype, requires_grad=True)


def lazy(head, hidden, chunk=4):
    """The head's logits, in chunks."""
    logits = chunked(head, lambda rows: type(head).forward(head, rows), hidden, chunk)
    assert type(logits) is Logits
    return logits


def differentiate(work, logits, head, hidden, times=1):
    """The result of `work` on logits, and its gradients, which accumulate over some backwards."""
    head.zero_grad(set_to_none=True)
    hidden.grad = None
    loss = work(logits)
    for _ in range(times):
        loss.sum().backward(retain_graph=times > 1)
    return {"loss": loss.detach(), "hidden": hidden.grad, **{name: p.grad for name, p in head.named_parameters()}}


def both(work, head, hidden, chunk=4, times=1):
    """The results of `work` on the logits of a plain head and of a chunked one."""
    return (differentiate(work, logits, head, hidden, times) for logits in (head(hidden), lazy(head, hidden, chunk)))


def loss_of(labels=SOME, **options):
    """A function of logits that calls `cross_entropy` as models do."""
    labels = labels if labels.is_floating_point() else labels.view(-1)
    return lambda logits: functional.cross_entropy(logits.float().view(-1, WORDS), labels, **options)


def selected(logits):
    """Log-probabilities of the labels, as TRL computes them in float32."""
    chosen = logits.gather(-1, LABELS.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def selected_by_rows(logits):
    """Log-probabilities of the labels, as TRL computes them in 16 bits."""
    pairs = zip(logits, LABELS.unsqueeze(-1), strict=True)
    return torch.stack([functional.log_softmax(row, dim=-1).gather(dim=-1, index=words) for row, words in pairs])


def entropy(logits):
    """The entropy of each token, as TRL computes it."""
    rows = [functional.log_softmax(part, dim=-1) for part in logits.reshape(-1, WORDS).split(5, dim=0)]
    return torch.cat([-(torch.exp(each) * each).sum(-1) for each in rows])


def chosen_and_rejected(logits):
    """CPO's and ORPO's metrics beside a loss, and Online DPO's log-probabilities."""
    one, other = (torch.take_along_dim(x.log_softmax(-1), LABELS[:1, :, None], 2) for x in logits[:2].chunk(2, 0))
    return one.sum() - other.sum() + 0.1 * logits.mean() + 0.01 * logits[0].sum()


LOSSES = {
    "mean": loss_of(),
    "sum": loss_of(reduction="sum"),
    "none": loss_of(reduction="none"),
    "under autocast": torch.autocast("cpu", torch.bfloat16)(loss_of()),
    "smoothed": loss_of(label_smoothing=0.1),
    "other ignored": loss_of(LABELS % 3, ignore_index=1),
    "shifted": lambda logits: nn.CrossEntropyLoss()(logits[..., :-1, :].reshape(-1, WORDS), SOME[:, 1:].ravel()),
    "word bias": lambda logits: loss_of()((logits + BIAS) * torch.tensor(0.5) / 0.7),
    "capped": lambda logits: loss_of()(torch.tanh(logits / 2.0) * 2.0),
    "selected at a temperature": lambda logits: selected(logits / 1.3),
    "selected by rows": selected_by_rows,
    "one row": lambda logits: logits[1, 2].logsumexp(-1) - logits[0, 0].gather(0, torch.tensor([3])).sum(),
    "label smoother": lambda logits: LabelSmoother(0.1)({"logits": logits}, SOME, shift_labels=True),
    "entropy": lambda logits: entropy(logits / 1.3),
    "chosen and rejected": chosen_and_rejected,
    "part": lambda logits: functional.cross_entropy(logits[CHOSEN], LABELS[CHOSEN]),
    "added losses": lambda logits: loss_of()(logits) + 0.1 * logits.logsumexp(-1).square().mean(),
}


@pytest.mark.compat
@pytest.mark.parametrize("chunk", [1, 4, 20])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_stay_in_chunks(name, head, chunk, whole):
    expected, got = both(LOSSES[name], *toy(**HEADS[head]), chunk)
    assert (expected["loss"].dtype, expected["loss"].shape) == (got["loss"].dtype, got["loss"].shape)
    assert_near(expected, got, 1e-5)  # gradients of a few numbers cancel
    assert not whole


def test_gradients_in_float16_are_computed_with_the_scale_of_the_loss(whole):
    """Without the scale, the gradients of rare words would be zero."""
    head, hidden = toy(dtype=torch.float16, tokens=(4, 64))
    head.bias.data[-1] = -14
    expected, got = both(lambda x: 2**16 * loss_of(torch.zeros(256, dtype=torch.long))(x), head, hidden)
    assert expected["weight"][-1].any()
    torch.testing.assert_close(got["weight"][-1], expected["weight"][-1], rtol=2e-2, atol=0)
    assert_near(expected, got, 2e-3)
    assert not whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_any_label_gradients_are_zero(reduction, dtype, whole):
    _, got = both(loss_of(torch.full(TOKENS, -100), reduction=reduction), *toy(dtype=dtype))
    assert bool(got.pop("loss").isnan()) == (reduction == "mean")
    assert all(value is not None and not value.any() for value in got.values())
    assert not whole


@pytest.mark.parametrize("work", [loss_of(), selected])
def test_a_graph_can_be_used_again(work, whole):
    assert_near(*both(work, *toy(), times=3), 1e-5)
    assert not whole


@pytest.mark.trap(46)
@pytest.mark.compat
def test_a_second_derivative_is_refused():
    """Second derivatives are refused, because gradients of chunks would count as constants."""
    head, hidden = toy()
    for work in (loss_of(), loss_of(reduction="none")):
        with pytest.raises(DoubleBackwardError, match=r"`create_graph=True`.* Leave `head` out"):
            torch.autograd.grad(work(lazy(head, hidden)).mean(), hidden, create_graph=True)


def test_frozen_heads_and_detached_logits_have_no_graph(whole):
    head, hidden = toy()
    logits = lazy(head, hidden)
    with torch.no_grad():
        halved = logits.float() / 2
    frozen = [lazy(make().requires_grad_(False), hidden.detach()) for make in (linear, Shared)]
    for detached in (logits.detach(), logits.detach().bfloat16(), halved, *frozen):
        assert not loss_of()(detached).requires_grad
        assert not detached.logsumexp(-1).requires_grad
    assert not whole
    assert torch.equal(halved.tanh().sin(), (head(hidden) / 2).tanh().sin())
    leaf = logits.detach().requires_grad_()
    loss_of()(leaf).backward()
    assert head.weight.grad is None
    assert leaf.grad.abs().sum() > 0
    assert loss_of()(logits).requires_grad


def test_shape_and_type_of_chunked_logits_need_no_values(whole):
    head, hidden = toy()
    for ask in (
        lambda x: (x.shape, x.size(-1), x.dim(), x.dtype, x.device, x.numel(), len(x), x.nbytes, x.requires_grad),
        lambda x: (torch.is_floating_point(x), torch.numel(x), x.is_leaf, x.is_contiguous(), x.stride()),
        lambda x: (x.bfloat16().dtype, x.to(x.device).dtype, x[0].shape, x[..., :2, :].shape),
        lambda x: (torch.log_softmax(x.bfloat16(), -1, torch.float32).dtype, x[:, :-1].argmax(dim=-1).tolist()),
    ):
        assert ask(lazy(head, hidden)) == ask(head(hidden))
    assert "computed=False" in repr(lazy(head, hidden))
    assert not whole


# --- other uses -------------------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """An identity function, such as DDP adds to the outputs of a model, but with a gradient of its own."""

    @staticmethod
    def forward(ctx, logits, copies):
        return logits * 1.0 if copies else logits

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient, None


class ByAddress(torch.autograd.Function):
    """`logsumexp` of values read at their address, by strides, as TRL's kernels do on a GPU."""

    @staticmethod
    def values(logits):
        floats = (ctypes.c_float * logits.numel()).from_address(logits.data_ptr())
        return torch.frombuffer(floats, dtype=torch.float32).as_strided(logits.shape, logits.stride())

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return ByAddress.values(logits).logsumexp(-1)

    @staticmethod
    def backward(ctx, gradient):
        return ByAddress.values(*ctx.saved_tensors).softmax(-1) * gradient.unsqueeze(-1)


def masked(logits):
    logits[..., 3:9] = -5.0
    return loss_of()(logits)


def watched(logits):
    logits.register_hook(lambda gradient: 3 * gradient)
    return loss_of()(logits)


USES = {
    "loss and square": lambda logits: loss_of()(logits) + logits.square().mean(),
    "identity function, then loss": lambda logits: loss_of()(Doubled.apply(logits, False)),
    "copying function, then loss": lambda logits: loss_of()(Doubled.apply(logits, True)),
    "kernel": ByAddress.apply,
    "gradient watched": watched,
    "columns": lambda logits: logits[..., 3:7].square().sum() + logits[0, :, 1].sum() + logits[1, 2, 3],
    "parts of words": lambda logits: logits.split(20, -1)[1].square().sum(),
    "one word": lambda logits: logits.unbind(-1)[3].sum(),
    "tokens taken": lambda logits: torch.take_along_dim(logits, LABELS[..., None] % 3, 0),
    "flat": lambda logits: logits.flatten(0, 1).logsumexp(0),
    "weighted words": loss_of(weight=torch.linspace(0.5, 2.0, WORDS)),
    "sum by its old name": loss_of(size_average=False),
    "shares of words as labels": loss_of(torch.linspace(0, 1, LABELS.numel() * WORDS).view(-1, WORDS).softmax(-1)),
    "one token": lambda logits: functional.cross_entropy(logits[1, 2], LABELS[1, 2]),
    "shape by keyword": lambda logits: logits.reshape(shape=(-1, WORDS)).logsumexp(-1),
    "last place": lambda logits: functional.cross_entropy(logits.transpose(1, 2), SOME),
}


@pytest.mark.compat
@pytest.mark.parametrize("name", USES)
def test_other_uses_get_plain_logits(name, whole, caplog):
    """For other uses, logits are computed as a whole, once, and each function that needs them is named once."""
    assert_near(*both(USES[name], *toy()))
    assert len({id(logits) for logits in whole}) == 1
    named = [record.args[0] for record in caplog.records if "the chunked head does not compute" in record.message]
    assert named
    assert len(named) == len(set(named))


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (loss_of(reduction="median"), "median is not a valid value for reduction"),
        (loss_of(LABELS[:2]), "Expected input batch_size"),
    ],
)
def test_what_torch_refuses_is_refused(work, says):
    with pytest.raises(ValueError, match=says):
        work(lazy(*toy()))


def test_a_loss_in_a_captured_graph_gets_plain_logits(whole, monkeypatch):
    """The host would wait for the labels."""
    monkeypatch.setattr(compat.devices, "is_capturing", lambda: True)
    assert_near(*both(loss_of(), *toy()))
    assert len(whole) == 1


@pytest.mark.parametrize("work", [lambda x: x.detach().exp() * x, lambda x: x[:1] * x[1:2]], ids=["constant", "tokens"])
def test_products_with_other_logits_get_plain_logits(work):
    assert_near(*both(work, *toy()))


def test_gradients_of_the_logits_can_be_given():
    head, hidden = toy()
    down = torch.randn(*TOKENS, WORDS)
    torch.autograd.backward([lazy(head, hidden)], [down])
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(head(hidden), hidden, down)[0])


def test_calls_below_torch_functions_get_plain_logits_and_their_keywords():
    head, hidden = toy()
    with torch._C.DisableTorchFunctionSubclass():
        wide = lazy(head, hidden).to(torch.float64)
    assert torch.equal(wide, head(hidden).double())
    assert wide.dtype == torch.float64


def change_part(logits):
    rest = logits[:, 1:]
    functional.relu(rest, inplace=True)
    return loss_of()(logits)


def change_after_part(logits):
    rest = logits[:, 1:]
    logits.sin()
    logits[:, 2].zero_()
    return rest.sin()


def change_below_autograd(logits):
    with torch._C.DisableTorchFunctionSubclass():
        logits.mul_(2)


def change_part_before_a_product(logits):
    weights, rest = logits.exp(), logits[:, 1:]
    functional.relu(rest, inplace=True)
    return weights * logits


CHANGES = [
    *(masked, lambda logits: loss_of()(logits) + masked(logits.clone())),
    *(change_part, change_after_part, change_below_autograd, change_part_before_a_product),
    lambda logits: (logits[:, 1:].mul_(2), loss_of()(logits)),  # parts that nobody holds
    lambda logits: (logits[0][..., 2:].mul_(2), loss_of()(logits)),
]


@pytest.mark.parametrize("work", CHANGES)
def test_changes_in_place_are_refused(work):
    head, hidden = toy()
    with pytest.raises(HfCkptError, match="in place"):
        work(lazy(head, hidden))
    work(head(hidden) * 1)


def set_data(head):
    head.weight.data = head.weight.data * 2


def step_fused(head):
    head.weight.grad = torch.ones_like(head.weight)
    torch.optim.AdamW([head.weight], fused=True).step()


OVERWRITES = [
    lambda head: head.weight.detach().add_(1),
    lambda head: head.weight.data.mul_(2),  # neither version nor address move, as for a fused optimizer
    set_data,
    step_fused,
]


@pytest.mark.trap(77)
@pytest.mark.parametrize("overwrite", OVERWRITES, ids=["in place", "data in place", "data", "fused optimizer"])
def test_logits_after_the_optimizers_step_are_refused(overwrite):
    head, hidden = toy()
    used, late = lazy(head, hidden), lazy(head.requires_grad_(False), hidden)
    expected = used.sin()
    loss, rows = loss_of()(late), late.logsumexp(-1).sum()
    overwrite(head)
    for use in (torch.argmax, torch.sin, loss_of(reduction="none"), lambda logits: rows.backward()):
        with pytest.raises(ChangedBlockError, match=r'head.*`weight` was overwritten.*"head": "whole"'):
            use(late)
    loss.backward()  # its gradients were computed in the forward
    assert torch.equal(used.sin(), expected)


@pytest.mark.parametrize("work", [loss_of, lambda labels, **_: lambda logits: logits.gather(-1, labels[..., None])])
def test_labels_that_are_overwritten_before_backward_are_refused(work):
    labels = LABELS.clone()
    loss = work(labels, reduction="none")(lazy(*toy())).sum()
    labels.zero_()
    with pytest.raises(ChangedBlockError, match="labels"):
        loss.backward()


ASKED_LATE = {
    "hook": lambda logits, loss: logits.register_hook(print),
    "retained": lambda logits, loss: logits.retain_grad(),
    "gradient": lambda logits, loss: torch.autograd.grad(loss + logits.square().sum(), logits),
}


@pytest.mark.parametrize("ask", ASKED_LATE)
def test_gradients_of_logits_that_would_miss_a_loss_are_refused(ask):
    logits = lazy(*toy())
    part = logits[:, :-1]
    loss = functional.cross_entropy(part.reshape(-1, WORDS), LABELS[:, 1:].reshape(-1))
    for late in (part, logits):
        with pytest.raises(HfCkptError, match=r'gradient of logits whose loss .*"head": "whole"'):
            ASKED_LATE[ask](late, loss)


def test_the_words_of_the_largest_logits_leave_them_their_gradient():
    logits = lazy(*toy())
    assert torch.equal(logits[:, :-1].argmax(-1), logits.argmax(-1)[:, :-1])
    logits.retain_grad()
    logits.square().sum().backward()
    assert_near({"gradient": 2 * logits.detach()}, {"gradient": logits.grad})


# --- memory -----------------------------------------------------------------------------------------------------------


def test_how_many_tokens_a_chunk_has():
    trained, frozen = linear(), linear().requires_grad_(False)
    assert tokens_per_chunk(7, 10**6, trained) == 7
    assert [tokens_per_chunk("auto", tokens, frozen) for tokens in (10, 4096, 10**6)] == [256, 512, 1024]
    assert tokens_per_chunk("auto", 10**6, trained) == 4096


@pytest.mark.trap(76)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, 320), (torch.bfloat16, 300), (torch.bfloat16, 600)])
def test_auto_runs_few_tokens_as_a_whole_if_that_needs_less(dtype, tokens, trained):
    head = nn.Linear(512, 4000, dtype=dtype).requires_grad_(trained)
    hidden = torch.randn(tokens, 512, dtype=dtype, requires_grad=True)
    peaks = {}
    for chunk in (256, tokens, "auto"):
        with LiveBytes(head, {"hidden": hidden}) as live:
            logits = chunked(head, lambda rows: nn.Linear.forward(head, rows), hidden, chunk)
            functional.cross_entropy(logits.float(), torch.zeros(tokens, dtype=torch.long)).backward()
            peaks[chunk] = live.peak_bytes - live.start_bytes
        head.weight.grad = head.bias.grad = hidden.grad = None
    assert peaks["auto"] == min(peaks.values())
    assert (type(logits) is Logits) == (tokens > 320 or not trained)


@pytest.mark.parametrize("autocast", [False, True])
def test_nothing_stays_alive(autocast, whole):
    """Gradients are computed before the backward, but freed with the loss, even with the garbage collector off."""
    head, hidden = toy(tokens=(4, 256))
    labels = torch.arange(1024) % WORDS
    with without_collector(), LiveBytes(head, {"hidden": hidden, "labels": labels}) as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = lazy(head, hidden * 1, 64)
            loss = loss_of(labels)(logits)
        assert live.current_bytes - live.start_bytes < 2 * logits.nbytes
        loss.backward()
        head.weight.grad = head.bias.grad = hidden.grad = None
        assert not whole
        logits.sin()
        assert live.current_bytes - live.start_bytes > logits.nbytes / 2
        del logits, loss
        whole.clear()
        assert live.current_bytes == live.start_bytes
