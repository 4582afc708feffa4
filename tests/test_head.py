"""The chunked head: what it computes, when it computes all logits after all, and what it leaves on a model.

Sums are taken in another order than by the plain head, so float32 is compared by relative norm, 16-bit types by their
error against float32. Every comparison also says that the head ran in chunks, or that it did not.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import pickle

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from conftest import assert_same, enable, step, without_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

import hf_ckpt
from hf_ckpt.engines import head as engine
from hf_ckpt.engines.head import Logits, chunked, tokens_per_chunk
from hf_ckpt.errors import HfCkptError
from hf_ckpt.families import base_model, vocabulary_head
from hf_ckpt.install import HeadForward, _warn_plain_head
from hf_ckpt.measure import LiveBytes
from hf_ckpt.tiny import VOCABULARY, tiny_batch, tiny_model

CHUNK = 5
ROUNDING = 2e-6
"""Relative norm of the difference that float32 sums taken in another order may have: 4e-7 to 9e-7 were seen."""


@pytest.fixture
def whole(monkeypatch):
    """Names nothing while no logits are computed as a whole; else holds those that were."""
    found = []
    values = Logits.values

    def watched(logits):
        found.append(logits)
        return values(logits)

    monkeypatch.setattr(Logits, "values", watched)
    return found


@pytest.fixture(autouse=True)
def forget_what_was_said():
    for said in (engine._tell, _warn_plain_head):
        said.cache_clear()


def on(model, head=CHUNK, **keys):
    """The model with its head in chunks, and nothing else."""
    hf_ckpt.install(model, {"policy": "none", "head": head, **keys})
    enable(model)
    return model


def calls(model):
    return hf_ckpt.describe(model).chunked_heads


def assert_near(expected, got, most=ROUNDING):
    """Relative norm of every difference; a gradient that is nearly zero is measured by the largest one."""
    assert expected.keys() == got.keys()
    scale = max(float(value.norm()) for name, value in expected.items() if name != "loss" and value is not None)
    assert scale > 0
    for name, value in expected.items():
        assert (value is None) == (got[name] is None), name
        if value is not None:
            size = max(float(value.norm()), 1e-2 * scale)
            assert float((value.double() - got[name].double()).norm()) <= most * size, name


def error(truth, found):
    """Relative norm of the difference of all gradients together."""
    names = [name for name, value in truth.items() if value is not None and name != "loss"]
    assert names
    gap = sum(float((truth[name].double() - found[name].double()).square().sum()) for name in names)
    return (gap / sum(float(truth[name].double().square().sum()) for name in names)) ** 0.5


def trained(model, batch, autocast=None):
    """Loss and gradients, and the outputs that they came of."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        outputs = model(**without_cache(model, batch))
    outputs.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": outputs.loss.detach(), **gradients}, outputs


# --- models -----------------------------------------------------------------------------------------------------------


def _of_class(model_class, config, dtype):
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return model_class(config).to(dtype).train()


def _sized(**keys):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {"vocab_size": VOCABULARY, "pad_token_id": 0, **sizes, **keys}


def masked_lm(dtype, **keys):
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _of_class(transformers.BertForMaskedLM, transformers.BertConfig(**_sized(**dropout, **keys)), dtype)


def roberta(dtype, **keys):
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64}
    return _of_class(transformers.RobertaForMaskedLM, transformers.RobertaConfig(**_sized(**dropout, **keys)), dtype)


def gemma(dtype, **keys):
    more = {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 3.0}
    return _of_class(transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**_sized(**more, **keys)), dtype)


def bart(dtype, **keys):
    layers = {
        f"{stack}_{what}": n for stack in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 4))
    }
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0, "max_position_embeddings": 64}
    config = transformers.BartConfig(vocab_size=VOCABULARY, **layers, **sizes, **keys)
    model = _of_class(transformers.BartForConditionalGeneration, config, dtype)
    model.final_logits_bias += torch.linspace(0, 1, VOCABULARY, dtype=dtype)
    return model


def _tiny(family):
    return lambda dtype, **keys: tiny_model(family, layers=2, dtype=dtype, **keys)


MODELS = {"llama": _tiny("llama"), "gpt2": _tiny("gpt2"), "t5": _tiny("t5")}
MODELS |= {"bert": masked_lm, "roberta": roberta, "gemma2": gemma, "bart": bart}
each_model = pytest.mark.parametrize("name", MODELS)


def batch_of(name):
    """23 tokens a sequence, so that the last chunk is shorter than the others."""
    batch = tiny_batch(
        "t5" if name in ("t5", "bart") else "llama", batch=2, tokens=46 if name in ("t5", "bart") else 23
    )
    if name in ("bert", "roberta"):
        batch["labels"][torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(3)) < 0.6] = -100
    return batch


def adapted(model, how):
    """Which parameters are trained."""
    head = vocabulary_head(model)
    if how == "frozen head":
        head.requires_grad_(False)
    if how == "head only":
        model.requires_grad_(False)
        head.requires_grad_(True)
    if how in ("lora", "modules to save"):
        torch.manual_seed(1)
        places = {"target_modules": ["q_proj", "lm_head"]} if how == "lora" else {"target_modules": ["q_proj"]}
        saved = {"modules_to_save": ["lm_head"]} if how == "modules to save" else {}
        return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **places, **saved))
    return model


def both(name, how="all", dtype=torch.float32, autocast=None, **keys):
    """What plain and chunked heads give; the latter did run in chunks, and the logits it returned are in none."""
    plain = adapted(MODELS[name](dtype, **keys), how)
    ours = on(adapted(MODELS[name](dtype, **keys), how))
    batch = batch_of(name)
    expected, _ = trained(plain, batch, autocast)
    got, outputs = trained(ours, batch, autocast)
    assert calls(ours) == 1
    assert type(outputs.logits) is Logits
    assert outputs.logits.computed is None
    assert got["loss"].dtype == expected["loss"].dtype
    return expected, got, adapted(MODELS[name](dtype, **keys).float(), how)


@pytest.mark.compat
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@each_model
def test_the_same_gradients(name, tied, whole):
    expected, got, _ = both(name, tie_word_embeddings=tied)
    assert_near(expected, got)
    assert not whole


@pytest.mark.parametrize("how", ["frozen head", "head only", "lora", "modules to save"])
def test_the_same_gradients_whatever_is_trained(how, whole):
    expected, got, _ = both("llama", how, tie_word_embeddings=False)
    assert any("lm_head" in key for key in got) == (how != "frozen head")
    assert_near(expected, got)
    assert not whole


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["bf16", "autocast"])
@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, "all") for name in MODELS), *(("llama", how) for how in ("frozen head", "head only", "lora"))],
)
def test_16_bit_gradients_are_no_worse(name, how, autocast, whole):
    dtype = torch.bfloat16 if autocast is None else torch.float32
    tied = {"tie_word_embeddings": False} if how != "all" else {}
    expected, got, exact = both(name, how, dtype, autocast, **tied)
    truth, _ = trained(exact, batch_of(name))
    assert error(truth, got) <= 1.2 * error(truth, expected)
    assert abs(got["loss"] - truth["loss"]) <= 1.2 * abs(expected["loss"] - truth["loss"]) + 1e-4
    assert not whole


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_only_tokens_with_a_label_are_computed(name, monkeypatch):
    rows = []
    linear = functional.linear

    def counted(given, weight, *bias):
        rows.append(len(given) if len(weight) == VOCABULARY else 0)
        return linear(given, weight, *bias)

    model, batch = on(MODELS[name](torch.float32)), batch_of(name)
    monkeypatch.setattr(functional, "linear", counted)
    trained(model, batch)
    labelled = int((batch["labels"] != -100).sum())
    assert sum(rows) == labelled < batch["labels"].numel() / 2
    assert max(rows) == CHUNK


# --- losses -----------------------------------------------------------------------------------------------------------

TOKENS, HIDDEN, WORDS = (3, 7), 8, 50


def toy(dtype=torch.float32, tokens=TOKENS, head=None, seed=2):
    """A head and what it is given."""
    torch.manual_seed(seed)
    head = head or nn.Linear(HIDDEN, WORDS).to(dtype)
    return head, torch.randn(*tokens, HIDDEN, dtype=dtype, requires_grad=True)


def lazy(head, hidden, chunk=4):
    """Its logits, in chunks."""
    logits = chunked(head, lambda given: type(head).forward(head, given), hidden, chunk)
    assert type(logits) is Logits
    return logits


def labels_for(tokens=TOKENS, ignored=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, WORDS, tokens, generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = -100
    return labels


def differentiate(work, make, head, hidden):
    head.zero_grad(set_to_none=True)
    hidden.grad = None
    loss = work(make(head, hidden))
    loss.sum().backward()
    return {"loss": loss.detach(), "hidden": hidden.grad, **{name: p.grad for name, p in head.named_parameters()}}


def same_toys(work, whole, *, dtype=torch.float32, most=ROUNDING, head=None, computed=0):
    head, hidden = toy(dtype, head=head)
    expected = differentiate(work, nn.Module.__call__, head, hidden)
    got = differentiate(work, lazy, head, hidden)
    assert expected["loss"].dtype == got["loss"].dtype
    assert expected["loss"].shape == got["loss"].shape
    assert_near(expected, got, most)
    assert len({id(logits) for logits in whole}) == computed


def loss_of(**options):
    """`cross_entropy` as losses of models call it."""
    labels = labels_for().view(-1)
    return lambda logits: functional.cross_entropy(logits.float().view(-1, WORDS), labels, **options)


def _selected(logits):
    """As TRL takes the logarithms of the labels' probabilities, in float32."""
    labels = labels_for(ignored=0.0).unsqueeze(-1)
    chosen = logits.gather(-1, labels).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def _selected_by_rows(logits):
    """As TRL does it in 16 bits."""
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
    "selected": _selected,
    "selected at a temperature": lambda logits: _selected(logits / 1.3),
    "selected by rows": _selected_by_rows,
    "one row": lambda logits: logits[1, 2].logsumexp(-1) - logits[0, 0].gather(0, torch.tensor([3])).sum(),
    "label smoother": _smoothed,
    "part": lambda logits: functional.cross_entropy(logits[labels_for() >= 0], labels_for()[labels_for() >= 0]),
    "pieces": lambda logits: torch.cat([part.logsumexp(-1) for part in logits.reshape(-1, WORDS).split(6)]),
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
    """They are taken of the scaled loss: unscaled ones of many like tokens overflow, and those of rare words vanish."""
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
    """Plain heads give 0 / 0, and gradients that are all zero."""
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
    """Frozen throughout, but with gradients on."""
    for head in (nn.Linear(HIDDEN, WORDS), Shared()):
        head, hidden = toy(head=head.requires_grad_(False))
        loss = loss_of()(lazy(head, hidden.detach()))
        assert not loss.requires_grad
        torch.testing.assert_close(loss, loss_of()(head(hidden.detach())))
    assert not whole


def test_a_reparametrised_head_is_run_whole():
    """Its weight is a result of autograd itself."""
    head, hidden = toy()
    head = torch.nn.utils.weight_norm(head)
    head(hidden)  # its hook makes the weight
    assert type(chunked(head, head.forward, hidden, 4)) is torch.Tensor


def test_how_many_tokens():
    assert tokens_per_chunk(7, 10**6, trained=True) == 7
    assert [tokens_per_chunk("auto", tokens, trained=False) for tokens in (10, 4096, 10**6)] == [256, 512, 1024]
    assert tokens_per_chunk("auto", 10**6, trained=True) == 4096


# --- other uses of logits ---------------------------------------------------------------------------------------------


class Squared(torch.autograd.Function):
    """What users write for themselves."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


class Doubled(torch.autograd.Function):
    """Has a gradient of its own, so what follows must go through it."""

    @staticmethod
    def forward(ctx, logits):
        return logits * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Passed(Doubled):
    """As DDP puts one behind what a model returns."""

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
    """Detached, or made under `no_grad`: what comes of them has no gradient."""
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
    for work in (loss_of(), _selected):
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
    """Scaled, given by hand, and of one input only."""
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
    """Plain logits would give other values there."""
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


@pytest.mark.compat
def test_logits_that_the_user_keeps():
    """Used after backward, and saved."""
    plain, ours = (tiny_model("llama", layers=1) for _ in range(2))
    on(ours)
    expected, got = (trained(model, batch_of("llama"))[1] for model in (plain, ours))
    assert type(got.logits) is Logits
    assert torch.equal(got.logits.argmax(-1), expected.logits.argmax(-1))
    assert got.logits.computed is None
    saved = io.BytesIO()
    torch.save(got, saved)
    saved.seek(0)
    read = torch.load(saved, weights_only=False).logits
    for found in (got.logits.detach().cpu(), got.logits, read, pickle.loads(pickle.dumps(got.logits.detach()))):
        assert torch.equal(found + 0, expected.logits)
    assert torch.equal(got.logits[:, -1, :5], expected.logits[:, -1, :5])
    assert got.logits.detach().numpy().sum() == expected.logits.detach().numpy().sum()


# --- training loops ---------------------------------------------------------------------------------------------------


class Watched(Trainer):
    """Notes what the model returned."""

    def compute_loss(self, model, inputs, return_outputs=False, **keys):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **keys)
        self.seen = [*getattr(self, "seen", []), outputs["logits"]]
        return (loss, outputs) if return_outputs else loss


@pytest.mark.compat
@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}], ids=["plain", "smoothed"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_trainer(name, options, tmp_path, whole):
    """`num_items_in_batch` over two micro-batches of unequal numbers of labels, and Trainer's own loss."""
    batch = tiny_batch(name, batch=12, tokens=32)
    generator = torch.Generator().manual_seed(1)
    batch["labels"][torch.rand(batch["labels"].shape, generator=generator) < 0.4] = -100
    if name == "t5":
        batch["decoder_input_ids"] = batch["labels"].clamp(min=0)  # smoothing takes the labels away
    rows = [{key: value[index] for key, value in batch.items()} for index in range(12)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.5,
        **options,
    )
    found = []
    for head in ("full", CHUNK):
        model = on(tiny_model(name, layers=1), head)
        model.accepts_loss_kwargs = name != "t5"
        trainer = Watched(model, arguments, train_dataset=rows)
        trainer.train()
        found.append({key: p.detach().clone() for key, p in model.named_parameters()})
        assert calls(model) == (6 if head == CHUNK else 0)
        assert all((type(logits) is Logits) == (head == CHUNK) for logits in trainer.seen)
    start = dict(tiny_model(name, layers=1).named_parameters())
    moved = [{key: value - start[key].detach() for key, value in one.items()} for one in found]
    assert_near(*found, most=1e-6)
    assert error(*moved) < 1e-4  # differences of parameters, which are rounded to 6e-8 of their size
    assert not whole


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_ddp(options, whole):
    expected, _ = trained(tiny_model("llama", layers=1), batch_of("llama"))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = on(tiny_model("llama", layers=1))
        wrapped = DistributedDataParallel(model, **options)
        for step_number in range(3):
            got, outputs = trained(wrapped, {**batch_of("llama"), "use_cache": False})
            assert_near(expected, {name.removeprefix("module."): value for name, value in got.items()})
            assert calls(model) == step_number + 1
            assert type(outputs.logits) is Logits
        assert not whole
        wrapped.zero_grad()
        loss_of_outputs = wrapped(**batch_of("llama"), use_cache=False).logits.float().square().mean()
        loss_of_outputs.backward()
        ours = model.lm_head.weight.grad.clone()
    finally:
        distributed.destroy_process_group()
    plain = tiny_model("llama", layers=1)
    plain(**batch_of("llama"), use_cache=False).logits.float().square().mean().backward()
    torch.testing.assert_close(ours, plain.lm_head.weight.grad)


def test_with_checkpointed_blocks(whole):
    plain, ours = (tiny_model("llama", layers=2) for _ in range(2))
    on(ours, policy="selective")
    expected, got = (trained(model, batch_of("llama"))[0] for model in (plain, ours))
    assert_near(expected, got)
    assert calls(ours) == 1
    assert all(hf_ckpt.describe(ours).recomputed.values())
    assert not whole


# --- where the head stays plain ---------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_evaluation_is_untouched(name):
    plain, ours = MODELS[name](torch.float32), on(MODELS[name](torch.float32))
    batch = without_cache(ours, batch_of(name))
    trained(ours, batch)
    for mode, context in ((True, torch.no_grad()), (False, torch.no_grad()), (False, contextlib.nullcontext())):
        with context:
            expected, got = (model.train(mode)(**batch) for model in (plain, ours))
        assert type(got.logits) is torch.Tensor
        assert torch.equal(expected.logits, got.logits)
        assert torch.equal(expected.loss, got.loss)
    if name != "bert":
        keys = {"max_new_tokens": 4, "do_sample": False}
        expected, got = (model.generate(batch["input_ids"][:, :8], **keys) for model in (plain, ours))
        assert torch.equal(expected, got)
    assert calls(ours) == 1


def _dropout_in_the_head():
    config = LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.5)
    return get_peft_model(tiny_model("llama", layers=1), config), "an active dropout"


def _hooked_by_accelerate():
    model = tiny_model("llama", layers=1)
    add_hook_to_module(model.model.layers[0], ModelHook())
    return model, "sharded or moved"


def _no_head():
    return tiny_model("bert", layers=1), "no projection onto a vocabulary"


def _foreign_forward():
    model = tiny_model("llama", layers=1)
    model.lm_head.forward = model.lm_head.forward
    return model, "something else has replaced its forward"


@pytest.mark.parametrize("make", [_dropout_in_the_head, _hooked_by_accelerate, _no_head, _foreign_forward])
def test_plain_with_the_reason_said_once(make, caplog):
    model, reason = make()
    plain = copy.deepcopy(model)
    batch = tiny_batch("bert" if make is _no_head else "llama")
    on(model)
    assert_same(step(plain, batch), step(model, batch))
    step(model, batch)
    enable(model)
    assert calls(model) == 0
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [reason in message for message in said] == [True]
    hf_ckpt.uninstall(model)
    assert all(not isinstance(vars(module).get("forward"), HeadForward) for module in model.modules())


def test_a_head_that_nobody_calls_is_said_once(caplog):
    """A loss may be computed from its weight, as TRL's are. A forward that failed on its way is no such thing."""
    model = on(tiny_model("llama", layers=1))
    batch = batch_of("llama")

    def said():
        return [record.getMessage() for record in caplog.records if "nobody calls it" in record.getMessage()]

    def fails(module, args):
        raise ZeroDivisionError

    for _ in range(3):
        handle = model.model.norm.register_forward_pre_hook(fails)
        with pytest.raises(ZeroDivisionError):
            step(model, batch)
        handle.remove()
        step(model, batch)
        with torch.no_grad():
            model.model(batch["input_ids"])
        model.eval()
        model.model(batch["input_ids"])
        model.train()
    assert calls(model) == 3
    assert said() == []
    for _ in range(5):
        hidden = model.model(batch["input_ids"]).last_hidden_state
        (hidden @ model.lm_head.weight.T).sum().backward()
    assert len(said()) == 1
    step(copy.deepcopy(model), batch)
    assert calls(model) == 3


def test_one_chunk_is_the_plain_head():
    model = on(tiny_model("llama", layers=1), 46)
    assert_same(step(tiny_model("llama", layers=1), batch_of("llama")), step(model, batch_of("llama")))
    assert calls(model) == 0
    hf_ckpt.install(model, {"policy": "none", "head": 45})
    step(model, batch_of("llama"))
    assert calls(model) == 1


# --- on a model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("take_off", ["uninstall", "disable", "another spec"])
def test_what_was_put_on_comes_off(take_off):
    model = tiny_model("llama", layers=1)
    before = dict(vars(model.lm_head))
    on(model)
    enable(model)  # twice
    step(model, batch_of("llama"))
    assert vars(model.lm_head).keys() - before.keys() == {"forward"}
    assert calls(model) == 1
    if take_off == "uninstall":
        hf_ckpt.uninstall(model)
    elif take_off == "disable":
        model.gradient_checkpointing_disable()
    else:
        hf_ckpt.install(model, {"policy": "none"})
    assert vars(model.lm_head) == before
    assert_same(step(tiny_model("llama", layers=1), batch_of("llama")), step(model, batch_of("llama")))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_go_on_by_themselves(copied, whole):
    model = on(tiny_model("llama", layers=1))
    expected, _ = trained(model, batch_of("llama"))
    twin = copied(model)
    assert calls(twin) == calls(model) == 1
    assert vars(twin.lm_head)["forward"]._head() is twin.lm_head
    got, _ = trained(twin, batch_of("llama"))
    assert_same(expected, got)
    assert (calls(twin), calls(model)) == (2, 1)
    hf_ckpt.uninstall(twin)
    assert "forward" not in vars(twin.lm_head)
    trained(model, batch_of("llama"))
    assert calls(model) == 2
    assert not whole


@pytest.mark.parametrize("again", [False, True])
def test_adapters_around_the_head_after_enabling(again):
    """Its base layer alone would be in chunks, so all is computed; enabling again takes the adapted head."""
    plain, ours = (tiny_model("llama", layers=1) for _ in range(2))
    plain, ours = adapted(plain, "lora"), adapted(on(ours), "lora")
    if again:
        enable(ours)
    expected, got = (trained(model, batch_of("llama")) for model in (plain, ours))
    assert_near(expected[0], got[0])
    assert (type(got[1].logits) is Logits) == again
    assert calls(ours) == 1
    hf_ckpt.uninstall(ours)
    assert all("forward" not in vars(module) for module in base_model(ours).modules())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_have_a_plain_head(backend):
    torch._dynamo.reset()
    expected, _ = trained(tiny_model("llama", layers=1), batch_of("llama"))
    model = on(tiny_model("llama", layers=1))
    compiled = torch.compile(model, backend=backend)
    outputs = compiled(**without_cache(model, batch_of("llama")))
    outputs.loss.backward()
    got = {"loss": outputs.loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}
    assert type(outputs.logits) is torch.Tensor
    assert calls(model) == 0
    trained(model, batch_of("llama"))
    assert calls(model) == 1
    assert_near(expected, got)


# --- memory -----------------------------------------------------------------------------------------------------------


def peak_of(head, hidden, labels, make, **holders):
    """The most that is alive above what was before, through forward, loss and backward."""
    with LiveBytes(head, {"hidden": hidden, "labels": labels}) as live:
        logits = make(head, hidden * 1)
        functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels).backward()
        return live.peak_bytes - live.start_bytes


@pytest.mark.parametrize(
    ("dtype", "tokens", "size", "trained", "least"),
    [(torch.float32, 2048, 256, True, 4), (torch.float32, 2048, 32, False, 7), (torch.bfloat16, 1024, 32, False, 3)],
    ids=["float32", "float32, frozen", "bfloat16, frozen"],
)
def test_the_peak_falls(dtype, tokens, size, trained, least, whole):
    """`auto` takes 256 tokens at a time here."""
    torch.manual_seed(0)
    head = nn.Linear(size, 32000, bias=False).to(dtype).requires_grad_(trained)
    hidden = torch.randn(1, tokens, size, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 32000, (tokens,))
    plain = peak_of(head, hidden, labels, nn.Module.__call__)
    head.weight.grad = hidden.grad = None
    ours = peak_of(head, hidden, labels, lambda head, hidden: lazy(head, hidden, "auto"))
    assert plain > tokens * 32000 * (dtype.itemsize + 4)
    assert plain >= least * ours, plain / ours
    assert not whole


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["plain", "autocast"])
def test_nothing_stays_alive(autocast, whole):
    """With the garbage collector off: before the backward the gradients are there, and go with the loss."""
    head, hidden = toy(tokens=(4, 256))
    labels = labels_for((4, 256)).view(-1)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes(head, {"hidden": hidden, "labels": labels}) as live:
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                logits = lazy(head, hidden * 1, 64)
                loss = functional.cross_entropy(logits.float().view(-1, WORDS), labels)
            held = live.current_bytes - live.start_bytes
            assert held < logits.nbytes
            loss.backward()
            head.weight.grad = head.bias.grad = hidden.grad = None
            assert not whole
            logits.exp()
            assert live.current_bytes - live.start_bytes > logits.nbytes / 2
            del logits, loss
            whole.clear()
            assert live.current_bytes == live.start_bytes
    finally:
        gc.enable()


def test_a_models_outputs_free_everything():
    model = on(tiny_model("llama", layers=1))
    batch = without_cache(model, batch_of("llama"))
    model(**batch).loss.backward()
    model.zero_grad()
    gc.collect()
    gc.disable()
    try:
        with LiveBytes(model) as live:
            outputs = model(**batch)
            assert type(outputs.logits) is Logits
            outputs.loss.backward()
            model.zero_grad()
            del outputs
            assert live.current_bytes - live.start_bytes <= 1024  # what transformers caches
    finally:
        gc.enable()
